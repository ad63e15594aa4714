"""Each side of what the rule on workers and cores decides by: how many are too many, what they cost, and how many suffice."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.rules.table import judge
from tests.insight.planted import plant
from tests.insight.test_neighbours import with_programs, with_threads

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
"""A second, hardly any of it waiting for data."""


def found(measured) -> list[Finding]:
    return list(judge(Evidence(measured)).findings)


def kinds(measured) -> list[str]:
    return [finding.kind for finding in found(measured)]


def waiting(share: float, seconds: float = 1.0, **planted):
    """Steps of that length, with that share of it in waiting for data, without noise."""
    wait, rest = share * seconds, (1 - share) * seconds
    return plant(
        **{
            "phases": {"data_wait": wait, "student_forward": rest / 3, "backward": 2 * rest / 3},
            "noise": 0.0,
            **planted,
        }
    )


@pytest.mark.parametrize(
    ("cores", "enough", "too_many"),
    [(1, 2, 3), (2, 3, 4), (8, 15, 16)],  # twice the cores, and two more than them
)
def test_workers_are_too_many_from_twice_the_cores_and_two_more(cores, enough, too_many):
    for workers, expected in ((enough, []), (too_many, ["too_many_workers"])):
        run = waiting(0.5, cores=cores, busy=0.97 * cores, settings={"num_workers": workers})
        assert [kind for kind in kinds(run) if kind == "too_many_workers"] == expected, workers


@pytest.mark.parametrize(("busy", "accused"), [(0.57, False), (0.63, True)])
def test_workers_take_turns_only_where_cores_are_in_use(busy, accused):
    run = waiting(0.5, cores=8, busy=8 * busy, settings={"num_workers": 32})
    assert ("too_many_workers" in kinds(run)) == accused


@pytest.mark.parametrize(("wait", "accused"), [(0.09, False), (0.11, True)])
def test_a_wait_from_a_tenth_of_a_step_shows_that_workers_are_too_many(wait, accused):
    run = waiting(wait, cores=8, busy=5.6, gpu=60, settings={"num_workers": 32})
    assert ("too_many_workers" in kinds(run)) == accused


def test_the_share_is_the_wait_or_what_the_gpu_idles_whichever_is_more():
    for gpu, share in ((55, 0.45), (80, 0.3)):
        [first, *_] = found(waiting(0.3, cores=8, busy=7.8, gpu=gpu, settings={"num_workers": 32}))
        assert first.kind == "too_many_workers" and first.share == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("gpu", "busy", "accused"),
    [(67, 0.85, True), (73, 0.85, False), (97, 0.97, False), (None, 0.97, False), (50, 0.77, False)],
)
def test_where_no_step_waits_an_idle_gpu_beside_full_cores_shows_it(gpu, busy, accused):
    run = plant(
        phases=STEP, noise=0.0, cores=8, busy=8 * busy, gpu=gpu, settings={"num_workers": 32}, facts={"device": "cuda"}
    )
    assert ("too_many_workers" in kinds(run)) == accused


def test_an_idle_gpu_is_not_the_workers_doing_where_its_thread_had_its_core():
    run = plant(phases=STEP, noise=0.0, cores=8, busy=7.8, gpu=50, settings={"num_workers": 32})
    assert kinds(run)[0] == "too_many_workers"
    assert "too_many_workers" not in kinds(with_threads(run, delay=0.02))


@pytest.mark.parametrize(
    ("pressure", "noise", "busy", "accused"),
    [
        (53, 0.0, 0.97, True),
        (47, 0.0, 0.97, False),
        (None, 0.0, 0.97, False),
        (53, 0.0, 0.87, False),
        (None, 0.2, 0.97, True),
        (None, 0.02, 0.97, False),
    ],
)
def test_on_the_cpu_it_shows_as_pressure_or_unsteady_steps_on_full_cores(pressure, noise, busy, accused):
    run = plant(phases=STEP, noise=noise, cores=8, busy=8 * busy, pressure=pressure, settings={"num_workers": 32})
    assert ("too_many_workers" in kinds(run)) == accused


# How many suffice


def advised(measured) -> int:
    [value] = [
        fix.value
        for finding in found(measured)
        if finding.kind == "too_many_workers"
        for fix in finding.fixes
        if fix.setting == "hyperparameters.num_workers"
    ]
    return value


@pytest.mark.parametrize(
    ("usable", "wait", "number"),
    [(4.0, 0.47, 3), (4.0, 0.53, 4), (2.6, 0.53, 3), (2.4, 0.53, 2), (2.6, 0.47, 2), (1.0, 0.2, 1)],
)
def test_where_no_cpu_time_was_recorded_the_cores_are_left_to_workers_but_for_one(usable, wait, number):
    """The training process needs that one unless it mostly waits."""
    run = waiting(wait, cores=8, usable=usable, busy=0.97 * usable, settings={"num_workers": 32})
    assert advised(run) == number


@pytest.mark.parametrize(
    ("wait", "theirs", "number"),
    [(0.2, 2.4, 3), (0.2, 2.52, 4), (0.6, 0.8, 2), (0.6, 1.6, 4), (0.2, 7.0, 8), (0.2, 40.0, 8), (0.2, 0.1, 1)],
)
def test_on_a_gpu_as_many_as_prepare_a_steps_images_while_it_is_computed(wait, theirs, number):
    """A tenth of a worker is none: 2.4 s of work in 0.8 s of computing takes 3, 2.52 s takes 4; never more than cores."""
    run = waiting(wait, cores=8, busy=7.8, gpu=50, cpu_seconds=theirs + 0.1, worker_cpu_seconds=theirs, settings={"num_workers": 32})  # fmt: skip
    assert advised(run) == number


def test_what_a_step_lost_to_a_core_that_workers_had_is_no_computing():
    """2 s of the workers' CPU time beside 0.6 s of computing."""
    run = plant(phases=STEP, noise=0.0, cores=8, busy=7.0, gpu=50, settings={"num_workers": 16})
    assert advised(with_threads(run, delay=0.4, workers=2.0)) == 4


@pytest.mark.parametrize(("theirs", "number"), [(6.0, 6), (2.0, 2)])
def test_on_the_cpu_as_many_as_keep_all_cores_at_work_beside_the_model(theirs, number):
    """Eight CPU seconds a step on 8 cores: one second, in which workers do theirs of it."""
    run = waiting(0.3, cores=8, busy=7.8, cpu_seconds=8.0, worker_cpu_seconds=theirs, settings={"num_workers": 32})
    assert advised(run) == number


# KT's case: the thread that drives the device is kept from its core


GPU_RUN = dict(phases=STEP, noise=0.0, cores=8, busy=7.0, gpu=50, settings={"num_workers": 8})


def keeps_thread(measured) -> bool:
    return any("workers a process keep the training thread" in finding.title for finding in found(measured))


def test_more_workers_than_needed_that_have_its_core_are_kts_case():
    assert keeps_thread(with_threads(plant(**GPU_RUN), delay=0.3, workers=2.0))


@pytest.mark.parametrize(
    "changed",
    [
        {"phases": {**STEP, "data_wait": 0.2}},
        {"gpu": None},
        {"gpu": 97},
        {"settings": {"num_workers": 0}},
        {"system": False, "gpu": None, "facts": {"device": "cuda"}},
    ],
    ids=["steps wait for data", "no GPU", "a GPU whose queue lasts", "no worker", "hosts were not watched"],
)
def test_without_one_part_of_it_a_run_is_not_kts_case(changed):
    assert not keeps_thread(with_threads(plant(**{**GPU_RUN, **changed}), delay=0.3, workers=2.0))


def test_workers_that_use_less_than_others_do_are_not_accused():
    run = with_threads(plant(**GPU_RUN), delay=0.3, workers=2.0)
    for cores, kind in ((1.9, "too_many_workers"), (2.2, "noisy_neighbour")):
        assert kinds(with_programs(run, ffmpeg=cores))[0] == kind, cores


@pytest.mark.parametrize(("delay", "accused"), [(0.09, False), (0.11, True)])
def test_a_thread_kept_from_its_core_counts_from_a_tenth_of_the_time(delay, accused):
    assert keeps_thread(with_threads(plant(**GPU_RUN), delay=delay, workers=2.0)) == accused


def test_where_no_gpu_was_watched_all_that_its_thread_waits_is_lost():
    run = plant(phases=STEP, noise=0.0, cores=8, busy=7.0, facts={"device": "cuda"})
    [finding] = found(with_programs(with_threads(run, delay=0.3), ffmpeg=4.0))
    assert finding.kind == "noisy_neighbour" and finding.share == pytest.approx(0.3, abs=0.01)


SUSPECT = dict(
    phases=STEP, noise=0.3, cores=8, busy=4.0, saturated=1, gpu=50, settings={"num_workers": 8}, throttled=None
)
"""Steps that swing, a full core and an idle GPU; nothing was recorded of the training thread."""


def suspect(**changed) -> bool:
    return any(finding.title.startswith("Prime suspect") for finding in found(plant(**{**SUSPECT, **changed})))


@pytest.mark.parametrize(
    ("changed", "is_suspect"),
    [
        ({}, True),
        ({"settings": {"num_workers": 7}}, False),
        ({"cores": 2, "busy": 1.5, "settings": {"num_workers": 2}}, True),
        ({"cores": 1, "usable": 1.0, "busy": 1.0, "settings": {"num_workers": 1}}, False),
        ({"gpu": 67}, True),
        ({"gpu": 73}, False),
        ({"saturated": 0}, False),
        ({"noise": 0.05}, False),
        ({"phases": {**STEP, "data_wait": 0.2}}, False),
        ({"phases": {**STEP, "grad_sync": 0.2}, "ranks": 2}, False),
        ({"phases": {**STEP, "buffer_sync": 0.2}, "ranks": 2}, False),
        ({"ranks": 2, "gpu": None, "gpus": [10.0, 60.0]}, False),
        ({"phases": None}, True),
    ],
    ids=str,
)
def test_a_run_like_kts_is_a_suspect_only_with_every_sign_of_it(changed, is_suspect):
    assert suspect(**changed) == is_suspect


def test_a_thread_that_had_its_core_is_no_suspect():
    assert not any("suspect" in one.title for one in found(with_threads(plant(**SUSPECT), delay=0.05)))


def test_steps_swing_from_one_and_a_half_times():
    run = plant(**{**SUSPECT, "noise": 0.0})
    for times, is_suspect in ((1.4, False), (1.6, True)):
        [steps] = run.ranks
        seconds = {name: values.copy() for name, values in steps.seconds.items()}
        for name in ("step", "backward"):
            seconds[name][::4] += (times - 1) * steps.seconds["step"][0]
        swinging = dataclasses.replace(run, ranks=(dataclasses.replace(steps, seconds=seconds),))
        assert any("suspect" in one.title for one in found(swinging)) == is_suspect, times
