"""What a trial of a tuning shows: its course over the images, and its losses."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from launcher.config.issues import UserError
from launcher.insight.evidence import Evidence
from launcher.insight.script import Script
from launcher.record.records import RunFolder, write_json
from launcher.runner.run import Run
from launcher.study import tune_course
from launcher.study.tune_course import Course, LossesCompared
from tests.insight.planted import plant


def course(each: float, start: float = 10.0, images: int = 100) -> Course:
    counted = np.arange(20.0, images + 1, 10)
    return Course(counted, start + (counted - 20) * each)


def test_trials_are_compared_over_the_images_that_all_of_them_did():
    slow, fast = course(0.2, images=60), course(0.1)
    stalled = Course(fast.images, fast.seconds + np.where(fast.images > 80, 100.0, 0.0))
    assert slow.each(60) == pytest.approx(0.2) and fast.each(60) == pytest.approx(0.1)
    assert stalled.each(60) == pytest.approx(0.1), "a pause behind the common part counts for neither"
    assert stalled.each(100) > 1
    before, after = (tune_course.costs([one], 60, None) for one in (slow, fast))
    assert before.median / after.median == pytest.approx(2)
    compiled = course(0.1, start=100.0)
    assert tune_course.costs([compiled], 60, 1020).median == pytest.approx(100 + 1000 * 0.1), "it pays its start"
    assert tune_course.costs([slow], 60, 220).median < tune_course.costs([compiled], 60, 220).median
    assert tune_course.costs([slow], 60, 10_020).median > tune_course.costs([compiled], 60, 10_020).median


def test_losses_are_the_same_bit_for_bit_or_within_what_repeats_differ_by():
    exact = {1: 0.5, 2: 0.25, 3: 0.125}
    same = tune_course.compare([exact, exact], [{**exact, 4: 9.0}])
    assert same.same and same.text == "the same losses in 3 logged steps, bit for bit"
    printed = tune_course.compare([exact, exact], [exact], printed=True)
    assert printed == LossesCompared(True, "the same losses in 3 logged steps, to the digits printed")
    other = tune_course.compare([exact, exact], [{**exact, 2: 0.25 + 1e-12}])
    assert not other.same and "first at step 2" in other.text
    noisy = [exact, {1: 0.5, 2: 0.2501, 3: 0.126}]
    assert tune_course.compare(noisy, [{1: 0.5, 2: 0.2502, 3: 0.1265}]).same
    assert not tune_course.compare(noisy, [{1: 0.5, 2: 0.2502, 3: 0.2}]).same
    assert not tune_course.compare(noisy, [{1: 0.5001, 2: 0.25, 3: 0.125}]).same, "no repeat differs at the first step"
    rounded = tune_course.compare(noisy, [{1: 0.5 + 1e-7, 2: 0.25, 3: 0.125}])
    assert rounded.same and "within the spread of repeats" in rounded.text, "as float32 is rounded"
    broken = tune_course.compare(noisy, [{1: 0.5, 2: math.nan, 3: 0.125}])
    assert not broken.same and "first at step 2: nan instead of 0.25" in broken.text
    assert "not compared" in tune_course.compare([{}], [exact]).text


def test_losses_of_a_script_without_a_seed_are_not_compared():
    first, again, after = ({1: start, 2: start - 0.1} for start in (2.31, 2.35, 2.52))
    found = tune_course.compare([first, again], [after])
    text = "losses not compared: two runs of the same settings differ from the first loss on; set a seed if it has none"
    assert found == LossesCompared(True, text)
    assert "differ from the first loss on" in tune_course.compare([first, {**first, 1: math.nan}], [after]).text
    of_zeros = [{1: 2.3, 2: loss, 3: loss} for loss in (2.2, 2.25, 2.31)]
    assert tune_course.compare(of_zeros[:2], of_zeros[2:]) == LossesCompared(True, text), (
        "a last layer of zeros: ln(classes) first"
    )
    grown = [{1: 2.3, 2: loss, 3: loss} for loss in (2.2, 2.2 + 1e-6, 2.31)]
    assert not tune_course.compare([grown[0], {**grown[1], 3: 2.25}], grown[2:]).same, "a GPU's noise grows"
    infinite = tune_course.compare([first, {**first, 1: math.inf}], [after])
    assert infinite == LossesCompared(True, text), "an infinity is no noise within which all is the same"
    assert not tune_course.compare([first], [after]).same


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_losses_that_are_no_numbers_in_all_trials_are_the_same(broken):
    diverged = {1: 0.5, 2: broken, 3: 0.25}
    same = tune_course.compare([diverged, dict(diverged)], [dict(diverged)])
    assert same.same and same.text == "the same losses in 3 logged steps, bit for bit"
    assert tune_course.compare([diverged, {**diverged, 1: 0.5001}], [diverged]).same, "noise is known behind it too"
    finite = {1: 0.5, 2: 0.3, 3: 0.25}
    other = tune_course.compare([finite, finite], [diverged])
    assert not other.same and f"first at step 2: {broken} instead of 0.3" in other.text
    assert not tune_course.compare([diverged, diverged], [{**diverged, 3: 0.26}]).same
    noisy = [diverged, {**diverged, 1: 0.5001}]
    assert not tune_course.compare(noisy, [{**diverged, 2: 0.3}]).same
    assert not tune_course.compare([{1: broken}, {1: broken}], [{1: 0.5}]).same, "not for want of a seed"


def test_losses_of_a_run_that_was_removed_are_not_the_same():
    exact = {1: 0.5}
    for before, after in (([exact, None], [exact]), ([exact], [exact, None]), ([None], [None]), ([{}], [None])):
        found = tune_course.compare(before, after)
        assert found.removed and not found.same and found.text == "losses not compared: a trial's run was removed"
    assert tune_course.compare([{}], [{}]) == LossesCompared(True, "losses not compared: none were logged or printed")


@pytest.mark.parametrize(
    ("state", "script", "key", "fix"),
    [
        ("Stopped", None, "--minutes", "allow more minutes or fewer trials, or lower hyperparameters.log_every"),
        ("Stopped", Script(), "--minutes", "allow more minutes or fewer trials"),
        (
            "Completed",
            None,
            "steps",
            "it came to its own end: train for more steps, or lower hyperparameters.log_every",
        ),
        ("Completed", Script(), "steps", "it came to its own end: train for more steps"),
    ],
)
def test_a_trial_of_too_few_steps_says_what_can_be_changed(state, script, key, fix):
    """A command has no log_every, and one that ends by itself takes no more minutes."""
    short = plant(phases={"student_forward": 0.1}, steps=6, log_every=1, facts={"state": state})
    with pytest.raises(UserError, match="it recorded too few steps") as refused:
        tune_course.course(Evidence(dataclasses.replace(short, script=script)), "it", 8)
    [issue] = refused.value.issues
    assert (issue.key, issue.fix) == (key, fix)


@pytest.mark.parametrize("state, count", [("Completed", 3), ("Stopped", 2)])
def test_what_a_stopped_script_printed_last_is_no_loss(tmp_path, state, count):
    folder = RunFolder(tmp_path / "run")
    folder.log("algo-1").parent.mkdir(parents=True)
    folder.log("algo-1").write_text("loss: 0.5\nloss: 0.25\nloss: 0.12\n")
    plan = {"name": "run", "planned": "2026-01-01T00:00:00+00:00", "backend": "watch", "job": {"name": "run"}}
    write_json(folder.plan, {**plan, "hosts": [{"name": "algo-1"}]})
    write_json(folder.outcome, {"state": state})
    run = Run(folder)
    assert len(tune_course.losses(run)) == count and tune_course.are_printed(run)
    folder.metrics.write_text(json.dumps({"step": 1, "loss": 0.51, "rank": 0}) + "\n")
    assert tune_course.losses(run) == {1: 0.51} and not tune_course.are_printed(run), "of one of the kit's scripts"
    shutil.rmtree(folder.path)
    assert tune_course.losses(run) is None
