"""Training loops of unusual shape under the observer: the same weights bit for bit, the right steps, pauses and phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.observer.loops import LOOPS
from tests.observer.scripted import ENTRYPOINTS, Done, Timeline

STEPS = {
    "line_search": 6,
    "closure": 6,
    "skipping_scaler": 6,
    "recomputing": 6,
    "accumulating": 2,
    "evaluating_with_gradients": 18,
    "generating_without_gradients": 12,
    "accumulating_without_gradients": 3,
    "accumulating_with_a_rest": 3,
    "cycling_a_second_loader": 12,
    "stepping_within_backward": 6,
    "fetching_without_gradients": 12,
    "a_new_dataset_each_epoch": 18,
    "evaluating_one_batch": 13,
    "reading_one_ahead": 12,
    "reading_a_part": 8,
    "reading_one_of_each_pass": 6,
    "looking_at_a_batch": 12,
    "looking_into_the_training": 18,
    "measuring_on_what_it_trains": 18,
    "never_ending": 30,
    "by_gradients": 18,
    "caching_samples": 6,
    "lists_of_samples": 6,
    "read_once": 6,
    "micro_batches": 6,
    "attribute_dictionary": 6,
    "a_shape_that_is_a_method": 6,
    "opening_late": 6,
    "drawing_to_count": 12,
    "evaluating_a_part": 18,
    "attacking_in_evaluation": 18,
    "attacking_without_gradients": 18,
    "evaluating_on_its_own": 12,
    "asking_itself": 6,
    "one_batch": 37,  # of 100 in all, the first 64 were taken for one batch's
    "without_a_loader": 6,  # the last alone in a window, with all its phases
    "two_loaders": 6,
    "retrying": 4,
    "beginning_anew": 9,
    "mixed_precision": 6,
    "compiled": 6,
    "compiled_whole": 6,
}
UNSEEN = {"by_gradients": {"backward", "forward"}}
"""Phases that no hook sees."""
EVALUATIONS = {
    "accumulating": [1],
    "evaluating_with_gradients": [6, 12, 18],
    "generating_without_gradients": [6, 12],
    "fetching_without_gradients": [3, 9],
    "a_new_dataset_each_epoch": [6, 12, 18],
    "evaluating_one_batch": [4, 8],
    "looking_at_a_batch": [6, 12],
    "measuring_on_what_it_trains": [6, 12, 18],
    "evaluating_a_part": [6, 12],
    "attacking_in_evaluation": [6, 12, 18],
    "attacking_without_gradients": [6, 12, 18],
    "evaluating_on_its_own": [4, 8, 12],
}
"""After which steps."""


@pytest.mark.slow
def test_loops_end_with_the_same_weights_and_are_followed_step_by_step(tmp_path):
    """One test for all of them: the process that runs them is what takes the time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.observer.loops", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ENTRYPOINTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "launcher observer" not in done.stderr and "Dynamo does not know" not in done.stderr
    digests = json.loads(done.stdout.splitlines()[-1])
    assert {*digests} == {*LOOPS} <= {*STEPS}
    assert all(without == observed for without, observed in digests.values()), digests
    timelines = {name: Done(0, "", "", tmp_path / name).timeline() for name in LOOPS}
    for name, timeline in timelines.items():
        check_steps(name, timeline)
    check_without_gradients(timelines)
    check_between_passes(timelines)
    check_roles_and_epochs(timelines)
    check_never_ending(timelines["never_ending"])
    [autocast] = timelines["mixed_precision"].setup("precision")
    assert autocast["values"]["autocast"] == "bfloat16" and autocast["text"].startswith("with torch.autocast(")
    assert [line["text"][:4] for line in timelines["compiled"].setup("compile")] == ["fast", "step"]
    alone = timelines["evaluating_on_its_own"]
    assert [line["text"] for line in alone.setup("evaluation")] == ["model.eval()"]
    assert all(3 <= line["seconds"] < 6 for line in alone.of("evaluate"))
    assert max(line["seconds"]["step"] for line in alone.of("steps")[1:]) < 2.5
    assert [line["step"] for line in alone.of("checkpoint")] == [8]
    [by_gradients] = timelines["by_gradients"].setup("loader")
    assert by_gradients["values"]["role"] == "training"
    assert timelines["caching_samples"].of("checkpoint") == []
    for line in timelines["caching_samples"].of("steps"):
        assert line["seconds"]["data_wait"] <= line["seconds"]["step"]
    for line in timelines["lists_of_samples"].of("steps"):
        assert abs(line["extra"]["images_per_second"] * line["seconds"]["step"] - 5) < 0.01
    for line in timelines["attribute_dictionary"].of("steps"):
        assert abs(line["extra"]["images_per_second"] * line["seconds"]["step"] - 4) < 0.01
    counted = timelines["drawing_to_count"]  # by its first pass
    assert [line["values"]["batches"] for line in counted.setup("loader")] == [None, 6]
    assert "epoch_steps" not in counted.of("steps")[0]["extra"] and counted.of("steps")[-1]["extra"]["epoch_steps"] == 6
    rest = timelines["accumulating_with_a_rest"].of("steps")  # 4, 2 + 4 and 2 + 4 batches of 4
    assert round(sum(_images(line) for line in rest)) == 4 * 16
    cycled = timelines["cycling_a_second_loader"]
    assert _roles(cycled) == {1: "training", 2: "training"}
    assert cycled.of("steps")[-1]["extra"]["epoch_steps"] == 6 and cycled.of("steps")[-1]["epoch"] == 2
    assert round(sum(_images(line) for line in cycled.of("steps"))) == 2 * 4 * 12, "the labelled ones too"
    for line in timelines["stepping_within_backward"].of("steps"):  # 2 ms for each of the parameters
        assert line["seconds"]["backward"] >= 0.002 * 4
    side_by_side = timelines["two_loaders"]  # the first gives the epochs
    assert _roles(side_by_side) == {1: "training", 2: "training"}
    assert side_by_side.of("steps")[-1]["extra"]["epoch_steps"] == 6


def _images(line: dict) -> float:
    """Of a window's steps."""
    return line["extra"]["images_per_second"] * line["seconds"]["step"] * line["extra"]["steps"]


def _roles(timeline: Timeline) -> dict[int, str]:
    """Of each loader, as it turned out."""
    return {line["values"]["id"]: line["values"]["role"] for line in timeline.setup("loader")}


def check_steps(name: str, timeline: Timeline) -> None:
    assert sum(line["extra"]["steps"] for line in timeline.of("steps")) == timeline.steps == STEPS[name], name
    assert [line["step"] for line in timeline.of("evaluate")] == EVALUATIONS.get(name, []), name
    for line in timeline.of("steps"):
        phases = {phase: seconds for phase, seconds in line["seconds"].items() if phase != "step"}
        assert {"forward", "backward", "optimizer"} - {*phases} <= UNSEEN.get(name, set()), name
        assert min(phases.values()) >= 0 and sum(phases.values()) <= line["seconds"]["step"] + 1e-6, name


def check_without_gradients(timelines: dict[str, Timeline]) -> None:
    """Batches that are trained on are no evaluation's, however they are asked for; and the other way round."""
    for name, roles in {
        "generating_without_gradients": {1: "training", 2: "evaluation"},
        "accumulating_without_gradients": {1: "training"},
        "fetching_without_gradients": {1: "evaluation", 2: "training", 3: "training"},
        "evaluating_one_batch": {1: "evaluation"},
    }.items():
        assert _roles(timelines[name]) == roles, name
    for name in ("generating_without_gradients", "fetching_without_gradients"):
        [start] = timelines[name].of("start")
        assert "data_wait" not in start["not_measured"], name
        assert all(line["seconds"]["forward"] >= 0.02 for line in timelines[name].of("steps")), name
        assert all("data_wait" in line["seconds"] for line in timelines[name].of("steps")), name
    alone = timelines["evaluating_one_batch"]
    assert all(3 <= line["seconds"] < 6 for line in alone.of("evaluate"))
    assert max(line["seconds"]["step"] for line in alone.of("steps")[1:]) < 2.5
    assert not any("data_wait" in line["seconds"] for line in alone.of("steps"))


def check_between_passes(timelines: dict[str, Timeline]) -> None:
    """What a script does between two epochs lies in no step, whether or not a batch is requested at the end of one."""
    for name in ("reading_one_ahead", "reading_a_part"):
        assert max(line["extra"]["slowest_step"] for line in timelines[name].of("steps")[1:]) < 2.5, name
    each = timelines["reading_one_of_each_pass"].of("steps")
    assert sum(line["seconds"]["step"] * line["extra"]["steps"] for line in each) >= 5 * 0.02, "all but the last"


def check_roles_and_epochs(timelines: dict[str, Timeline]) -> None:
    """A loader is for training if steps are made of it, and a pass is an epoch if it is trained on."""
    looking = timelines["looking_at_a_batch"]
    assert _roles(looking) == {1: "evaluation", 2: "training"}
    assert round(sum(_images(line) for line in looking.of("steps"))) == 4 * 12
    measuring = timelines["measuring_on_what_it_trains"]
    assert all(line["seconds"] >= 6 * 0.02 for line in measuring.of("evaluate"))
    for name in ("attacking_in_evaluation", "attacking_without_gradients"):
        assert _roles(timelines[name]) == {1: "training", 2: "evaluation"}, name
    anew = timelines["a_new_dataset_each_epoch"]
    assert _roles(anew) == {1: "training", 2: "evaluation"}
    for timeline in (measuring, anew, timelines["looking_into_the_training"]):
        last = timeline.of("steps")[-1]
        assert (last["epoch"], last["extra"]["epoch_step"], last["extra"]["epoch_steps"]) == (3, 6, 6)


def check_never_ending(timeline: Timeline) -> None:
    """A loader with one iterator for all epochs."""
    last = timeline.of("steps")[-1]
    assert (last["epoch"], last["extra"]["epoch_step"], last["extra"]["epoch_steps"]) == (5, 6, 6)
    assert timeline.setup("loader")[-1]["values"]["batches"] == 6
