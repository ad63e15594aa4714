"""Each side of what the rule on waiting for data decides by: too few workers, costly images, or slow storage."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from launcher.insight.answers import EXPLAINED, Answer
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements, Series
from launcher.insight.rules import data
from tests.insight.planted import BEGAN, plant
from tests.insight.test_neighbours import with_programs, with_threads
from tests.insight.test_workers_rule import waiting


def asked(measured: Measurements) -> Answer:
    return data.waiting(Evidence(measured))


def kind(wait: float = 0.4, **planted) -> str | None:
    """Of the finding on a run with this wait, on 8 cores with a GPU that waits as long."""
    answer = asked(waiting(wait, **{"gpu": 100 * (1 - wait), **planted}))
    return answer.kind if isinstance(answer, Finding) else None


def without_workers_number(measured: Measurements) -> Measurements:
    return dataclasses.replace(measured, settings={**measured.settings, "num_workers": "auto"})


def with_epochs(measured: Measurements, seconds: float) -> Measurements:
    """The same with that time between two epochs."""
    [steps] = measured.ranks
    ranks = (dataclasses.replace(steps, ended=steps.ended + seconds * (steps.epoch - 1)),)
    return dataclasses.replace(measured, ranks=ranks)


def test_a_wait_is_that_of_the_start_of_epochs_only_where_other_steps_do_not_wait():
    """A sixth of the time lies between epochs. Where all windows are an epoch's first, nobody knows of other steps."""
    everywhere, unknown = waiting(0.4, gpu=60), waiting(0.4, gpu=60, steps_per_epoch=10)
    assert isinstance(asked(with_epochs(everywhere, 13.3)), Finding)
    assert isinstance(asked(with_epochs(waiting(0.3, seconds=0.5, gpu=60), 6.7)), Finding)
    assert isinstance(asked(with_epochs(unknown, 2.1)), Finding)
    assert asked(with_epochs(waiting(0.05, gpu=60, epoch_start=9.0), 13.3)) is EXPLAINED


@pytest.mark.parametrize(("wait", "gpu", "found"), [(0.09, 60, False), (0.11, 60, True), (0.4, 92, False), (0.4, 88, True)])  # fmt: skip
def test_a_wait_counts_from_a_tenth_of_a_step_that_the_gpu_feels(wait, gpu, found):
    assert (kind(wait, gpu=gpu) is not None) == found


@pytest.mark.parametrize(("percent", "explained"), [(9, False), (11, True)])
def test_a_wait_in_a_quota_is_the_quotas(percent, explained):
    assert (asked(waiting(0.4, gpu=60, throttled=percent)) is EXPLAINED) == explained


@pytest.mark.parametrize(
    ("busy", "workers", "found"),
    [
        (0.88, 6, "too_few_workers"),
        (0.92, 6, "data_bound"),  # no room for a tenth more
        (0.96, 6, "data_bound"),
        (0.88, 7, "data_bound"),  # as many as there are cores beside the training process
        (0.72, 7, "data_bound"),
        (0.68, 7, "storage_bound"),
        (0.3, 6, "too_few_workers"),
    ],
)
def test_more_workers_help_while_cores_are_free_for_them(busy, workers, found):
    assert kind(busy=8 * busy, settings={"num_workers": workers}) == found


def test_workers_whose_number_is_not_known_may_be_too_few():
    found = asked(without_workers_number(waiting(0.4, gpu=60, busy=2.4)))
    assert found.kind == "too_few_workers" and "not known" in found.cause
    assert str(found.fixes[0]).startswith("hyperparameters.num_workers=1 (now auto)") and found.gain.expected is None


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"io_wait": 0.4}, "too_few_workers"),
        ({"io_wait": 0.6}, "storage_bound"),
        ({"worker_cpu_seconds": 4 * 0.45}, "storage_bound"),
        ({"worker_cpu_seconds": 4 * 0.55}, "too_few_workers"),
        # on full cores a worker has its turn, or a part of it
        ({"busy": 7.6, "worker_cpu_seconds": 4 * 0.09}, "storage_bound"),
        ({"busy": 7.6, "worker_cpu_seconds": 4 * 0.11}, "data_bound"),
        ({"busy": 7.6, "worker_cpu_seconds": 12 * 0.06, "settings": {"num_workers": 12}}, "storage_bound"),
        ({"busy": 7.6, "worker_cpu_seconds": 12 * 0.075, "settings": {"num_workers": 12}}, "data_bound"),
        ({"busy": 7.0, "usable": 6.0, "io_wait": 0.6}, "data_bound"),
        # without workers the training process reads
        ({"settings": {"num_workers": 0}}, "too_few_workers"),
        ({"settings": {"num_workers": 0}, "cpu_seconds": 0.45}, "storage_bound"),
        ({"settings": {"num_workers": 0}, "cpu_seconds": 0.55}, "too_few_workers"),
    ],
    ids=str,
)
def test_readers_that_hardly_compute_wait_for_storage(planted, found):
    assert kind(**planted) == found


@pytest.mark.parametrize(
    ("cpu", "workers", "found"),
    [
        (0.97, 0, "too_few_workers"),  # as measured on an H100: 1 thread decodes, 6.5 others spin
        (0.85, 0, "data_bound"),  # it waits for its other threads: they may decode
        (0.97, 4, "data_bound"),
    ],
)
def test_threads_that_spin_beside_the_one_that_decodes_are_no_work_that_fills_the_cores(cpu, workers, found):
    theirs, settings = 0.6 * workers, {"num_workers": workers}
    run = waiting(0.4, gpu=60, busy=7.7, settings=settings, cpu_seconds=7.5 + theirs, worker_cpu_seconds=theirs)
    finding = asked(with_threads(run, delay=0.0, cpu=cpu))
    assert finding.kind == found
    assert any("other threads of the training process hold 6.5 cores" in one for one in finding.evidence) == (
        found == "too_few_workers"
    )


def test_without_workers_the_training_thread_is_the_reader_and_its_other_threads_may_spin():
    run = waiting(0.4, gpu=60, settings={"num_workers": 0}, cpu_seconds=0.8)
    for cpu, found in ((0.45, "storage_bound"), (0.55, "too_few_workers")):
        assert asked(with_threads(run, delay=0.0, cpu=cpu)).kind == found
    run = without_workers_number(waiting(0.4, gpu=60, cpu_seconds=0.4))
    assert asked(with_threads(run, delay=0.0, cpu=0.4)).kind == "too_few_workers", "workers may read, too"


def test_where_hosts_were_not_watched_the_wait_is_reported_without_its_cause():
    for workers, found in ((0, "too_few_workers"), (4, "data_bound")):
        reported = asked(waiting(0.4, system=False, settings={"num_workers": workers}))
        assert reported.kind == found and reported.share == pytest.approx(0.4)
        assert ("decodes the images itself" in reported.title) == (workers == 0)
    assert reported.evidence == ("waiting for data: 40 % of a step of 1 s", "4 workers per process")
    paused = asked(waiting(0.4, system=False, checkpoint=(10, 10.0)))
    assert paused.share == pytest.approx(0.2) == paused.gain.share


# What is said


def test_the_evidence_has_all_that_was_measured():
    run = waiting(0.4, gpu=60, busy=2.4, io_wait=0.3, pressure=11, worker_cpu_seconds=2.4, usable=6.0)
    assert asked(run).evidence == (
        "waiting for data: 40 % of a step of 1 s",
        "GPUs idle 40 % of the time",
        "40 % of 6 usable cores in use; all of them full in 0 % of the samples",
        "4 workers per process, 6 cores for each process",
        "some process waits for a core in 11 % of the time (CPU pressure)",
        "each worker keeps at most 0.60 cores busy",
        "0.3 cores wait for disks (I/O wait)",
    )
    unknown = {name: dataclasses.replace(host, usable_cores=None) for name, host in run.hosts.items()}
    assert "30 % of 8 cores (a quota was not recorded)" in str(asked(dataclasses.replace(run, hosts=unknown)).evidence)


def test_pressure_and_unsteady_steps_are_told_from_a_tenth():
    for pressure, noise, said in ((9, 0.02, False), (11, 0.3, True)):
        reported = str(asked(waiting(0.4, gpu=60, pressure=pressure, noise=noise)).evidence)
        assert ("CPU pressure" in reported) == said and ("steps are unsteady" in reported) == said


@pytest.mark.parametrize(
    ("workers", "wait", "busy", "wanted", "expected"),
    [
        (2, 0.5, 0.3, 5, 2.0),  # 2 / 0.5 and a tenth more; then the rest of the step is the limit
        (2, 0.5, 0.8, 5, 1.25),  # or the cores
        (6, 0.5, 0.3, 8, 8 / 6),  # or the workers, of which there are no more than cores
        (1, 0.12, 0.3, 2, 1 / 0.88),
        (0, 0.6, 0.3, 2, 2.5),  # 0.6 s of decoding beside 0.4 s of computing
        (0, 0.3, 0.2, 1, 1 / 0.7),
        (0, 0.8, 0.1, 5, 5.0),
        (0, 0.95, 0.01, 8, 8 / 0.95),
    ],
)
def test_the_workers_advised_prepare_images_as_fast_as_they_are_used(workers, wait, busy, wanted, expected):
    run = waiting(wait, gpu=100 * (1 - wait), busy=8 * busy, settings={"num_workers": workers})
    found = asked(run)
    assert (found.kind, found.fixes[0].value) == ("too_few_workers", wanted)
    first = 0 if workers else wait / 50  # the first batch of an epoch of 50 steps
    assert found.gain.expected.value == pytest.approx(1 / (1 / expected + first), rel=0.02)
    assert found.share == pytest.approx(wait)
    assert f"there is room for {min(1 / (1 - wait), 1 / Evidence(run).busy):.2f} times the work" in str(found.fixes[0])
    assert ("the training process itself decodes" in found.cause) == (workers == 0)


def test_slow_storage_is_reported_with_what_was_read_and_received():
    run = waiting(0.4, gpu=60, io_wait=2.0, settings={"num_workers": 4})
    found = asked(run)
    assert re.fullmatch(
        r"read from disks (4.9|5.[01]) MB/s a host, received (1.9|2.[01]) MB/s a host", ", ".join(found.evidence[-2:])
    )
    assert str(found.fixes[-1]).startswith("hyperparameters.num_workers=8 (now 4): more reads in flight")
    unknown = {name: dataclasses.replace(host, disk={}, network={}) for name, host in run.hosts.items()}
    assert "MB/s" not in str(asked(dataclasses.replace(run, hosts=unknown)).evidence)
    for workers in (0, 16):
        reported = asked(waiting(0.4, gpu=60, io_wait=2.0, settings={"num_workers": workers}))
        assert reported.kind == "storage_bound" and "num_workers" not in str(reported.fixes)


@pytest.mark.parametrize(("workers", "wait", "wanted"), [(1, 0.72, 4), (4, 0.4, 8), (2, 0.95, 16), (9, 0.9, 18)])
def test_as_many_workers_are_asked_for_as_hide_the_reads(workers, wait, wanted):
    """One that reads needs no core, so as many keep up as one takes times as long as a step: 1 / (1 - 0.72) and a tenth is 3.9. Of these
    8 cores there are two a core, or twice as many as there were."""
    slow = waiting(wait, gpu=100 * (1 - wait), io_wait=2.0, settings={"num_workers": workers})
    assert str(asked(slow).fixes[-1]).startswith(f"hyperparameters.num_workers={wanted} (now {workers}): more reads")


# A GPU that works while the process waits


def beside_the_device(wait: float, device: float, **planted) -> Measurements:
    """Steps of a second whose process waits for data while the device, which takes these shares of a step, still works."""
    made = plant(
        phases={"data_wait": wait, "student_forward": device / 3, "backward": 2 * device / 3},
        **{"noise": 0.0, "gpu": 100 * device, **planted},
    )
    [steps] = made.ranks
    ended = BEGAN + np.arange(1, len(steps.step) + 1) * 10.0
    step = {**steps.seconds, "step": np.ones(len(steps.step))}
    return dataclasses.replace(made, ranks=(dataclasses.replace(steps, seconds=step, ended=ended),))


@pytest.mark.parametrize(
    ("planted", "kind", "workers"),
    [
        ({"busy": 2.4, "settings": {"num_workers": 2}}, "too_few_workers", 4),  # 2 / 0.6 and a tenth more
        ({"busy": 7.0, "settings": {"num_workers": 8}}, "data_bound", None),
        ({"busy": 2.4, "settings": {"num_workers": 2}, "io_wait": 1.0}, "storage_bound", 4),
        ({"settings": {"num_workers": 2}, "system": False}, "data_bound", None),
        (
            {"busy": 7.8, "settings": {"num_workers": 32}, "cpu_seconds": 4.0, "worker_cpu_seconds": 3.0},
            "too_many_workers",
            5,  # 3 s of work in 0.6 s
        ),
    ],
    ids=str,
)
def test_what_the_device_needs_of_a_step_is_not_lost_to_a_wait_beside_it(planted, kind, workers):
    """80 % of a step waits, and the device works for 60 % of it: no input makes a step shorter than these 60 %."""
    found = asked(beside_the_device(0.8, 0.6, **planted))
    assert found.kind == kind and found.share == pytest.approx(0.4, abs=0.01)
    assert found.gain.at_most == pytest.approx(1 / 0.6, rel=0.02)
    assert found.gain.expected is None or found.gain.expected.value <= found.gain.at_most
    if workers is not None:
        [fix] = [fix for fix in found.fixes if fix.setting == "hyperparameters.num_workers"]
        assert fix.value == workers
    assert found.evidence[0] == "waiting for data: 80 % of a step of 1 s"
    assert found.evidence[1] == (
        "the device needs 60 % of a step, in part while the process waits: without the wait a step is 40 % shorter"
    )


def test_cheaper_images_leave_what_the_device_needs_of_a_step():
    known = {"num_workers": 8, "preprocessing": "cpu_reference", "augmentation_load": 4}
    run = beside_the_device(0.8, 0.6, busy=7.0, settings=known, cpu_seconds=7.0, worker_cpu_seconds=6.8)
    found = asked(run)
    assert found.kind == "data_bound" and found.gain.expected.value <= 1 / 0.6 + 0.01
    assert "the training process 0.60" in found.gain.formula


def test_a_wait_beside_a_device_that_is_never_idle_loses_nothing():
    for unwatched in ({"gpu": 60}, {"gpu": None, "facts": {"device": "cuda"}}):
        assert asked(beside_the_device(0.8, 0.95, settings={"num_workers": 2}, **unwatched)) is None


def test_phases_that_fill_a_step_one_after_another_leave_the_whole_wait():
    evidence = Evidence(waiting(0.4, gpu=60, ranks=2))
    assert evidence.lost_to_data == pytest.approx(0.4) == evidence.share("data_wait")
    parts = {"data_wait": 0.4, "student_forward": 0.2, "backward": 0.4, "grad_sync": 0.3}
    assert Evidence(plant(phases=parts, noise=0.0)).lost_to_data == pytest.approx(0.4), "a part of backward"
    assert Evidence(plant(phases={"student_forward": 1.0})).lost_to_data is None


# Too many workers: what fewer bring


CROWD = dict(gpu=40, busy=7.8, cpu_seconds=4.0, worker_cpu_seconds=3.0, settings={"num_workers": 32})


def test_fewer_workers_are_expected_to_leave_the_work_on_the_cores():
    run = waiting(0.4, **CROWD)
    found = asked(run)
    assert found.kind == "too_many_workers" and found.fixes[0].value == 5  # 3 s of work in 0.6 s of computing
    assert found.share == pytest.approx(0.6, abs=0.01) and found.gain.expected.value == pytest.approx(2.0)
    assert "4 CPU seconds on 8 cores take 0.5 s of its 1 s" in found.gain.formula
    assert "waits at the start of epochs, 0 % of the time, become 5 / 32 of that" in found.gain.formula
    short = asked(waiting(0.4, **{**CROWD, "seconds": 0.5, "cpu_seconds": 2.0, "worker_cpu_seconds": 1.5}))
    assert short.gain.expected.value == pytest.approx(2.0) and "take 0.25 s of its 0.5 s" in short.gain.formula


def test_where_epochs_begin_waits_become_as_many_times_less_as_workers():
    """200 s of steps and 66.7 s between epochs: a quarter of the time. 1 - 0.75 * 0.5 - 0.25 * (1 - 5 / 32)"""
    found = asked(with_epochs(waiting(0.4, **CROWD), 22.22))
    assert found.share == pytest.approx(0.75 * 0.6 + 0.25, abs=0.01)
    assert found.gain.expected.value == pytest.approx(1 / 0.4141, rel=0.01)
    assert "25 % of the training time passes at the start of epochs" in found.evidence[-1]
    few = asked(with_epochs(waiting(0.4, **CROWD), 5.0))
    assert "at the start of epochs" not in str(few.evidence)


@pytest.mark.parametrize(("work", "said"), [(4.0, "the cores are in use 94 %"), (7.9, "the step's 7.9 CPU seconds")])
def test_on_the_cpu_the_work_stays_on_the_cores_that_are_full(work, said):
    run = waiting(0.4, busy=7.68, cpu_seconds=work, worker_cpu_seconds=0.5, settings={"num_workers": 32})
    found = asked(run)
    assert found.kind == "too_many_workers" and found.gain.formula.startswith(said)
    assert found.gain.expected.value == pytest.approx(8 / 7.9 if work == 7.9 else 1 / Evidence(run).busy)


@pytest.mark.parametrize(
    ("planted", "first"),
    [
        ({"busy": 7.4}, "compose_augmentation"),
        ({"busy": 7.0}, "num_workers"),
        ({"busy": 7.4, "gpu": 60}, "num_workers"),
        ({"busy": 7.4, "settings": {"num_workers": 32}}, "num_workers"),
    ],
    ids=str,
)
def test_cheaper_images_come_first_where_the_model_computes_on_the_same_full_cores(planted, first):
    settings = {"num_workers": 32, "augmentation_load": 8}
    found = asked(waiting(0.4, **{"settings": settings, **planted}))
    assert found.kind == "too_many_workers" and found.fixes[0].setting == f"hyperparameters.{first}"
    named = [fix.setting for fix in found.fixes if fix.setting]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(("theirs", "share"), [(6.0, 0.75), (2.0, 0.4)])
def test_cheaper_images_also_free_the_cores_that_the_model_computes_on(theirs, share):
    """Images take 6 of the 8 CPU seconds of a step, or less than the wait."""
    run = waiting(0.4, busy=7.6, cpu_seconds=8.0, worker_cpu_seconds=theirs, settings={"num_workers": 8})
    found = asked(run)
    assert found.kind == "data_bound" and found.gain.share == pytest.approx(share)
    assert ("images take 75 % of the CPU time" in found.gain.formula) == (theirs == 6.0)
    paused = asked(waiting(0.4, busy=7.6, cpu_seconds=8.0, worker_cpu_seconds=theirs, settings={"num_workers": 8}, checkpoint=(10, 10.0)))  # fmt: skip
    assert paused.gain.share == pytest.approx(share / 2)
    on_gpu = asked(waiting(0.4, gpu=60, busy=7.6, cpu_seconds=8.0, worker_cpu_seconds=theirs, settings={"num_workers": 8}))  # fmt: skip
    assert on_gpu.gain.share == pytest.approx(0.4)


# KT's case: what fewer bring


KEPT = dict(gpu=50, busy=5.0, settings={"num_workers": 8})


def test_without_its_noisy_workers_the_thread_does_not_wait_for_its_core():
    found = asked(with_threads(waiting(0.01, **KEPT), delay=0.4, workers=2.0))
    assert (found.kind, found.fixes[0].value) == ("too_many_workers", 4) and found.share == pytest.approx(0.4)
    assert found.gain.expected.value == pytest.approx(1 / 0.6)
    assert found.gain.formula == "the wait for a core goes away"
    assert found.evidence[-2:] == (
        "slow steps take 1.0 times as long as quick ones (90th and 10th percentile)",
        "some core is at 95 % or more in 0 % of the samples",
    )


def test_noisy_workers_also_delay_the_start_of_epochs():
    """A quarter of the time lies between epochs: 1 - 0.75 * 0.4 - 0.25 * (1 - 4 / 8)"""
    found = asked(with_epochs(with_threads(waiting(0.01, **KEPT), delay=0.4, workers=2.0), 22.22))
    assert found.share == pytest.approx(0.55, abs=0.01) and found.gain.expected.value == pytest.approx(
        1 / 0.575, rel=0.01
    )
    assert found.gain.formula.endswith("25 % of the time, become 4 / 8 of that")


# From system metrics alone


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"gpu": 68, "busy": 7.2}, "data_bound"),
        ({"gpu": 72, "busy": 7.2}, None),
        ({"gpu": 50, "busy": 6.9}, "data_bound"),
        ({"gpu": 50, "busy": 6.6}, None),
        ({"gpu": 50, "busy": 7.2, "throttled": 9}, "data_bound"),
        ({"gpu": 50, "busy": 7.2, "throttled": 11}, None),
        ({"gpu": 50, "busy": 2.0, "io_wait": 0.4}, None),
        ({"gpu": 50, "busy": 2.0, "io_wait": 0.6}, "storage_bound"),
        ({"gpu": 50, "busy": 7.0, "usable": 6.0, "io_wait": 0.6}, "data_bound"),
        ({"gpu": None, "busy": 7.4}, None),
    ],
    ids=str,
)
def test_system_metrics_show_full_cores_or_slow_disks_beside_an_idle_gpu(planted, found):
    answer = asked(plant(phases=None, **planted))
    assert (answer.kind if isinstance(answer, Finding) else None) == found
    if found is not None:
        assert answer.share == pytest.approx(1 - planted["gpu"] / 100, abs=0.02) == answer.gain.share


def test_an_idle_gpu_alone_is_not_the_datas():
    run = plant(phases=None, gpu=50, busy=7.2)
    blind = {name: dataclasses.replace(host, cores={}) for name, host in run.hosts.items()}
    assert asked(dataclasses.replace(run, hosts=blind)) is None


def test_cores_that_other_programs_have_are_no_reason_against_more_workers():
    """Seen on two cores, one of which another program computed on: the process itself decoded, and a worker gets a part of that core."""
    usual = waiting(0.4, gpu=60, busy=8.0, settings={"num_workers": 2})
    found, beside = asked(usual), asked(with_programs(usual, ffmpeg=4.0))
    assert found.kind == "data_bound" and beside.kind == "too_few_workers"
    assert beside.title == "Too few workers: training waits for data while other programs use its cores"
    assert "get a share of the cores that other programs use" in beside.cause and beside.gain.expected is None
    assert "programs outside the run use 4.0 of its cores (ffmpeg 4.0)" in beside.evidence
    assert any("stop or move the host's other programs: ffmpeg 4.0" in str(fix) for fix in beside.fixes)
    assert "outside" not in str(found.evidence) + str(found.fixes)


@pytest.mark.parametrize(("cores", "programs_take_cores"), [(0.7, False), (0.9, True)])
def test_programs_that_use_less_than_a_tenth_of_the_cores_are_not_told(cores, programs_take_cores):
    found = asked(with_programs(waiting(0.4, gpu=60, busy=7.9, settings={"num_workers": 7}), gcc=cores))
    assert found.kind == "data_bound" and ("gcc" in str(found.evidence)) == programs_take_cores == (
        "gcc" in str(found.fixes)
    )


def test_enough_workers_beside_a_program_that_fills_the_cores_do_not_wait_for_storage():
    """Seen with 4.5 tasks for each of two cores: the run itself used less than seven tenths of them."""
    usual = waiting(0.4, gpu=60, busy=8.0, worker_cpu_seconds=5.0, settings={"num_workers": 8})
    assert asked(with_programs(usual, ffmpeg=3.0)).kind == "data_bound"


def test_beside_idle_cores_other_programs_change_neither_cause_nor_gain():
    usual = waiting(0.4, gpu=60, busy=4.0, settings={"num_workers": 2})
    beside = asked(with_programs(usual, ffmpeg=1.0))
    assert beside.title.endswith("while cores are idle") and beside.gain.expected is not None


@pytest.mark.parametrize(("use", "ready", "found"), [(0.3, 1.2, "storage_bound"), (0.3, 3.0, "too_few_workers"), (0.1, 3.0, "storage_bound")])  # fmt: skip
def test_beside_other_programs_a_worker_is_busy_that_takes_its_turns(use, ready, found):
    """Three tasks for each core: none of them gets more than a third of one."""
    beside = with_programs(
        waiting(0.4, gpu=60, busy=7.9, worker_cpu_seconds=2 * use, settings={"num_workers": 2}), ffmpeg=5.0
    )
    [host] = beside.hosts.values()
    host.other["tasks", "RunnableTasks", ""] = Series(np.linspace(BEGAN, BEGAN + 40, 9), np.full(9, 8 * ready))
    assert asked(beside).kind == found


def test_the_gain_of_more_workers_is_of_the_steps_alone():
    """More than a quarter of the time is evaluations, which no worker makes shorter."""
    usual = waiting(0.5, gpu=50, busy=1.6, settings={"num_workers": 0}, evaluate=(50, 20.0))
    evidence, found = Evidence(usual), asked(usual)
    assert found.kind == "too_few_workers" and evidence.steps_part < 0.75
    left = float(re.search(r"a step takes ([\d.]+) of its time", found.gain.formula)[1])
    assert found.gain.expected.value == pytest.approx(1 / (1 - evidence.steps_part * (1 - left)), rel=0.02)


@pytest.mark.parametrize(("ready", "found"), [(0.8, "storage_bound"), (1.2, "too_many_workers")])
def test_workers_that_wait_for_reads_are_not_too_many(ready, found):
    """Each keeps 15 % of a core busy, a third of the cores idle, and no task waits for one: fewer of them would read even less at a time."""
    usual = waiting(0.4, gpu=60, busy=5.2, worker_cpu_seconds=4.9, settings={"num_workers": 32})
    [host] = usual.hosts.values()
    host.other["tasks", "RunnableTasks", ""] = Series(np.linspace(BEGAN, BEGAN + 40, 9), np.full(9, 8 * ready))
    assert asked(usual).kind == found


@pytest.mark.parametrize(("io_wait", "found"), [(1.0, "too_few_workers"), (5.0, "storage_bound")])
def test_a_core_that_waits_for_disks_is_little_beside_the_readers_of_eight_gpus(io_wait, found):
    big = waiting(
        0.4, gpu=60, ranks=8, cores=96, busy=38.0, io_wait=io_wait, worker_cpu_seconds=3.9, settings={"num_workers": 4}
    )
    assert asked(big).kind == found


@pytest.mark.parametrize(("workers", "io_wait", "found"), [(0, 0.8, "storage_bound"), (0, 0.3, "too_few_workers")])
def test_a_process_that_reads_itself_is_one_reader(workers, io_wait, found):
    run = waiting(0.6, gpu=40, cores=96, busy=2.0, io_wait=io_wait, cpu_seconds=0.9, settings={"num_workers": workers})
    assert asked(with_threads(run, 0.0, cpu=0.9)).kind == found
