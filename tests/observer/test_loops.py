"""Training loops of unusual shape under the observer: the same weights bit for bit, the right steps, pauses and phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.observer.scripted import ENTRYPOINTS, Done, Timeline

STEPS = {
    "line_search": 6,
    "closure": 6,
    "skipping_scaler": 6,
    "recomputing": 6,
    "accumulating": 2,
    "evaluating_with_gradients": 18,
    "evaluating_a_part": 18,
    "one_batch": 37,  # of 100 in all, the first 64 were taken for one batch's
    "two_loaders": 6,
    "retrying": 4,
    "mixed_precision": 6,
    "compiled": 6,
}
EVALUATIONS = {"accumulating": [1], "evaluating_with_gradients": [6, 12, 18], "evaluating_a_part": [6, 12]}
"""After which steps."""


@pytest.fixture(scope="module")
def loops(tmp_path_factory) -> Done:
    folder = tmp_path_factory.mktemp("loops")
    done = subprocess.run(
        [sys.executable, "-m", "tests.observer.loops", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ENTRYPOINTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Done(done.returncode, done.stdout, done.stderr, folder)


@pytest.fixture
def timeline(loops, request) -> Timeline:
    return Done(0, "", "", loops.folder / request.param).timeline()


def test_every_loop_ends_with_the_same_weights(loops):
    digests = json.loads(loops.stdout.splitlines()[-1])
    assert {*digests} == {*STEPS}
    assert all(without == observed for without, observed in digests.values()), digests
    assert "launcher observer" not in loops.stderr


@pytest.mark.parametrize(("timeline", "steps"), STEPS.items(), ids=STEPS, indirect=["timeline"])
def test_steps_pauses_and_phases_of_a_loop(timeline, steps, request):
    name = request.node.callspec.id
    assert sum(line["extra"]["steps"] for line in timeline.of("steps")) == timeline.steps == steps
    assert [line["step"] for line in timeline.of("evaluate")] == EVALUATIONS.get(name, [])
    for line in timeline.of("steps"):
        phases = {phase: seconds for phase, seconds in line["seconds"].items() if phase != "step"}
        assert {"forward", "backward", "optimizer"} <= {*phases}
        assert min(phases.values()) >= 0 and sum(phases.values()) <= line["seconds"]["step"] + 1e-6


@pytest.mark.parametrize("timeline", ["mixed_precision"], indirect=True)
def test_autocast_is_named_with_its_line(timeline):
    [line] = timeline.setup("precision")
    assert line["values"]["autocast"] == "bfloat16" and line["text"].startswith("with torch.autocast(")


@pytest.mark.parametrize("timeline", ["compiled"], indirect=True)
def test_what_is_compiled_is_named_once_a_line(timeline):
    assert [line["text"][:4] for line in timeline.setup("compile")] == ["fast", "step"]


def test_dynamo_says_nothing_of_the_hooks(loops):
    assert "Dynamo does not know" not in loops.stderr


@pytest.mark.parametrize("timeline", ["two_loaders"], indirect=True)
def test_of_two_loaders_side_by_side_the_first_gives_the_epochs(timeline):
    assert [line["values"]["role"] for line in timeline.setup("loader")] == ["training", "unknown"]
    assert timeline.of("steps")[-1]["extra"]["epoch_steps"] == 6
