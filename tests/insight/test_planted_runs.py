"""A sample of `make bench-planted`: real runs with something planted, and what the diagnosis says of them.

Only plants that wait and do not compute, so that tests beside them change nothing.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest

from launcher.insight.diagnosis import Diagnosis
from launcher.insight.measurements import read
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def suite():
    sys.path.insert(0, str(ROOT / "tests/benchmarks"))
    yield importlib.import_module("planted_bottlenecks")
    sys.path.remove(str(ROOT / "tests/benchmarks"))


@pytest.fixture(scope="module")
def data(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted") / "data"
    suite.photographs(folder, train=4, held_out=1)
    return folder


@pytest.mark.parametrize(
    ("kind", "fix", "plant", "seconds"),
    [
        ("storage_bound", "launcher prepare SOURCE TARGET --shards 100MB", "SLOW_READS", 0.2),
        ("host_to_device_bound", "image_size", "SLOW_COPIES", 4.0),
    ],
    ids=["storage_bound", "host_to_device_bound"],
)
@pytest.mark.slow
def test_a_planted_bottleneck_is_named_with_its_share_and_a_fix(suite, data, kind, fix, plant, seconds):
    case = [case for case in suite.CASES if case.kind == kind][-1]  # the harsher
    plant = getattr(importlib.import_module("planted_cases"), plant).format(
        seconds=seconds
    )  # long beside what a busy machine adds to a step
    case = replace(case, plant=plant, settings={**case.settings, "max_steps": 10, "image_size": 64})
    found = Diagnosis(read(str(suite.train(case, suite.base(case), case.plant, data, None, kind))))
    # what else runs on this machine was not planted
    top = next(finding for finding in found.findings if finding.kind != "noisy_neighbour")
    assert top.kind == kind, str(found)
    assert top.share > 0.3 and any(fix in str(each) for each in top.fixes), str(found)
