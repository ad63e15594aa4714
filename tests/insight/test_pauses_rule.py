"""Each side of what the rules on time between steps, or in a few of them, decide by."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from launcher.insight.answers import EXPLAINED, Answer, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements
from launcher.insight.phases import NO_PHASE
from launcher.insight.rules import pauses
from launcher.insight.rules.neighbours import noisy
from tests.insight.planted import plant
from tests.insight.test_data_rule import with_epochs
from tests.insight.test_neighbours import with_programs, with_threads

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
"""A second."""

RUN = dict(phases=STEP, noise=0.0, cores=8, busy=2.0)
"""200 steps of 1 s in four epochs, in 20 logged windows."""


def planted(**changed) -> Measurements:
    return plant(**{**RUN, **changed})


# Checkpoints and evaluations


def checkpoints(seconds: float, **changed) -> Answer:
    """Ten of them in 200 s of steps."""
    return pauses.checkpoints(Evidence(planted(checkpoint=(20, seconds), **changed)))


@pytest.mark.parametrize(("seconds", "found"), [(2.0, False), (2.5, True)])
def test_checkpoints_count_from_a_tenth_of_the_time(seconds, found):
    assert isinstance(checkpoints(seconds), Finding) == found


@pytest.mark.parametrize(
    ("seconds", "factor", "epochs"),
    [
        (5.5, 6, 3),
        (170.0, 170, 68),
        (300.0, 100, 40),
    ],  # the factor leaves a twentieth of the steps' time; 100 from nine tenths on
)
def test_checkpoints_become_so_few_that_a_twentieth_is_left(seconds, factor, epochs):
    """Of the kit's own script, which also writes one before each evaluation: both after these epochs of 50 steps."""
    found = checkpoints(seconds)
    share = 10 * seconds / (200 + 10 * seconds)
    assert found.share == pytest.approx(share)
    assert (found.fixes[0].setting, found.fixes[0].value) == ("hyperparameters.checkpoint_every", 50 * epochs)
    assert 20 * factor <= 50 * epochs < 20 * factor + 50
    assert found.fixes[0].also == {"hyperparameters.evaluate_every": epochs}
    kept = math.ceil(250 / factor) / 250  # of 100 epochs of 50 steps
    assert found.gain.expected.value == pytest.approx(1 / (1 - share * (1 - kept)))


@pytest.mark.parametrize(("evaluate_every", "value"), [(3, 150), (10, 125), (None, 120)])
def test_checkpoints_coincide_with_those_before_evaluations(evaluate_every, value):
    """At least 120 steps lie between two, of 150 or 500 between two evaluations."""
    [fix, *_] = checkpoints(5.5, settings={"evaluate_every": evaluate_every}).fixes
    assert fix.value == value and fix.also == {}


def test_the_evidence_counts_one_ranks_checkpoints():
    for ranks in (1, 2):
        assert checkpoints(5.5, ranks=ranks).evidence == ("10 of 5.5 s on average (longest 5.5 s): 22 % of 255 s",)


@pytest.mark.parametrize(("every", "value"), [(3, 18), (None, 6)])
def test_evaluations_become_as_many_times_fewer(every, value):
    run = planted(evaluate=(20, 5.5), settings={"evaluate_every": every})
    found = pauses.evaluations(Evidence(run))
    assert (found.fixes[0].value, found.fixes[0].now) == (value, every)


def test_pauses_that_were_not_recorded_are_not_measured():
    reported = pauses.checkpoints(Evidence(planted(not_measured={"checkpoint": "no torch.save was seen"})))
    assert isinstance(reported, NotMeasured) and reported.reason == "no torch.save was seen"
    assert pauses.checkpoints(Evidence(planted(evaluate=(20, 50.0)))) is None, "an evaluation is no checkpoint"


# The start of epochs


def starts(measured: Measurements) -> Answer:
    return pauses.epoch_starts(Evidence(measured))


@pytest.mark.parametrize(("seconds", "share"), [(7.0, None), (8.0, 24 / 224), (22.22, 0.25)])
def test_time_between_epochs_counts_from_a_tenth_of_all(seconds, share):
    """Between four epochs lie three times."""
    found = starts(with_epochs(planted(), seconds))
    assert isinstance(found, Finding) == (share is not None)
    if share is not None:
        assert found.share == pytest.approx(share, rel=0.01)
        assert found.gain.expected.value == pytest.approx(1 / (1 - share), rel=0.01)
        assert found.evidence[1] == "in all other steps, waiting for data takes 1 %"


@pytest.mark.parametrize(("seconds", "share"), [(6.0, None), (7.5, 22.5 / 212.5), (40.0, 120 / 310)])
def test_waiting_in_the_first_steps_of_epochs_counts_too(seconds, share):
    """Of 19 usual windows of ten steps, three are an epoch's first."""
    found = starts(planted(epoch_start=seconds))
    assert isinstance(found, Finding) == (share is not None)
    if share is not None:
        assert found.share == pytest.approx(share, rel=0.01)


def test_half_the_time_in_checkpoints_leaves_half_of_a_wait_where_epochs_begin():
    """310 s of usual windows and 50 of the first one."""
    found = starts(planted(epoch_start=40.0, checkpoint=(20, 36.0)))
    assert found.share == pytest.approx(0.5 * 120 / 310, rel=0.02)


@pytest.mark.parametrize(("wait", "found"), [(0.08, True), (0.12, False)])
def test_a_wait_in_all_steps_is_no_matter_of_epochs(wait, found):
    run = planted(phases={**STEP, "data_wait": wait, "backward": 0.67 - wait}, epoch_start=40.0)
    assert isinstance(starts(run), Finding) == found


@pytest.mark.parametrize(("workers", "found"), [(4, True), (0, False)])
def test_slow_first_steps_are_forked_workers_doing(workers, found):
    """They copy memory while the process writes to it, which shows in any phase."""
    slow = {step: ("backward", 20.0) for step in (60, 110, 160)}
    run = planted(slow_steps=slow, settings={"num_workers": workers})
    assert isinstance(starts(run), Finding) == found
    outliers = pauses.outliers(Evidence(run))
    assert outliers is EXPLAINED if found else outliers.kind == "step_outliers"


def test_a_run_of_one_epoch_or_of_epochs_as_short_as_a_window_shows_no_start_of_epochs():
    for epoch in (10, 200):
        assert starts(planted(steps_per_epoch=epoch, epoch_start=40.0)) is None


@pytest.mark.parametrize(("workers", "advised"), [(0, []), (1, []), (2, [1]), (5, [2])])
def test_half_the_workers_are_ready_sooner(workers, advised):
    found = starts(with_epochs(planted(settings={"num_workers": workers}), 22.22))
    assert [fix.value for fix in found.fixes if fix.setting == "hyperparameters.num_workers"] == advised


def test_where_no_wait_was_timed_the_start_of_epochs_is_not_measured():
    run = planted(phases={"student_forward": 0.4, "backward": 0.6}, not_measured={"data_wait": "no loader was seen"})
    reported = starts(run)
    assert isinstance(reported, NotMeasured) and reported.reason == "no loader was seen"


# The start


def start(seconds: float | None, **changed) -> Answer:
    return pauses.start(Evidence(planted(facts={"seconds_to_first_step": seconds}, **changed)))


@pytest.mark.parametrize(
    ("seconds", "steps", "found"),
    [
        (118.0, 200, False),
        (122.0, 200, True),
        (200.0, 2000, False),  # 9 % of the time
        (240.0, 2000, True),
        (1190.0, 20_000, False),
        (1210.0, 20_000, True),  # too long for any run
    ],
)
def test_a_start_is_slow_from_two_minutes_that_are_a_tenth_of_the_time(seconds, steps, found):
    assert isinstance(start(seconds, steps=steps, log_every=steps // 20), Finding) == found


def test_what_the_first_steps_took_longer_is_part_of_the_start():
    """Ten steps of 11 s instead of 1 s, as while a model compiles; the first of them counts once."""
    found = start(40.0, slow_steps={10: ("backward", 100.0)})
    assert found.share == pytest.approx(129 / 329)
    assert found.gain.share == pytest.approx(129 / (329 + 4800)), "over the whole job, 100 epochs of 50 steps"
    assert found.evidence == (
        "40 s until the first step, 300 s of training after it",
        "the first logged steps took 100 s longer than later ones",
    )
    assert start(30.0, slow_steps={20: ("backward", 100.0)}) is None, "steps after the first ones are no start"
    endless = dict(steps=20_000, log_every=1000, slow_steps={1000: ("backward", 150.0)})
    assert start(1000.0, **endless) is None and isinstance(start(1100.0, **endless), Finding)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, "FSx for the inputs"),
        ({"compile": True}, "hyperparameters.compile=false (now true)"),
        ({"compile_teacher": True}, "hyperparameters.compile_teacher=false (now true)"),
        ({"pretrained": True}, "weights as an input channel"),
        ({"teacher_pretrained": True}, "weights as an input channel"),
    ],
    ids=str,
)
def test_a_slow_start_is_told_what_of_it_the_run_does(settings, first):
    assert str(start(200.0, settings=settings).fixes[0]).startswith(first)


def test_a_slow_start_names_the_part_that_takes_most_of_it():
    parts = {"imports": 20.0, "images": 150.0, "models": 25.0, "memory": 0.01, "first_step": 5.0}
    found = pauses.start(Evidence(planted(facts={"seconds_to_first_step": 200.0, "parts_to_first_step": parts})))
    assert found.cause == "150 s of it go to listing the images"
    assert found.evidence[-1] == "until the first step: images 150.0 s, models 25.0 s, imports 20.0 s, first step 5.0 s"
    assert start(200.0).cause.startswith("before the first step, data are copied or listed")


def test_a_start_that_was_not_timed_is_not_measured():
    reported = start(None)
    assert isinstance(reported, NotMeasured) and reported.reason == "seconds_to_first_step was not recorded"


# Outliers


def outliers(slow: dict[int, float], phase: str = "backward", **changed) -> Answer:
    return pauses.outliers(
        Evidence(planted(slow_steps={step: (phase, more) for step, more in slow.items()}, **changed))
    )


@pytest.mark.parametrize(("more", "share"), [(19.0, None), (24.0, 24 / 214), (95.0, 1 / 3)])
def test_outliers_count_from_a_tenth_of_the_time(more, share):
    found = outliers({80: more})
    assert isinstance(found, Finding) == (share is not None)
    if share is not None:
        assert found.share == pytest.approx(share) and found.gain.expected.value == pytest.approx(1 / (1 - share))


def test_half_the_time_in_checkpoints_leaves_half_of_the_outliers():
    assert outliers({80: 95.0}, checkpoint=(20, 29.5)).share == pytest.approx(0.5 / 3, rel=0.01)


def test_the_evidence_names_the_slow_steps_and_their_phase():
    found = outliers({80: 24.0})
    assert found.evidence == (
        "1 of 19 logged windows above 2 times the median of 1 s a step; the slowest 3.4 s",
        "at steps 80",
        "most of it in backward: 2.4 s more than usual",
    )
    five = {step: 24.0 for step in (70, 80, 90, 120, 130)}
    assert outliers(five, steps=400).evidence[1] == "at steps 70, 80, 90, 120, 130"
    assert outliers({**five, 140: 24.0}, steps=400).evidence[1] == "at steps 70, 80, 90, 120, 130 …"


@pytest.mark.parametrize(("others", "found", "limit"), [(2, 4, 2), (3, 2, 5)])
def test_where_many_steps_are_slow_the_farthest_are_outliers_still(others, found, limit):
    """As on a busy machine: another program made a quarter of the steps twice as slow, beside the few that took ten seconds."""
    slow = {step: 15.0 for step in range(100, 100 + 10 * others, 10)}
    finding = outliers({**slow, 50: 120.0, 60: 120.0}, steps_per_epoch=1000)
    assert finding.evidence[0].startswith(f"{found} of 19 logged windows above {limit} times the median")


def test_the_longest_single_step_is_reported_where_it_was_recorded():
    run = planted(slow_steps={80: ("backward", 24.0)})
    run.ranks[0].extra["slowest_step"] = run.ranks[0].seconds["step"] * 2
    assert "the slowest 3.4 s, the longest single step 6.8 s" in pauses.outliers(Evidence(run)).evidence[0]


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("data_wait", "the loader runs dry"),
        ("backward", "something else uses the device or the cores"),
        (NO_PHASE, "the script itself does something now and then"),
    ],
)
def test_the_cause_follows_the_phase(phase, cause):
    found = outliers({80: 30.0}, phase)
    assert found.cause.startswith(cause) and found.evidence[2] == f"most of it in {phase}: 3 s more than usual"


@pytest.mark.parametrize(("percent", "said"), [(9, False), (11, True)])
def test_pressure_is_told_from_a_tenth_of_the_time(percent, said):
    assert ("CPU pressure" in str(outliers({80: 30.0}, pressure=percent).evidence)) == said


@pytest.mark.parametrize(("steps", "measured"), [(80, False), (90, True)])
def test_eight_windows_show_outliers_seven_do_not(steps, measured):
    reported = outliers({70: 30.0}, steps=steps, steps_per_epoch=200)
    assert isinstance(reported, Finding) == measured
    assert measured or reported.reason == "only 7 logged windows, and 8 are needed"


@pytest.mark.parametrize(
    ("slow", "explained"),
    [
        ((60, 110, 160), True),
        ((60, 110, 160, 180), True),  # three of four where epochs begin
        ((60, 110, 140, 180), False),
    ],
)
def test_outliers_where_epochs_begin_are_reported_as_that(slow, explained):
    assert (outliers({step: 20.0 for step in slow}) is EXPLAINED) == explained


def test_outliers_of_too_many_workers_on_full_cores_are_theirs():
    crowd = dict(phases={**STEP, "data_wait": 0.3}, settings={"num_workers": 32})
    assert outliers({80: 60.0}, busy=7.8, **crowd) is EXPLAINED
    assert outliers({80: 60.0}, busy=6.0, **crowd).kind == "step_outliers", "cores were free"
    assert outliers({80: 60.0}, busy=7.8).kind == "step_outliers", "workers were few"


@pytest.mark.parametrize(
    ("throttled", "delay", "explained"), [(30.0, 0.6, True), (30.0, 0.4, False), (5.0, 0.6, False), (30.0, None, False)]
)
def test_slow_steps_whose_thread_has_no_core_are_the_quotas(throttled, delay, explained):
    run = planted(slow_steps={80: ("backward", 24.0)}, throttled=throttled)
    if delay is not None:
        seconds = run.ranks[0].seconds["step"]
        run.ranks[0].extra["run_delay_seconds"] = delay * (seconds - np.median(seconds)) + 0.03
    assert (pauses.outliers(Evidence(run)) is EXPLAINED) == explained


@pytest.mark.parametrize(
    ("delay", "outside", "explained"), [(0.6, 3.0, True), (0.4, 3.0, False), (0.6, 0.0, True), (0.0, 3.0, False)]
)
def test_slow_steps_whose_thread_has_no_core_are_those_of_the_noisy_neighbour(delay, outside, explained):
    """A third of the time goes by in one window, in which the thread waits for a core for a part of what it takes longer."""
    run = with_threads(planted(slow_steps={80: ("backward", 95.0)}, gpu=40), delay=0.0)
    run = with_programs(run, python=outside) if outside else run
    seconds = run.ranks[0].seconds["step"]
    run.ranks[0].extra["run_delay_seconds"] = delay * (seconds - np.median(seconds)) + 0.001
    assert (pauses.outliers(Evidence(run)) is EXPLAINED) == explained
    assert not explained or isinstance(noisy(Evidence(run)), Finding)


def test_shapes_that_vary_are_a_matter_of_compiled_models():
    assert "compile" not in str(outliers({80: 30.0}).fixes)
    assert outliers({80: 30.0}, settings={"compile": True}).fixes[-1].setting == "hyperparameters.compile"


def test_without_steps_there_are_no_outliers_and_no_checkpoints_to_see():
    alone = Evidence(plant(phases=None, gpu=90))
    for ask in (pauses.outliers, pauses.checkpoints, pauses.evaluations, pauses.epoch_starts, pauses.start):
        reported = ask(alone)
        assert isinstance(reported, NotMeasured) and reported.reason == "no step timeline was found"


def test_a_resumed_runs_checkpoints_become_fewer_by_what_it_was_set_to():
    """Steps 9,001 to 9,200, with a checkpoint every 20."""
    run = planted(checkpoint=(20, 5.5), settings={"checkpoint_every": 20})
    later = [dataclasses.replace(steps, step=steps.step + 9000, epoch=steps.epoch + 180) for steps in run.ranks]
    found = pauses.checkpoints(Evidence(dataclasses.replace(run, ranks=tuple(later))))
    assert found.fixes[0].value == 3 * 50, "at least 6 times as many steps, and whole epochs"


def test_a_gap_within_an_epoch_is_no_start_of_one():
    """As where the clock was set on."""
    run = planted()
    [steps] = run.ranks
    late = dataclasses.replace(steps, ended=steps.ended + np.where(np.arange(len(steps.ended)) > 20, 600.0, 0.0))
    assert not (np.diff(late.epoch[18:24]) > 0).any()
    assert pauses.epoch_start_share(Evidence(dataclasses.replace(run, ranks=(late,)))) < 0.05
