"""Two ranks on the stand-in GPU, each a process: they train what one does, and go on from a checkpoint to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.device import device_lines
from tests.device.runs import Runs
from tests.device.two_ranks import CASES
from tests.entrypoints.ranks import free_port, torchrun_environments

RANK = """
from pathlib import Path
from tests.device import device_lines
device_lines.watch()
from tests.device.two_ranks import main
main(Path({channels!r}), Path({out!r}), {ports})
"""


@pytest.fixture(scope="module")
def found(channels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two_ranks.py found, by case."""
    out = tmp_path_factory.mktemp("ranks")
    ports = [free_port() for _ in range(2 * len(CASES))]
    text = RANK.format(channels=str(channels), out=str(out), ports=ports)
    path = os.pathsep.join([str(ROOT), str(ROOT / "entrypoints")])
    common = {**os.environ, "PYTHONPATH": path, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", text], env={**common, **own}, stderr=subprocess.PIPE, text=True)
        for own in torchrun_environments(2)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-4000:] for error in errors)
    first, other = (json.loads((out / f"found-{rank}.json").read_text()) for rank in range(2))
    for written in (first, other):
        device_lines.seen.update(map(tuple, written["device lines"]))
    for case, of_other in other["cases"].items():
        first["cases"][case]["left behind"] += of_other["left behind"]
        first["cases"][case]["environment"] = other["environment"]
        first["cases"][case]["sums of the other"] = of_other["sums"]
    return first["cases"]


def test_a_group_on_gpus_keeps_efa_from_huge_pages_and_has_nccl_remember(found: dict[str, dict[str, Any]]):
    """Huge pages of EFA run out where processes fork: https://github.com/aws/aws-ofi-nccl/issues/179."""
    environment = found[next(iter(CASES))]["environment"]
    assert environment["FI_EFA_USE_HUGE_PAGE"] == "0" and environment["TORCH_FR_BUFFER_SIZE"] == "2000"


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_go_on_to_the_bit(found: dict[str, dict[str, Any]], case: str):
    of_case = found[case]
    assert set(of_case["losses"]) == {"1", "2", "3"}
    assert of_case["resumed"] == {"3": of_case["losses"]["3"]}
    assert of_case["differing"] == [] and of_case["left behind"] == []
    assert of_case["sums"] == of_case["sums of the other"], "the ranks exchanged their gradients"


@pytest.mark.parametrize("case", ["accumulation and compression", "filling teacher cache", "side streams"])
def test_two_ranks_train_what_one_does(found: dict[str, dict[str, Any]], runs: Runs, case: str):
    """Models without BatchNorm, which sees a rank's own images."""
    script, values = CASES[case]
    alone = runs(script, **values)
    assert found[case]["losses"] == {str(step): pytest.approx(loss, rel=2e-3) for step, loss in alone.losses.items()}
