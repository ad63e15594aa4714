"""A run is judged by its usual steps: neither compiling nor pauses nor outliers count as an idle GPU, and each step counts once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.insight import windows
from launcher.insight.contention import THREADS, neighbours
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import percent
from launcher.insight.host_evidence import FEW_SAMPLES
from launcher.insight.measurements import Measurements, Series, Steps
from launcher.insight.rules.storage import disks_are_waited_for
from launcher.insight.rules.workers import kept_from_core
from tests.insight.planted import BEGAN, plant

STEP = {"data_wait": 0.002, "host_to_device": 0.003, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.01}
SMALL = {name: seconds / 6 for name, seconds in STEP.items()}


def idle_in(measured: Measurements, *spans: tuple[float, float]) -> Measurements:
    """The same with GPUs on which nothing runs in those spans of Unix seconds."""
    hosts = {}
    for name, host in measured.hosts.items():
        gpus = {}
        for gpu, series in host.gpus.items():
            inside = np.zeros(len(series.times), bool)
            for began, ended in spans:
                inside |= (began <= series.times) & (series.times < ended)
            gpus[gpu] = Series(series.times, np.where(inside, 0.0, series.values))
        hosts[name] = dataclasses.replace(host, gpus=gpus)
    return dataclasses.replace(measured, hosts=hosts)


def kinds(measured: Measurements) -> list[str]:
    return [finding.kind for finding in Diagnosis(measured).findings]


# Which samples count


@pytest.mark.parametrize(("phases", "steps"), [(STEP, 600), (SMALL, 3600)], ids=["large steps", "small steps"])
@pytest.mark.parametrize("compiling", [60.0, 110.0])
def test_a_gpu_that_idles_while_the_first_step_compiles_is_not_starved(phases, steps, compiling):
    """Of 200 or 250 seconds; before, the batch was too small, or the GPU idled for no reason known."""
    run = plant(
        phases=phases, steps=steps, log_every=5, steps_per_epoch=10_000, gpu=92, gpu_memory=40,
        slow_steps={5: ("student_forward", compiling)}, settings={"compile": True},
    )  # fmt: skip
    evidence = Evidence(idle_in(run, (BEGAN, BEGAN + compiling)))
    assert evidence.gpu_idle == pytest.approx(0.08, abs=0.015)
    assert {"gpu_starved", "small_batch"}.isdisjoint(kinds(evidence.measurements))


def test_a_gpu_that_idles_while_checkpoints_are_written_is_the_checkpoints_finding():
    run = plant(
        phases=STEP, steps=400, noise=0.01, gpu=77, gpu_memory=80, checkpoint=(50, 2.7), settings={"checkpoint_every": 50}
    )  # fmt: skip
    run = idle_in(run, *((stall.began, stall.began + stall.seconds) for stall in run.stalls))
    assert Evidence(run).gpu_idle == pytest.approx(0.23, abs=0.01)
    first, *more = Diagnosis(run).findings
    assert first.kind == "checkpoint_stalls" and first.share == pytest.approx(0.18, abs=0.01)
    assert "gpu_starved" not in [finding.kind for finding in more]


def test_a_gpu_that_idles_in_rare_slow_steps_is_their_finding():
    """The shares of phases have none of them either."""
    slow = {at: ("data_wait", 10.0) for at in (100, 200, 300)}
    run = plant(phases=STEP, steps=400, steps_per_epoch=100, noise=0.01, gpu=77, gpu_memory=80, slow_steps=slow)
    steps = run.ranks[0]
    far = np.flatnonzero(windows.far(steps))
    assert [*steps.step[far]] == [*slow]
    run = idle_in(run, *((steps.ended[at - 1], steps.ended[at]) for at in far))
    assert Evidence(run).gpu_idle == pytest.approx(0.23, abs=0.01) and "gpu_starved" not in kinds(run)


def test_a_pause_within_a_window_is_none_of_its_steps():
    """As where a checkpoint is due every 25 steps and 10 make a line."""
    run = plant(phases=STEP, steps=200, noise=0.0, gpu=80, checkpoint=(20, 5.0))
    early = tuple(dataclasses.replace(stall, began=stall.began - 1.0) for stall in run.stalls)
    steps = dataclasses.replace(run.ranks[0])
    moved = dataclasses.replace(steps, ended=steps.ended + 4.0 * (steps.step % 20 == 0))
    run = dataclasses.replace(run, ranks=(moved,), stalls=early)
    run = idle_in(run, *((stall.began, stall.began + stall.seconds) for stall in early))
    assert Evidence(run).gpu_idle == pytest.approx(0.2, abs=0.01)


def test_workers_that_all_make_their_first_batches_keep_the_thread_from_its_core_in_a_few_steps_alone():
    """Four batches ahead by each of 16 are an epoch of 64: until they are made no step gets on, and the rest of the epoch is quick."""
    run = plant(
        phases=STEP, steps=128, log_every=1, steps_per_epoch=64, noise=0.01, interval=0.25, cores=2, busy=0.5, gpu=95,
        slow_steps={at: ("backward", 1.5) for at in range(65, 71)}, settings={"num_workers": 16},
    )  # fmt: skip
    steps = run.ranks[0]
    far = windows.far(steps)
    assert [*steps.step[far]] == [*range(65, 71)]
    delay, theirs = (np.where(far, share * steps.seconds["step"], 0.0) for share in (0.9, 1.8))
    more = {"run_delay_seconds": delay, "thread_cpu_seconds": np.full_like(delay, 0.05), "worker_cpu_seconds": theirs}
    more["cpu_seconds"] = more["thread_cpu_seconds"] + 0.01
    run = dataclasses.replace(run, ranks=(dataclasses.replace(steps, extra={**steps.extra, **more}),))
    [began, *_], [*_, ended] = steps.ended[far] - steps.seconds["step"][far], steps.ended[far]
    run = idle_in(run, (began, ended))
    host = run.hosts["algo-1"]
    times = np.arange(BEGAN, steps.ended[-1], 0.25)
    tasks = Series(times, np.where((began <= times) & (times < ended), 40.0, 1.0))
    host = dataclasses.replace(host, other={**host.other, ("scheduler", "RunnableTasks", ""): tasks})
    run = dataclasses.replace(run, hosts={"algo-1": host})
    evidence = Evidence(run)
    lost = delay.sum() / steps.seconds["step"].sum()
    assert evidence.gpu_idle == pytest.approx(0.05, abs=0.02)
    assert evidence.slow_steps_too.gpu_idle == pytest.approx(lost, abs=0.08)
    found, *others = Diagnosis(run).findings
    assert found.kind == "too_many_workers" and found.share == pytest.approx(lost, abs=0.04)
    assert "step_outliers" not in [other.kind for other in others]
    said = f"GPUs idle {percent(evidence.slow_steps_too.gpu_idle)} of the time"
    assert said in found.evidence, "of the steps in which the thread waits for its core"
    [ready] = [float(line.split()[0]) for line in found.evidence if "for each usable core" in line and "tasks" in line]
    assert ready > 5, "a task for each of two cores, and 40 while the workers begin"


def test_own_threads_that_fill_the_cores_in_slow_steps_keep_the_training_thread_from_them():
    """Where cores are left over in the steps that wait, the process's threads only wake each other: others do not tell."""
    run = plant(
        phases=STEP, steps=128, log_every=1, steps_per_epoch=1000, noise=0.01, interval=0.25, cores=2, busy=0.5, gpu=95,
        slow_steps={at: ("backward", 30.0) for at in range(65, 71)}, settings={"num_workers": 0},
    )  # fmt: skip
    steps, host = run.ranks[0], run.hosts["algo-1"]
    far = windows.far(steps)
    delay, own = (np.where(far, share * steps.seconds["step"], 0.01) for share in (0.9, 1.8))
    more = {"run_delay_seconds": delay, "thread_cpu_seconds": np.full_like(delay, 0.05), "cpu_seconds": own + 0.05}
    [began, *_], [*_, ended] = steps.ended[far] - steps.seconds["step"][far], steps.ended[far]
    [times, *_] = [core.times for core in host.cores.values()]
    inside = (began <= times) & (times < ended)
    for usual, slow, kept in ((25.0, 100.0, True), (25.0, 25.0, False)):
        cores = dict.fromkeys(host.cores, Series(times, np.where(inside, slow, usual)))
        watched = dataclasses.replace(host, cores=cores, io_wait={})
        ranks = (dataclasses.replace(steps, extra={**steps.extra, **more}),)
        evidence = Evidence(idle_in(dataclasses.replace(run, ranks=ranks, hosts={"algo-1": watched}), (began, ended)))
        assert evidence.busy == 0.25 and (kept_from_core(evidence) is not None) == kept


def test_cores_are_judged_in_usual_steps_too():
    run = plant(phases=STEP, steps=200, noise=0.0, busy=2.0, throttled=0.0, checkpoint=(50, 5.0))
    host = run.hosts["algo-1"]
    [times, *_] = [core.times for core in host.cores.values()]
    paused = np.any([(one.began <= times) & (times <= one.began + one.seconds) for one in run.stalls], axis=0)
    full = Series(times, np.where(paused, 100.0, 25.0))
    changed = dataclasses.replace(
        host,
        cores=dict.fromkeys(host.cores, full),
        io_wait=dict.fromkeys(host.cores, Series(times, np.where(paused, 50.0, 0.0))),
        throttled=full,
        other={("pressure", "CPUPressurePercent", ""): full},
    )
    evidence = Evidence(dataclasses.replace(run, hosts={"algo-1": changed}))
    assert evidence.busy == evidence.throttled == evidence.pressure == 0.25
    assert evidence.full == evidence.saturated == evidence.waiting_cores == 0.0


def test_of_a_run_with_few_samples_in_usual_steps_those_in_slow_ones_count_too():
    """Seconds of usual steps beside seconds at each begin of an epoch, while 16 workers make their first batches."""
    run = plant(
        phases=SMALL, steps=60, log_every=1, steps_per_epoch=20, noise=0.01, cores=2, busy=1.98, pressure=60.0,
        slow_steps={21: ("data_wait", 15.0), 41: ("data_wait", 15.0)}, settings={"num_workers": 16},
    )  # fmt: skip
    steps, [host] = run.ranks[0], run.hosts.values()
    [times, *_] = [core.times for core in host.cores.values()]
    usual = windows.within(times, steps.ended - steps.seconds["step"], np.where(windows.usual(steps), steps.ended, 0.0))
    assert 0 < usual.sum() < FEW_SAMPLES and [*steps.step[windows.far(steps)]] == [21, 41]
    evidence = Evidence(run)
    assert evidence.busy == pytest.approx(0.96, abs=0.03) and evidence.pressure == pytest.approx(0.6, abs=0.05)
    assert kinds(run)[0] == "too_many_workers"


def test_where_no_step_was_timed_every_sample_counts():
    run = plant(gpu=80, seconds=60)
    halved = idle_in(run, (BEGAN + 10, BEGAN + 40))
    assert Evidence(halved).gpu_idle == pytest.approx(0.6, abs=0.02)
    assert Evidence(idle_in(run, (BEGAN, BEGAN + 61))).gpu_idle == 1, "also of a GPU on which nothing ever ran"


def test_samples_of_the_start_do_not_stand_for_those_of_steps_that_are_too_few():
    """A sample a minute: ten before the first step, four in the steps."""
    run = plant(phases=STEP, steps=1000, steps_per_epoch=10_000, noise=0.0, gpu=95, busy=2.0)
    times = BEGAN + np.arange(-600.0, 240.0, 60.0)

    def seldom(use: float) -> Series:
        return Series(times, np.where(times <= BEGAN, 0.0, use))

    host = run.hosts["algo-1"]
    rare = dataclasses.replace(
        host, cores=dict.fromkeys(host.cores, seldom(25.0)), io_wait={}, gpus={"gpu0": seldom(95.0)},
        gpu_memory={"gpu0": seldom(40.0)}, throttled=seldom(0.0),
    )  # fmt: skip
    evidence = Evidence(dataclasses.replace(run, hosts={"algo-1": rare}))
    assert (
        evidence.gpu_idle
        is evidence.gpu_memory
        is evidence.busy
        is evidence.throttled
        is evidence.waiting_cores
        is None
    )
    few = "fewer than 5 samples of the hosts while usual steps ran"
    assert evidence.why_no_hosts == evidence.why_no_series("throttled") == few
    assert kinds(evidence.measurements) == []
    assert len(evidence.during(host.disk["read"])) >= 5, "what is only shown has its own samples"
    assert len(evidence.during(rare.gpus["gpu0"])) == len(times), "or all of them where that is none"


def test_times_are_found_in_spans_that_overlap_or_are_none():
    times = np.arange(10.0)
    found = windows.within(times, np.array([6.0, 1.0, 2.0]), np.array([6.5, 4.0, 3.0]))
    assert [*times[found]] == [1.0, 2.0, 3.0, 4.0, 6.0]
    assert not windows.within(times, np.zeros(0), np.zeros(0)).any()


# How much each step counts


def with_slow_steps(measured: Measurements, slow: float, cpu: float, slow_cpu: float) -> Measurements:
    """The same as the observer records it: every hundred steps one that takes `slow` seconds more stands alone, the others are 20 a window.

    Args:
        cpu, slow_cpu: CPU seconds of a step of the training process, and those that a slow one takes more.
    """
    counts = np.array(20 * [1.0, 20, 20, 20, 20, 20])
    alone = counts == 1
    usual = {name: float(np.mean(values)) for name, values in measured.ranks[0].seconds.items()}
    seconds = {name: np.full(len(counts), mean) for name, mean in usual.items()}
    for name in ("student_forward", "step"):
        seconds[name] = seconds[name] + slow * alone
    last = np.cumsum(counts).astype(int)
    steps = Steps(
        rank=0,
        host="algo-1",
        step=last,
        epoch=(last - 1) // 101 + 1,
        ended=BEGAN + np.cumsum(seconds["step"] * counts),
        seconds=seconds,
        extra={
            "steps": counts,
            "cpu_seconds": cpu + slow_cpu * alone,
            "worker_cpu_seconds": np.full(len(counts), 0.008),
        },
    )
    return dataclasses.replace(measured, ranks=(steps,))


IDLE = dict(phases=STEP, steps=800, noise=0.0, gpu=55, cores=8, busy=1.2)


def test_each_step_counts_once_however_many_share_its_window():
    evidence = Evidence(with_slow_steps(plant(**IDLE), slow=1.0, cpu=0.05, slow_cpu=1.0))
    [steps] = evidence.ranks
    kept = windows.steady(steps)
    weighted = np.average(steps.extra["cpu_seconds"][kept], weights=windows.counts(steps)[kept])
    assert evidence.mean_extra("cpu_seconds") == pytest.approx(weighted) == pytest.approx(0.06, abs=0.001)


def test_a_number_that_a_window_lacks_has_no_weight():
    run = plant(**IDLE, cpu_seconds=0.1)
    [steps] = run.ranks
    gaps = steps.extra["cpu_seconds"].copy()
    gaps[::2] = np.nan
    run = dataclasses.replace(run, ranks=(dataclasses.replace(steps, extra={**steps.extra, "cpu_seconds": gaps}),))
    assert Evidence(run).mean_extra("cpu_seconds") == pytest.approx(0.1)


@pytest.mark.parametrize("slow_cpu", [0.0, 1.0])
def test_slow_steps_that_compute_do_not_make_the_usual_ones_the_main_threads(slow_cpu):
    """One in a hundred computes for a second: 0.24 cores in all, not more than 0.85."""
    run = with_slow_steps(plant(**IDLE), slow=1.0, cpu=0.05, slow_cpu=slow_cpu)
    first = Diagnosis(run).findings[0]
    assert first.kind == "gpu_starved"
    whole = 0.245 + 1 / 101
    cores = (0.05 + slow_cpu / 101) / whole
    assert f"the training process uses {cores:.2f} cores" in first.evidence


def test_cpu_time_is_cores_over_the_time_of_the_same_steps():
    """A process that always keeps one core busy, in steps that take a second longer too, uses one core and its workers their part."""
    run = with_slow_steps(plant(**IDLE), slow=1.0, cpu=0.245, slow_cpu=1.0)
    [steps] = run.ranks
    thread = {"thread_cpu_seconds": 0.75 * steps.seconds["step"], "run_delay_seconds": 0 * steps.seconds["step"]}
    run = dataclasses.replace(run, ranks=(dataclasses.replace(steps, extra={**steps.extra, **thread}),))
    evidence = Evidence(run)
    assert evidence.cores_used(evidence.own_cpu) == pytest.approx(1.0)
    assert neighbours(evidence)[THREADS] == pytest.approx(0.25)
    assert evidence.worker_use == pytest.approx(0.008 / 4 / evidence.steady_step_seconds)
    assert evidence.cores_used(None) is None and Evidence(plant(gpu=50)).cores_used(0.1) is None


def test_without_timed_steps_a_run_is_judged_from_its_gpus_first_sample_of_work():
    """Before, eight of 24 minutes of installing, listing and compiling made a healthy run one whose GPU idles."""
    run = plant(phases=None, gpu=95, seconds=1440.0, interval=10.0, noise=0.0)
    late = idle_in(run, (BEGAN, BEGAN + 480))
    assert kinds(late) == kinds(run) and Evidence(late).gpu_idle == pytest.approx(0.05, abs=0.02)
    idle = idle_in(run, (BEGAN + 480, BEGAN + 960))
    assert Evidence(idle).gpu_idle == pytest.approx(0.37, abs=0.02), "a gap between is none of the start"


def test_a_host_whose_record_did_not_come_back_has_its_share_of_the_ranks():
    both = plant(phases=STEP, ranks=2, ranks_per_host=1, cpu_seconds=0.4, worker_cpu_seconds=0.2, facts={"hosts": 2})
    one = dataclasses.replace(both, hosts={"algo-1": both.hosts["algo-1"]})
    assert Evidence(both).ranks_each == Evidence(one).ranks_each == 1
    assert neighbours(Evidence(one)) == neighbours(Evidence(both))


def test_a_node_that_is_watched_by_itself_has_its_own_ranks_and_not_the_worlds():
    """torchrun --nnodes 2, watched on each node: 16 processes in all, eight of them here, whose workers use twelve cores for disks."""
    eight = dict(phases=STEP, ranks=8, cores=96, io_wait=12, settings={"num_workers": 8}, worker_cpu_seconds=0.2)
    node = Evidence(plant(**eight, facts={"hosts": 1, "world_size": 16}))
    assert node.ranks_each == 8 and neighbours(node) == neighbours(Evidence(plant(**eight, facts={"hosts": 1})))
    assert disks_are_waited_for(node), "an eighth of 64 readers"
    assert Evidence(plant(**eight, facts={"hosts": 2, "world_size": 16})).ranks_each == 8, (
        "of the other host nothing came"
    )
    untimed = Evidence(plant(phases=None, facts={"hosts": 2, "world_size": 16}))
    assert untimed.ranks_each == 8


def test_a_gpu_that_hardly_computed_is_judged_by_all_samples():
    """Two of them: a blip, then training on the CPU."""
    run = plant(phases=None, gpu=95, seconds=600.0, interval=10.0, noise=0.0)
    blip = idle_in(run, (BEGAN, BEGAN + 100), (BEGAN + 120, BEGAN + 700))
    assert Evidence(blip).gpu_idle == pytest.approx(0.97, abs=0.02) and kinds(blip)
