"""Findings on planted measurements: each kind of bottleneck, milder and harsher, and runs that must not be accused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.insight.answers import EXPLAINED
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Fix
from launcher.insight.rules import table
from launcher.insight.rules.table import judge
from tests.insight.planted import plant

GPU = {
    "data_wait": 0.004,
    "host_to_device": 0.004,
    "student_forward": 0.08,
    "loss": 0.002,
    "backward": 0.15,
    "optimizer": 0.01,
}
"""A step of a healthy run on a GPU: 0.25 s."""

CPU = {
    "data_wait": 0.005,
    "host_to_device": 0.0,
    "student_forward": 0.06,
    "loss": 0.001,
    "backward": 0.12,
    "optimizer": 0.01,
}

DUO = {0: {}, 1: {}}


SERVERS = dict(hosts=1, threads=8, milliseconds=9.1, in_flight=2.0, receiving=0.1)
"""One host, whose threads are busy 95 % of steps of 0.306 s: for what it takes 0.29 s to make."""


def gpu_step(**phases: float) -> dict[str, float]:
    return {**GPU, **phases}


PLANTED = {
    # KT's: workers far beyond the cores, on the CPU with a wait, on a GPU with hardly any
    ("too_many_workers", "mild"): dict(
        phases={**CPU, "data_wait": 0.1}, cores=2, busy=1.7, settings={"num_workers": 4}
    ),
    ("too_many_workers", "harsh"): dict(
        phases={**CPU, "data_wait": 0.6}, cores=2, busy=1.74, settings={"num_workers": 16}
    ),
    ("too_many_workers", "on a GPU, no wait"): dict(
        phases=GPU, cores=8, busy=7.8, gpu=45, settings={"num_workers": 64}, noise=0.3
    ),
    ("too_many_workers", "on the CPU, no wait, steps falter"): dict(
        phases=CPU, cores=2, busy=1.99, settings={"num_workers": 8}, noise=0.5
    ),
    ("too_many_workers", "on the CPU, no wait, processes wait for cores"): dict(
        phases=CPU, cores=2, busy=1.99, settings={"num_workers": 16}, pressure=85
    ),
    ("too_many_workers", "8 GPUs"): dict(
        phases=gpu_step(data_wait=0.2), ranks=8, cores=96, busy=90, gpu=50, settings={"num_workers": 48}
    ),
    ("too_many_workers", "in a quota"): dict(
        phases={**CPU, "data_wait": 0.5}, cores=64, usable=2, busy=1.99, throttled=70, settings={"num_workers": 16}
    ),
    ("too_few_workers", "mild"): dict(
        phases=gpu_step(data_wait=0.06), busy=3.0, gpu=78, settings={"num_workers": 2}, worker_cpu_seconds=0.58
    ),
    ("too_few_workers", "harsh"): dict(
        phases=gpu_step(data_wait=1.0), busy=1.2, gpu=20, settings={"num_workers": 1}, worker_cpu_seconds=1.2
    ),
    ("too_few_workers", "none, on the CPU"): dict(
        phases={**CPU, "data_wait": 0.4}, cores=4, busy=1.6, settings={"num_workers": 0}
    ),
    ("data_bound", "mild"): dict(phases=gpu_step(data_wait=0.05), busy=7.6, gpu=80, settings={"num_workers": 7}),
    ("data_bound", "harsh"): dict(phases=gpu_step(data_wait=1.2), busy=7.9, gpu=18, settings={"num_workers": 8}),
    ("data_bound", "all cores full, half-idle GPU, system metrics alone"): dict(phases=None, busy=7.9, gpu=50),
    ("storage_bound", "mild"): dict(phases=gpu_step(data_wait=0.08), busy=2.0, io_wait=1.5, gpu=70),
    ("storage_bound", "harsh"): dict(phases=gpu_step(data_wait=2.0), busy=0.8, io_wait=3.5, gpu=10),
    ("storage_bound", "far storage, no I/O wait"): dict(
        phases=gpu_step(data_wait=0.5), busy=1.0, gpu=33, worker_cpu_seconds=0.3
    ),
    ("storage_bound", "system metrics alone"): dict(phases=None, busy=1.0, io_wait=3.0, gpu=15),
    ("main_thread_bound", "mild"): dict(
        phases=GPU,
        gap=0.05,
        busy=1.5,
        saturated=1,
        gpu=70,
        gpu_memory=75,
        cpu_seconds=0.29,
        settings={"num_workers": 4},
    ),
    ("main_thread_bound", "harsh"): dict(phases=GPU, gap=2.0, busy=1.2, saturated=1, gpu=5, cpu_seconds=2.2),
    ("main_thread_bound", "a core at exactly 100 %, 40 s, system metrics alone, few workers"): dict(
        phases=None, seconds=40, busy=1.3, saturated=1, gpu=5, gpu_memory=75, settings={"num_workers": 4}
    ),
    ("gpu_starved", "the same, and the number of workers is not known"): dict(
        phases=None, seconds=40, busy=1.3, saturated=1, gpu=5, gpu_memory=75
    ),
    ("gpu_starved", "KT's system metrics alone, and the number of workers is not known"): dict(
        phases=None, cores=96, busy=30, saturated=4, gpus=[35.0] * 8, throttled=None
    ),
    ("main_thread_bound", "on the CPU"): dict(phases=CPU, gap=0.1, busy=3.0),
    ("host_to_device_bound", "mild"): dict(phases=gpu_step(host_to_device=0.05), gpu=80),
    ("host_to_device_bound", "harsh"): dict(phases=gpu_step(host_to_device=0.6), gpu=60),
    ("teacher_bound", "mild"): dict(phases=gpu_step(teacher_forward=0.12), gpu=97),
    ("teacher_bound", "harsh"): dict(phases=gpu_step(teacher_forward=1.5), gpu=99),
    ("teacher_bound", "on the CPU"): dict(
        phases={**CPU, "teacher_forward": 0.3}, cores=2, busy=1.95, settings={"num_workers": 1}
    ),
    ("fp32_compute", "mild"): dict(phases=gpu_step(data_wait=0.02), gpu=88, settings={"precision": "fp32"}),
    ("fp32_compute", "harsh"): dict(
        phases=gpu_step(backward=1.5, student_forward=0.8), gpu=100, settings={"precision": "fp32"}
    ),
    ("communication_bound", "mild"): dict(
        phases=gpu_step(backward=0.18, grad_sync=0.04), ranks=8, gpu=90, cores=32, busy=10
    ),
    ("communication_bound", "harsh"): dict(
        phases=gpu_step(backward=0.75, grad_sync=0.6), ranks=16, gpu=95, cores=32, busy=10
    ),
    ("slow_rank", "mild"): dict(
        phases=gpu_step(backward=0.2, grad_sync=0.05),
        ranks={**{rank: {} for rank in range(3)}, 3: {"student_forward": 0.12, "grad_sync": 0.002, "backward": 0.155}},
        gpu=90,
        cores=32,
        busy=8,
    ),
    ("slow_rank", "harsh, its data"): dict(
        phases=gpu_step(backward=0.65, grad_sync=0.5),
        ranks={0: {}, 1: {}, 2: {}, 3: {"data_wait": 0.5, "backward": 0.15, "grad_sync": 0.001}},
        gpu=45,
        cores=32,
        busy=8,
    ),
    ("slow_rank", "exchange not measured, two ranks"): dict(
        phases={**CPU, "backward": 0.3}, ranks={0: {}, 1: {"student_forward": 0.2, "backward": 0.16}}, cores=4, busy=3
    ),
    ("slow_rank", "waited for where buffers are made equal"): dict(
        phases={**CPU, "buffer_sync": 0.2},
        ranks={0: {}, 1: {"student_forward": 0.3, "buffer_sync": 0.002}},
        cores=4,
        busy=3,
    ),
    ("uneven_gpus", "mild"): dict(phases=None, gpus=[95, 60, 60, 60], busy=4),
    ("uneven_gpus", "harsh: one at 100 %, others idle"): dict(phases=None, gpus=[100, 0, 0, 0], busy=4),
    ("step_outliers", "mild"): dict(phases=GPU, gpu=90, slow_steps={60: ("backward", 4.0), 150: ("backward", 4.0)}),
    ("step_outliers", "harsh"): dict(
        phases=GPU, gpu=70, slow_steps={60: ("data_wait", 30.0), 150: ("data_wait", 25.0)}
    ),
    ("synchronising_calls", "mild"): dict(phases=GPU, log_every=1, gap=0.06, gpu=68, cpu_seconds=0.3),
    ("synchronising_calls", "harsh"): dict(phases={**GPU, "synchronise": 0.2}, gap=0.1, gpu=40, cpu_seconds=0.5),
    ("checkpoint_stalls", "mild"): dict(phases=GPU, gpu=85, checkpoint=(20, 0.8)),
    ("checkpoint_stalls", "harsh"): dict(phases=GPU, gpu=30, checkpoint=(10, 8.0)),
    ("evaluation_stalls", "mild"): dict(phases=GPU, gpu=90, evaluate=(50, 2.2)),
    ("evaluation_stalls", "harsh"): dict(phases=GPU, gpu=90, evaluate=(50, 40.0)),
    ("memory_growth", "mild"): dict(phases=GPU, gpu=95, memory_growth=15),
    ("memory_growth", "harsh"): dict(phases=GPU, gpu=95, memory_growth=55),
    ("gpu_memory_growth", "mild"): dict(phases=GPU, gpu=95, gpu_memory=40, gpu_memory_growth=15),
    ("gpu_memory_growth", "harsh"): dict(phases=GPU, gpu=95, gpu_memory=30, gpu_memory_growth=60),
    ("small_batch", "mild"): dict(
        phases={name: seconds / 8 for name, seconds in GPU.items()},
        gpu=60,
        gpu_memory=30,
        busy=1.4,
        cpu_seconds=0.03,
        settings={"global_batch_size": 16},
    ),
    ("small_batch", "harsh"): dict(
        phases={name: seconds / 25 for name, seconds in GPU.items()},
        gpu=15,
        gpu_memory=8,
        busy=1.1,
        cpu_seconds=0.01,
        settings={"global_batch_size": 2},
    ),
    ("small_batch", "system metrics alone"): dict(phases=None, busy=1.0, gpu=25, gpu_memory=12),
    ("small_batch", "on the CPU"): dict(
        phases={**CPU, "student_forward": 0.003, "backward": 0.006, "data_wait": 0.001},
        settings={"global_batch_size": 2},
    ),
    ("small_batch", "on the CPU, a little over a fifth in the optimizer"): dict(
        phases={**CPU, "optimizer": 0.054}, settings={"global_batch_size": 4}
    ),
    ("too_many_workers", "on the CPU, seen where epochs begin"): dict(
        phases=CPU, cores=2, busy=1.99, settings={"num_workers": 16}, noise=0.3, epoch_start=9.0, log_every=2
    ),
    ("storage_bound", "other programs fill the cores"): dict(
        phases={**CPU, "data_wait": 0.8},
        cores=2,
        busy=1.95,
        cpu_seconds=0.3,
        worker_cpu_seconds=0.01,
        settings={"num_workers": 2},
    ),
    ("slow_start", "mild"): dict(phases=GPU, gpu=95, steps=2000, facts={"seconds_to_first_step": 200.0}),
    ("slow_start", "harsh"): dict(phases=GPU, gpu=95, facts={"seconds_to_first_step": 1500.0}),
    ("cpu_throttled", "mild"): dict(phases=CPU, cores=8, usable=2, busy=1.9, throttled=20, settings={"num_workers": 1}),
    ("cpu_throttled", "harsh: a quota, no core full"): dict(
        phases=gpu_step(data_wait=1.0), cores=8, usable=3, busy=2.9, throttled=65, gpu=20, settings={"num_workers": 3}
    ),
    ("too_few_servers", "mild"): dict(phases=gpu_step(data_wait=0.06), gpu=80, servers=SERVERS),
    ("too_few_servers", "harsh"): dict(
        phases=gpu_step(data_wait=1.0), gpu=20, servers={**SERVERS, "hosts": 2, "milliseconds": 37.0}
    ),
    ("too_few_servers", "on a CPU whose cores are full, for 2 processes"): dict(
        phases={**CPU, "data_wait": 0.3}, ranks=2, cores=2, busy=1.9, servers={**SERVERS, "milliseconds": 14.5}
    ),
    ("too_few_servers", "none left"): dict(
        phases=gpu_step(data_wait=0.5), gpu=33, busy=7.8, servers={**SERVERS, "alone": 0.9, "failures": 40}
    ),
    ("servers_network_bound", "mild"): dict(
        phases=gpu_step(data_wait=0.06), gpu=80, servers={**SERVERS, "milliseconds": 5.0, "in_flight": 5.5}
    ),
    ("servers_network_bound", "harsh"): dict(
        phases=gpu_step(data_wait=2.0),
        gpu=11,
        servers={**SERVERS, "threads": 64, "milliseconds": 5.0, "in_flight": 95.0},
    ),
    ("receiving_bound", "mild"): dict(
        phases=gpu_step(data_wait=0.06), gpu=80, servers={**SERVERS, "milliseconds": 4.0, "receiving": 0.93}
    ),
    ("receiving_bound", "harsh"): dict(
        phases=gpu_step(data_wait=0.7),
        gpu=26,
        servers={**SERVERS, "threads": 96, "milliseconds": 4.0, "receiving": 0.99, "in_flight": 130.0},
    ),
    ("storage_bound", "servers wait for reads"): dict(
        phases=gpu_step(data_wait=1.0), gpu=20, servers={**SERVERS, "milliseconds": 37.0, "cores_in_use": 0.15}
    ),
    ("slow_epoch_starts", "mild"): dict(phases=GPU, gpu=85, epoch_start=2.0),
    ("slow_epoch_starts", "harsh"): dict(phases=GPU, gpu=40, epoch_start=14.0),
}

HEALTHY = {
    "one GPU, bf16": dict(phases=GPU, gpu=96),
    "one GPU, bf16, much noise": dict(phases=GPU, gpu=93, noise=0.2),
    "8 GPUs on one host": dict(
        phases=gpu_step(grad_sync=0.01), ranks=8, cores=96, busy=40, gpu=95, settings={"num_workers": 8}
    ),
    "32 GPUs on 4 hosts": dict(
        phases=gpu_step(grad_sync=0.015), ranks=32, cores=96, busy=50, gpu=94, settings={"num_workers": 8}
    ),
    "full cores that keep a GPU busy": dict(phases=GPU, busy=7.9, gpu=95, settings={"num_workers": 7}),
    "many workers that do no harm": dict(phases=GPU, busy=5.0, gpu=96, settings={"num_workers": 16}),
    "full cores on the CPU, under pressure, with few workers": dict(
        phases=CPU, cores=2, busy=1.99, settings={"num_workers": 2}, pressure=80, noise=0.15
    ),
    "on the CPU": dict(phases=CPU, cores=2, busy=1.95, settings={"num_workers": 1}),
    "on the CPU, 40 s": dict(phases=CPU, cores=4, busy=3.8, steps=100, settings={"num_workers": 2}),
    "on the CPU, two hosts": dict(
        phases={**CPU, "backward": 0.13}, ranks=2, ranks_per_host=1, cores=2, busy=1.9, settings={"num_workers": 0}
    ),
    "a small teacher": dict(phases=gpu_step(teacher_forward=0.03), gpu=95),
    "some checkpoints and evaluations": dict(phases=GPU, gpu=93, checkpoint=(50, 0.3), evaluate=(50, 0.6)),
    "one long evaluation, after the last step": dict(phases=GPU, gpu=93, evaluate=(200, 400.0)),
    "one slow step": dict(phases=GPU, gpu=94, slow_steps={100: ("backward", 1.5)}),
    "memory that rises at first": dict(phases=GPU, gpu=95, memory_growth=2),
    "a wait of the host that the GPU does not feel": dict(phases=gpu_step(data_wait=0.1), gpu=96, busy=7.8),
    "data that are nearly late": dict(phases=gpu_step(data_wait=0.012), gpu=92),
    "GPU, system metrics alone": dict(phases=None, busy=3, gpu=92),
    "a short run": dict(phases=CPU, steps=20, cores=4, busy=3.5),
    "a quota that is hardly felt": dict(
        phases=CPU, cores=8, usable=4, busy=3.4, throttled=3, settings={"num_workers": 2}
    ),
    "servers that just keep up": dict(phases=GPU, gpu=95, servers={**SERVERS, "milliseconds": 7.6}),
    "servers far away that are asked early": dict(phases=GPU, gpu=95, servers={**SERVERS, "in_flight": 60.0}),
    "servers that failed and were not missed": dict(
        phases=GPU, gpu=95, servers={**SERVERS, "failures": 9, "alone": 0.1}
    ),
    "a wait for servers that the GPU does not feel": dict(phases=gpu_step(data_wait=0.06), gpu=96, servers=SERVERS),
    "full cores beside servers": dict(phases=GPU, gpu=95, busy=7.9, servers={**SERVERS, "milliseconds": 5.0}),
    "tf32": dict(phases=GPU, gpu=97, settings={"precision": "tf32"}),
    "every step logged": dict(phases=GPU, gpu=95, log_every=1),
}


def judged(**planted):
    return judge(Evidence(plant(**planted)))


def kinds(report) -> list[str]:
    return [finding.kind for finding in report.findings]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", PLANTED, ids=" ".join)
def test_what_was_planted_is_the_top_verdict(case, seed):
    report = judged(**PLANTED[case], seed=seed)
    assert kinds(report)[:1] == [case[0]], report.findings


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_is_not_accused(case, seed):
    assert kinds(judged(**HEALTHY[case], seed=seed)) == []


def test_at_least_16_kinds_are_planted_in_a_milder_and_a_harsher_form():
    found = {}
    for kind, form in PLANTED:
        found.setdefault(kind, []).append(form)
    assert len(found) >= 16 and all(len(forms) >= 2 for forms in found.values())


FULL_CORES = dict(
    steps_per_epoch=60, log_every=5, steps=300, noise=0.01, cores=2, busy=1.96, settings={"num_workers": 2}
)

HALVES = {
    "a wait that half lies where epochs begin": dict(
        phases={"data_wait": 0.035, "student_forward": 0.2, "backward": 0.2},
        epoch_start=1.3,
        **FULL_CORES,
    ),
    "a quota, and workers that harm nobody": dict(
        phases=CPU, cores=8, busy=2.8, usable=4, throttled=15.0, settings={"num_workers": 16}
    ),
    "a quota and many workers, whose wait nobody measured": dict(
        cores=8, busy=1.95, usable=2, throttled=15.0, pressure=80, settings={"num_workers": 16}
    ),
    "a quota and many workers, in first steps": dict(
        phases=CPU, steps=4, log_every=1, cores=8, busy=1.95, usable=2, throttled=15.0, settings={"num_workers": 16}
    ),
}
"""What no single rule of those that point at each other would see enough of."""


@pytest.mark.parametrize("case", HALVES)
def test_what_another_finding_explains_has_that_finding(case):
    report = judged(**HALVES[case])
    assert report.findings or EXPLAINED.why not in [why for _, why in report.not_applicable]


def test_memory_that_is_full_soon_comes_before_what_only_makes_a_run_slow():
    slow = PLANTED["data_bound", "harsh"]
    for memory, growth, first in ((40, 30, "memory_growth"), (5, 10, "data_bound")):
        kinds = [one.kind for one in judge(Evidence(plant(**slow, memory=memory, memory_growth=growth))).findings]
        assert {*kinds} >= {"memory_growth", "data_bound"} and kinds[0] == first, kinds


def test_only_where_there_are_several_ranks_can_another_one_come_late():
    slow = {60: ("backward", 4.0), 150: ("backward", 4.0)}
    alone, both = (judged(phases=GPU, gpu=90, slow_steps=slow, ranks=ranks).findings[0] for ranks in (1, 2))
    assert alone.kind == both.kind == "step_outliers"
    assert "rank" not in alone.cause and "other jobs" in alone.cause
    assert "another rank or the network is late" in both.cause


def test_outliers_on_cores_that_others_want_too_say_so():
    slow = {60: ("backward", 4.0), 150: ("backward", 4.0)}
    reported = [
        str(judged(phases=CPU, slow_steps=slow, pressure=pressure).findings[0].evidence) for pressure in (60, 2)
    ]
    assert "waits for a core in 60 % of the time" in reported[0] and "waits for a core" not in reported[1]


def test_all_steps_become_fewer_with_a_larger_batch_the_slow_ones_too():
    planted = PLANTED["small_batch", "on the CPU"]
    (found,) = [
        one for one in judged(**planted, slow_steps={100: ("backward", 3.0)}).findings if one.kind == "small_batch"
    ]
    assert found.gain.at_most == pytest.approx(4), "four times the images, and nothing but steps in the run"


def test_outliers_at_epoch_starts_do_not_outdo_a_wait_that_is_everywhere():
    found = judged(
        phases={"data_wait": 0.1, "student_forward": 0.2, "backward": 0.2},
        epoch_start=9.0,
        **FULL_CORES,
    )
    assert kinds(found) == ["data_bound"]


def test_a_wait_where_epochs_begin_is_the_too_many_workers_own():
    planted = PLANTED["too_many_workers", "on the CPU, seen where epochs begin"]
    crowd, few = judged(**planted), judged(**{**planted, "settings": {"num_workers": 1}})
    assert "slow_epoch_starts" not in [finding.kind for finding in crowd.findings]
    starts = next(finding.share for finding in few.findings if finding.kind == "slow_epoch_starts")
    assert crowd.findings[0].share > starts > 0.1


@pytest.mark.parametrize(
    ("shares", "order"),
    [((0.22, 0.21), ["sets", "advises"]), ((0.24, 0.21), ["advises", "sets"]), ((0.21, 0.22), ["sets", "advises"])],
)
def test_of_two_findings_as_large_the_one_with_a_fix_comes_first(monkeypatch, shares, order):
    one = judged(**PLANTED["step_outliers", "mild"]).findings[0]
    fixes = {"advises": Fix(setting=None, value="look"), "sets": Fix(setting="hyperparameters.num_workers", value=1)}
    found = [replace(one, kind=kind, share=share, fixes=(fixes[kind],)) for kind, share in zip(fixes, shares)]
    rules = [table.Rule(finding.kind, lambda _, finding=finding: finding) for finding in found]
    monkeypatch.setattr(table, "RULES", rules)
    assert kinds(judged(phases=GPU)) == order
