"""A sample of `make bench-planted-foreign`: scripts that know nothing of the kit, watched, with something planted that waits and does
not compute, so that tests beside them change nothing; and KT's fault on the simulated accelerator, which outdoes what is beside it."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def suite():
    sys.path.insert(0, str(ROOT / "tests/benchmarks"))
    yield importlib.import_module("planted_foreign")
    sys.path.remove(str(ROOT / "tests/benchmarks"))


@pytest.fixture(scope="module")
def data(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted") / "data"
    suite.photographs(folder, train=8, held_out=1)
    return folder


SMALL = {"model": "squeezenet1_1", "size": 48, "batch-size": 8, "steps": 24}
"""So little arithmetic that a busy machine adds little to a step."""


@pytest.mark.parametrize(
    ("framework", "kind", "arguments"),
    [
        ("lightning", "storage_bound", {"workers": 2, "read-seconds": 0.2}),
        ("plain", "step_outliers", {"workers": 1, "size": 112, "steps": 80, "pause-every": 25, "pause-seconds": 6}),
        ("trainer", "slow_epoch_starts", {"workers": 1, "images": 32, "steps": 20, "open-seconds": 10}),
    ],
)
@pytest.mark.slow
def test_a_bottleneck_planted_in_a_foreign_script_comes_first(suite, data, framework, kind, arguments):
    case = suite.Case(kind, "", {**SMALL, **arguments}, threads=1)
    found = suite.row(framework, case, data, f"{framework}-{kind}", tell=True)
    assert found[3:5] == [kind, "yes"] and found[6] in ("yes", "-"), found


@pytest.mark.slow
@pytest.mark.alone
def test_kts_fault_on_the_simulated_accelerator_is_its_workers_and_the_same_job_with_two_is_not_blamed_for_them(
    suite, data
):
    [many, *_] = [case for case in suite.cases(suite.SIMULATED) if case.kind == "too_many_workers"]
    found = suite.findings(suite.SIMULATED, many, data, "many")
    # beside other tests a few steps may be slower still
    [blamed] = [one for one in found if one["kind"] == "too_many_workers"]
    assert [one for one in found if one["kind"] not in ("noisy_neighbour", "step_outliers")][0] is blamed, found
    assert blamed["at"]["text"].startswith("loader = DataLoader("), blamed
    few = suite.Case(None, "", {**many.arguments, "workers": 2})
    kinds = {finding["kind"] for finding in suite.findings(suite.SIMULATED, few, data, "few")}
    assert "too_many_workers" not in kinds
