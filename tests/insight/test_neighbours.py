"""Who keeps the training thread from its core: KT's published log, the same with the numbers that settle it, and what only looks like it."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from launcher.insight.contention import (
    neighbours,
    programs_outside,
    run_delay,
    runnable_per_core,
    step_time_spread,
    thread_cpu,
)
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Host, Measurements, Series
from launcher.insight.rules.table import judge
from launcher.insight.script import Script
from tests.conftest import ROOT
from tests.insight.planted import BEGAN, plant

KT = {
    "data_wait": (0.00053, 0.00063, 0.00061, 0.00060, 0.00080, 0.00067),
    "student_forward": (7.77474, 0.67429, 0.90976, 0.60958, 0.83237, 0.75715),
    "backward": (1.58002, 24.74539, 8.31253, 30.93830, 8.41030, 29.88415),
}
"""Seconds of the six iterations that KT published: "1 iter time – dataloader : 0.00053 sec, forward : 7.77474 sec …"."""

STEADY = {name: (seconds[0], *[float(np.median(seconds[1:]))] * 5) for name, seconds in KT.items()}
"""The same without the swing."""


def kt(iterations=KT, *, workers=16, gpu=35.0, busy=30.0, saturated=4, **planted) -> Measurements:
    """Eight processes on the 96 cores of a ml.p4d.24xlarge, every iteration logged."""
    base = {name: 1.0 for name in iterations}
    found = plant(
        **{
            "phases": base, "steps": 6, "log_every": 1, "ranks": 8, "cores": 96, "busy": busy, "saturated": saturated, "gpu": gpu,
            "throttled": None, "settings": {"num_workers": workers}, **planted,
        }
    )  # fmt: skip
    own = {name: np.array(seconds) for name, seconds in iterations.items()}
    whole = np.sum([*own.values()], axis=0)
    ranks = tuple(
        dataclasses.replace(steps, ended=BEGAN + np.cumsum(whole), seconds={**own, "step": whole})
        for steps in found.ranks
    )
    longer = whole.sum() / (found.ranks[0].ended[-1] - BEGAN)
    return dataclasses.replace(
        found, ranks=ranks, hosts={name: _slower(one, longer) for name, one in found.hosts.items()}
    )


def _slower(host: Host, times: float) -> Host:
    """The same samples, further apart: of a run that takes so many times as long."""

    def later(series: Series) -> Series:
        return Series(BEGAN + times * (series.times - BEGAN), series.values)

    every = {
        name: {key: later(series) for key, series in getattr(host, name).items()}
        for name in ("cores", "io_wait", "gpus", "gpu_memory", "other")
    }
    return dataclasses.replace(host, **every)


def with_threads(
    measured: Measurements, delay: float, cpu: float = 0.5, workers: float = 0.0, others: float = 0.0
) -> Measurements:
    """The same with shares of a step in which the training thread had no core, or had one; and cores that its workers and, beside
    workers, its process's other threads use."""
    ranks = []
    for steps in measured.ranks:
        step = steps.seconds["step"]
        more = {"run_delay_seconds": delay * step, "thread_cpu_seconds": cpu * step}
        if workers:
            more |= {"worker_cpu_seconds": workers * step, "cpu_seconds": (cpu + others) * step}
        ranks.append(dataclasses.replace(steps, extra={**steps.extra, **more}))
    return dataclasses.replace(measured, ranks=tuple(ranks))


def with_programs(measured: Measurements, looks: int = 20, **cores: float) -> Measurements:
    """The same beside programs outside the run that use so many cores."""
    times = np.linspace(BEGAN, max(steps.ended[-1] for steps in measured.ranks), looks)
    series = {("neighbour", name, "CPUCores"): Series(times, np.full(looks, used)) for name, used in cores.items()}
    total = {("neighbours", "CoresOutsideTheRun", ""): Series(times, np.full(looks, sum(cores.values())))}
    hosts = {
        name: dataclasses.replace(host, other={**host.other, **series, **total})
        for name, host in measured.hosts.items()
    }
    return dataclasses.replace(measured, hosts=hosts)


def first(measured: Measurements):
    return judge(Evidence(measured)).findings[0]


# KT's log

VARIANTS = [*itertools.product((16, 32), (25.0, 35.0, 45.0), ((12.0, 2), (30.0, 4), (60.0, 8)), (0, 1))]


@pytest.mark.parametrize(("workers", "gpu", "cores", "seed"), VARIANTS)
def test_kts_log_has_the_workers_as_prime_suspect_with_kts_fix(workers, gpu, cores, seed):
    busy, saturated = cores
    found = first(kt(workers=workers, gpu=gpu, busy=busy, saturated=saturated, seed=seed))
    assert (found.kind, found.fixes[0].setting, found.fixes[0].value) == (
        "too_many_workers",
        "hyperparameters.num_workers",
        1,
    )
    assert found.title.startswith("Prime suspect: ") and "num_workers=1" in found.experiment
    assert "the training thread's run-queue delay was not recorded" in found.cause


@pytest.mark.parametrize(("ranks", "workers"), [(1, 16), (2, 16), (4, 16), (4, 32)])
def test_many_workers_are_the_prime_suspect_where_few_processes_have_more_cores_each(ranks, workers):
    found = first(kt(ranks=ranks, workers=workers))
    assert found.kind == "too_many_workers" and found.title.startswith(f"Prime suspect: {workers} workers a process")
    assert first(kt(ranks=ranks, workers=8)).kind != "too_many_workers"


@pytest.mark.parametrize(("workers", "gpu", "cores", "seed"), VARIANTS)
def test_kts_log_with_the_run_queues_wait_has_the_workers_as_the_cause(workers, gpu, cores, seed):
    busy, saturated = cores
    measured = kt(workers=workers, gpu=gpu, busy=busy, saturated=saturated, seed=seed)
    found = first(with_threads(measured, delay=0.4, workers=0.9))
    assert found.kind == "too_many_workers" and found.experiment is None and "suspect" not in found.title
    assert 1 <= found.fixes[0].value <= 2 and found.share == pytest.approx(0.4, abs=0.15)
    assert any("has no core in 40 % of the time" in line for line in found.evidence)


OTHERS = {
    "few workers": kt(workers=2),
    "no worker": kt(workers=0),
    "a metric that waits for the GPU in every step": kt(STEADY),
    "steady steps, workers for every core": kt(STEADY, workers=32),
    "GPUs that are busy": kt(gpu=90.0),
    "no core is full": kt(saturated=0, busy=10.0),
    "one rank is slow": kt({**KT, "grad_sync": (0.5, 12.0, 4.0, 15.0, 4.0, 15.0)}),
    "the training thread always has its core": with_threads(kt(), delay=0.01, workers=0.9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_kts_case_is_not_called_so(name):
    report = judge(Evidence(OTHERS[name]))
    assert "too_many_workers" not in [finding.kind for finding in report.findings]


def test_system_metrics_alone_make_it_a_suspicion():
    alone = plant(
        phases=None, cores=96, busy=30, saturated=4, gpus=[35.0] * 8, settings={"num_workers": 16}, throttled=None
    )
    found = first(alone)
    assert found.kind == "too_many_workers" and found.title.startswith("Prime suspect: ") and found.experiment
    unknown = first(dataclasses.replace(alone, settings={}, script=Script()))
    assert unknown.kind == "gpu_starved" and unknown.title.startswith("Suspects: data workers, or ")
    assert "num_workers=1" in unknown.experiment and "num_workers=1" in str(unknown.fixes[0])
    assert not [fix for fix in unknown.fixes if fix.label == "fix"], "nothing is claimed to be the fix"


def test_the_report_shows_the_experiment():
    text = " ".join(str(Diagnosis(kt())).split())
    assert "Prime suspect: 16 workers a process keep the training thread from its core" in text
    assert " to test " in text and "KT's job needed 0 or 1" in text


@pytest.mark.parametrize("file", ["README.md", "docs/diagnosis.md"])
def test_a_page_shows_what_a_diagnosis_of_kts_log_says(file):
    page = (ROOT / file).read_text(encoding="utf-8")
    [shown] = re.findall(r"^```\n(1\. Prime suspect: .*?)```$", page, re.MULTILINE | re.DOTALL)
    said = str(Diagnosis(kt())).splitlines()
    assert len(shown.splitlines()) > 10 and not [line for line in shown.splitlines() if line not in said]


def test_the_page_on_diagnoses_quotes_the_evidence():
    page = (ROOT / "docs/diagnosis.md").read_text(encoding="utf-8")
    confirmed = " ".join(str(Diagnosis(with_threads(kt(), delay=0.4, workers=0.9))).split())
    quoted = re.findall(r'"(the training thread[^"]*|who else[^"]*)"', " ".join(page.split()))
    assert len(quoted) == 2 and not [text for text in quoted if text not in confirmed]


# Other neighbours

USUAL = {"data_wait": 0.002, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.01}


def test_a_program_outside_the_run_is_named():
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=7.0)
    found = first(with_programs(with_threads(usual, delay=0.3), ffmpeg=4.0, gcc=0.5))
    assert found.kind == "noisy_neighbour" and found.title.startswith("Noisy neighbour: ffmpeg, a program outside")
    assert "ffmpeg 4.0, gcc 0.5" in str(found.fixes[0])
    assert found.evidence[1] == "who else uses a host's cores: programs outside the run (ffmpeg 4.0, gcc 0.5) 4.5"
    assert found.gain.expected.value == pytest.approx(1 / 0.7, rel=0.1)


def test_programs_that_hardly_use_a_core_are_not_shown():
    usual = with_threads(plant(phases=USUAL, gpu=50, cores=8, busy=7.0), delay=0.3)
    reported = [str(first(with_programs(usual, ffmpeg=4.0, cron=cores)).evidence) for cores in (0.04, 0.06)]
    assert "cron" not in reported[0] and "ffmpeg 4.0, cron 0.1" in reported[1]
    assert "who else" not in str(first(with_programs(usual, cron=0.04)).evidence)


def test_at_most_three_programs_are_named():
    usual = with_threads(plant(phases=USUAL, gpu=50, cores=8, busy=7.0), delay=0.3)
    assert "(a 3.0, b 1.0, c 0.9) 5.7" in str(first(with_programs(usual, a=3.0, b=1.0, c=0.9, d=0.8)).evidence)


def test_the_share_is_of_the_whole_time_pauses_too():
    paused = plant(phases=USUAL, gpu=50, cores=8, busy=7.0, noise=0.0, checkpoint=(10, 2.42))
    found = [one for one in judge(Evidence(with_programs(with_threads(paused, delay=0.3), ffmpeg=4.0))).findings]
    [noisy] = [one for one in found if one.kind == "noisy_neighbour"]
    assert noisy.share == pytest.approx(0.15, abs=0.01), "half of the time are checkpoints"


def test_a_wait_for_a_core_is_reported_without_the_threads_own_time_where_that_was_not_recorded():
    measured = with_threads(plant(phases=USUAL, gpu=50, cores=8, busy=7.0), delay=0.3)
    for steps in measured.ranks:
        del steps.extra["thread_cpu_seconds"]
    assert first(with_programs(measured, ffmpeg=4.0)).kind == "noisy_neighbour"


def test_a_program_outside_the_run_is_named_on_the_cpu_too():
    usual = plant(phases=USUAL, cores=2, busy=1.95)
    assert first(with_programs(with_threads(usual, delay=0.3), stress=1.0)).kind == "noisy_neighbour"


def test_the_process_own_threads_are_named_with_their_number():
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=7.0, ranks=4, cpu_seconds=0.4, facts={"threads": 8})
    usual = dataclasses.replace(usual, settings={**usual.settings, "num_workers": 0})
    found = first(with_threads(usual, delay=0.3, cpu=0.4))
    assert found.kind == "noisy_neighbour" and str(found.fixes[0]).startswith("environment.OMP_NUM_THREADS=1 (now 8)")
    alone = plant(phases=USUAL, gpu=50, cores=8, busy=7.0, cpu_seconds=0.4, facts={"threads": 16})
    alone = dataclasses.replace(alone, settings={**alone.settings, "num_workers": 0})
    [fix] = first(with_threads(alone, delay=0.3)).fixes
    assert str(fix).startswith("environment.OMP_NUM_THREADS=4 (now 16): each training process has 8 cores")


@pytest.mark.parametrize(("busy", "accused"), [(6.3, False), (6.5, True)])
def test_own_threads_are_accused_only_where_no_cores_are_left_over(busy, accused):
    """Below, the thread waits for those that wake it, on the simulated accelerator as between the autograd thread's steps."""
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=busy, noise=0.0, cpu_seconds=0.9, facts={"threads": 16})
    usual = dataclasses.replace(usual, settings={**usual.settings, "num_workers": 0})
    found = [one.kind for one in judge(Evidence(with_threads(usual, delay=0.3))).findings]
    assert ("noisy_neighbour" in found) == accused
    beside = [one.kind for one in judge(Evidence(with_programs(with_threads(usual, delay=0.3), ffmpeg=6.0))).findings]
    assert "noisy_neighbour" in beside, "others are bound to no cores of the run's"


def test_threads_on_the_cpu_are_accused_only_where_there_are_more_than_cores():
    """The kit's own data workers are threads there, and compute on the cores that the model has, too."""
    usual = plant(phases=USUAL, cores=2, busy=1.95, cpu_seconds=0.4, facts={"threads": 2}, settings={"num_workers": 2})
    usual = with_threads(dataclasses.replace(usual), delay=0.3, cpu=0.6)
    for steps in usual.ranks:
        steps.extra["worker_cpu_seconds"] = 0.0 * steps.seconds["step"]
    assert "noisy_neighbour" not in [one.kind for one in judge(Evidence(usual)).findings]
    many = dataclasses.replace(usual, facts={**usual.facts, "threads": 16})
    assert "noisy_neighbour" in [one.kind for one in judge(Evidence(many)).findings]


def test_workers_that_are_all_needed_are_not_too_many():
    usual = plant(phases=USUAL, gpu=50, cores=4, busy=3.9, settings={"num_workers": 3})
    found = first(with_threads(usual, delay=0.3, workers=3.4))
    assert found.title.startswith("Noisy neighbour: 3 data workers a process, all of them needed, keep")
    assert found.fixes[0].value == "dali"


def test_a_wait_for_data_says_more_than_one_for_a_core_where_workers_prepare_them():
    late = plant(phases={**USUAL, "data_wait": 0.2}, gpu=50, cores=8, busy=7.9, cpu_seconds=0.9)
    threads = with_threads(late, delay=0.3)
    assert "noisy_neighbour" not in [finding.kind for finding in judge(Evidence(threads)).findings]
    beside = judge(Evidence(with_programs(threads, ffmpeg=6.0))).findings
    assert "noisy_neighbour" in [finding.kind for finding in beside], "which is why data are late"
    alone = dataclasses.replace(threads, settings={**threads.settings, "num_workers": 0})
    assert "noisy_neighbour" in [finding.kind for finding in judge(Evidence(alone)).findings]


def test_full_cores_explain_an_idle_gpu_only_where_they_keep_its_thread_waiting():
    small = {name: seconds / 25 for name, seconds in USUAL.items()}
    full = plant(
        phases=small, gpu=15, gpu_memory=8, cores=2, busy=1.95, settings={"global_batch_size": 2, "num_workers": 1}
    )
    assert not judge(Evidence(full)).findings, "who has the cores was not recorded"
    assert first(with_threads(full, delay=0.02)).kind == "small_batch"
    for delay, found in ((0.5, ["noisy_neighbour", "small_batch"]), (0.6, ["noisy_neighbour"])):
        assert [one.kind for one in judge(Evidence(with_threads(full, delay=delay))).findings] == found


def test_nobody_is_accused_where_it_was_not_recorded_who_it_is():
    usual = plant(phases=USUAL, gpu=50, cores=4, busy=2.0, settings={"num_workers": 3})
    found = first(with_threads(usual, delay=0.3))
    assert found.kind == "noisy_neighbour" and "not recorded" in found.cause


@pytest.mark.parametrize(
    ("planted", "delay"),
    [
        (dict(phases=USUAL, gpu=97, cores=8, busy=7.0), 0.3),  # the GPU's queue outlasts it
        (dict(phases=USUAL, gpu=50, cores=8, busy=7.0), 0.05),
        (dict(phases=USUAL, cores=8, usable=2, busy=1.9, throttled=50), 0.3),  # the quota says more
    ],
)
def test_a_wait_for_a_core_that_costs_nothing_or_has_another_cause_is_no_finding_of_its_own(planted, delay):
    report = judge(Evidence(with_programs(with_threads(plant(**planted), delay=delay), ffmpeg=4.0)))
    assert "noisy_neighbour" not in [finding.kind for finding in report.findings]


def test_that_it_was_not_recorded_is_said():
    report = judge(Evidence(plant(phases=USUAL, gpu=95)))
    assert "a training thread kept from its core" in [missing.what for missing in report.not_measured]


# The numbers


def test_shares_are_of_all_steps_by_their_length():
    measured = with_threads(kt(steps=6), delay=0.5)
    assert run_delay(Evidence(measured)) == pytest.approx(0.5) and thread_cpu(Evidence(measured)) == pytest.approx(0.5)
    [*_, last] = [steps.extra["run_delay_seconds"] for steps in measured.ranks]
    last[:] = np.nan  # this rank recorded nothing after all
    assert run_delay(Evidence(measured)) == pytest.approx(0.5)
    assert run_delay(Evidence(kt())) is None and thread_cpu(Evidence(kt())) is None


def test_a_swing_is_the_slow_steps_over_the_quick_ones():
    assert step_time_spread(Evidence(kt())) == pytest.approx(31.2 / 9.23, rel=0.02)
    assert step_time_spread(Evidence(kt(STEADY))) == pytest.approx(1.0)
    assert step_time_spread(Evidence(plant(phases=None, seconds=40))) is None


def test_programs_before_the_first_step_do_not_count():
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=7.0)
    end = usual.ranks[0].ended[-1]
    times = np.array([BEGAN - 60, BEGAN - 30, (BEGAN + end) / 2])
    [host] = usual.hosts.values()
    host.other["neighbours", "CoresOutsideTheRun", ""] = Series(times, np.array([4.0, 4.0, 1.0]))
    host.other["neighbour", "gcc", "CPUCores"] = Series(times, np.array([4.0, 4.0, 0.0]))
    host.other["neighbour", "ffmpeg", "CPUCores"] = Series(times[2:], np.array([1.0]))
    assert programs_outside(Evidence(usual)) == {"ffmpeg": 1.0}


def test_tasks_that_are_ready_are_counted_for_each_usable_core():
    usual = plant(phases=USUAL, gpu=50, cores=8, usable=4, busy=3.9)
    assert runnable_per_core(Evidence(usual)) is None
    [host] = usual.hosts.values()
    times = np.linspace(BEGAN, BEGAN + 40, 9)
    host.other["tasks", "RunnableTasks", ""] = Series(times, np.full(9, 10.0))
    assert runnable_per_core(Evidence(usual)) == pytest.approx(2.5)
    found = first(with_programs(with_threads(usual, delay=0.3), make=3.0))
    assert "2.5 tasks run or are ready to for each usable core" in found.evidence


def test_programs_are_averaged_over_all_looks_also_those_that_did_not_see_them():
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=7.0)
    measured = with_programs(usual, looks=10, gcc=2.0)
    host = measured.hosts["algo-1"]
    seen = host.other["neighbour", "gcc", "CPUCores"]
    host.other["neighbour", "gcc", "CPUCores"] = Series(seen.times[:5], seen.values[:5])
    assert programs_outside(Evidence(measured)) == {"gcc": 1.0}
    assert neighbours(Evidence(measured)) == {"programs": 1.0}


@pytest.mark.parametrize(("delay", "reported"), [(0.15, False), (0.4, True)])
def test_what_programs_outside_hide_is_said_to_be_not_measured(delay, reported):
    """They have the core: a wait that took 17 % of the steps without them takes less than 10 %."""
    run = with_programs(with_threads(plant(phases=USUAL, noise=0.0), delay), ffmpeg=4.0)
    hidden = [str(one) for one in judge(Evidence(run)).not_measured if "programs outside" in one.reason]
    assert bool(hidden) == reported
    if reported:
        assert (
            "what takes less than 10 % of the time" in hidden[0]
            and "core 40 % of the time: without them, its share may be 17 %" in hidden[0]
        )
