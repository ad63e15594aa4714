"""Two ranks on the stand-in GPU, each a process: they train what one does, and go on from a checkpoint to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.device.runs import Runs
from tests.device.two_ranks import CASES
from tests.entrypoints.ranks import free_port, run_ranks


@pytest.fixture(scope="module")
def found(channels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two_ranks.py wrote, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    ports = [free_port() for _ in range(2 * len(CASES))]
    done = run_ranks(
        folder,
        f"""
        from tests.device.two_ranks import main
        main(pathlib.Path({str(channels)!r}), out, {ports})
        """,
    )
    assert [rank.returncode for rank in done] == [0, 0], "\n".join(rank.stderr[-4000:] for rank in done)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_go_on_to_the_bit(found: dict[str, dict[str, Any]], case: str):
    of_case = found[case]
    assert set(of_case["losses"]) == {"1", "2", "3"}
    assert of_case["resumed"] == {"3": of_case["losses"]["3"]}
    assert of_case["differing"] == [] and of_case["left behind"] == []


@pytest.mark.parametrize("case", ["accumulation and compression", "filling teacher cache"])
def test_two_ranks_train_what_one_does(found: dict[str, dict[str, Any]], runs: Runs, case: str):
    """Models without BatchNorm, which sees a rank's own images."""
    script, values = CASES[case]
    alone = runs(script, **values)
    assert found[case]["losses"] == {str(step): pytest.approx(loss, rel=2e-3) for step, loss in alone.losses.items()}
