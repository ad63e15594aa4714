"""Runs of several hosts with eight ranks each: what one rank or one host does, and what the others do while they wait for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from launcher.insight import page
from launcher.insight.comparison import Comparison
from launcher.insight.control import OUTSIDE
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements, Series, Steps
from launcher.insight.phases import NO_PHASE
from launcher.insight.rules.table import judge
from tests.insight.planted import plant
from tests.insight.test_rules import GPU

EXCHANGE = {**GPU, "grad_sync": 0.16, "backward": 0.30}
"""A step in which a rank waits for a slow one."""

LATE = {"data_wait": 0.154, "grad_sync": 0.01, "backward": 0.15}
"""What differs on the slow one, whose batches come later."""


def on_four_hosts(**changed) -> Measurements:
    """32 ranks."""
    return plant(
        **{**dict(phases=GPU, ranks=32, steps=400, cores=96, busy=20, gpu=92, facts={"backend": "nccl"}), **changed}
    )


def found(measured: Measurements, kind: str) -> Finding | None:
    return next((one for one in judge(Evidence(measured)).findings if one.kind == kind), None)


def with_ranks(measured: Measurements, change: Callable[[Steps], Steps]) -> Measurements:
    return replace(measured, ranks=tuple(change(steps) for steps in measured.ranks))


def test_a_slow_hosts_ranks_are_slow_together():
    slow = {rank: LATE if 16 <= rank < 24 else {} for rank in range(32)}
    one = found(on_four_hosts(phases=EXCHANGE, ranks=slow), "slow_rank")
    assert one.title == "8 ranks on algo-3 are slow, and all others wait for them"
    assert "nearly as slow: ranks 16, 17, 18, 19, 20, 21, 22, 23, on algo-3" in one.evidence
    assert one.fixes[0].value.startswith("check algo-3: ") and "if the slow ranks were" in one.gain.formula


def test_a_slow_rank_is_told_alone():
    one = found(
        on_four_hosts(phases=EXCHANGE, ranks={rank: LATE if rank == 17 else {} for rank in range(32)}), "slow_rank"
    )
    assert one.title == "Rank 17 is slow, and all others wait for it" and one.rank == 17


def test_ranks_that_were_not_measured_may_be_what_the_others_wait_for():
    slow = {rank: LATE if 16 <= rank < 24 else {} for rank in range(32)}
    whole = on_four_hosts(phases=EXCHANGE, ranks=slow)
    rest = replace(whole, ranks=tuple(steps for steps in whole.ranks if steps.host != "algo-3"))
    report = judge(Evidence(rest))
    [reason] = [one.reason for one in report.not_measured if one.what == "one slow rank"]
    assert reason == "it may be a rank that was not measured: 24 of 32 were"
    exchange = found(rest, "communication_bound")
    assert exchange.gain.expected is None and "a rank that was not measured: 24 of 32 were" in exchange.gain.formula
    everywhere = on_four_hosts(phases=EXCHANGE, settings={"gradient_compression": "none"})
    assert found(everywhere, "communication_bound").gain.expected is not None


def test_a_pause_of_the_first_rank_counts_once():
    """Every 100 steps it writes a checkpoint for 12 s, then evaluates for 2 s; the others wait for it within their evaluation."""
    run = on_four_hosts(steps=600, checkpoint=(100, 12.0), evaluate=(100, 2.0), noise=0.0)
    stalls = [
        stall if stall.rank == 0 else replace(stall, seconds=14.0)
        for stall in run.stalls
        if stall.rank == 0 or stall.kind == "evaluate"
    ]
    evidence = Evidence(replace(run, stalls=tuple(stalls)))
    assert evidence.stall_seconds("evaluate") == 12 and evidence.stall_seconds("checkpoint") == 72
    assert evidence.training_seconds == pytest.approx(evidence.steps_seconds + 84)
    assert judge(evidence).findings[0].kind == "checkpoint_stalls"


def test_a_pause_that_only_other_ranks_recorded_counts_too():
    run = on_four_hosts(steps=600, checkpoint=(100, 12.0), noise=0.0)
    others = tuple(stall for stall in run.stalls if stall.rank == 3)
    assert Evidence(replace(run, stalls=others)).stall_seconds("checkpoint") == 72


def test_ranks_that_wait_for_a_checkpoint_at_an_epochs_end_start_their_epochs_in_time():
    run = on_four_hosts(steps=600, steps_per_epoch=50, checkpoint=(50, 4.0))

    def waiting_for_the_first(steps: Steps) -> Steps:
        if steps.rank == 0:
            return steps
        begins = np.concatenate([[False], np.diff(steps.epoch) > 0])
        seconds = {
            name: values + 0.4 * begins if name in ("backward", "step") else values
            for name, values in steps.seconds.items()
        }
        return replace(steps, seconds=seconds)

    run = with_ranks(run, waiting_for_the_first)
    run = replace(run, stalls=tuple(stall for stall in run.stalls if stall.rank == 0))
    kinds = [one.kind for one in judge(Evidence(run)).findings]
    assert kinds[0] == "checkpoint_stalls" and "slow_epoch_starts" not in kinds


def test_workers_that_a_step_needs_are_not_taken_away_for_a_quicker_start():
    """Each step of 0.25 s takes 1.8 s of the workers' time: 8 of them, not 4."""
    busy = dict(epoch_start=3.0, steps_per_epoch=50, busy=70, settings={"num_workers": 8})
    needed = found(on_four_hosts(cpu_seconds=1.95, worker_cpu_seconds=1.8, **busy), "slow_epoch_starts")
    spare = found(on_four_hosts(cpu_seconds=0.45, worker_cpu_seconds=0.3, **busy), "slow_epoch_starts")
    [of_needed, of_spare] = (
        [fix.value for fix in one.fixes if fix.setting == "hyperparameters.num_workers"] for one in (needed, spare)
    )
    assert of_needed == [] and of_spare == [4]


def test_the_memory_of_another_programs_gpu_is_none_of_this_runs():
    run = plant(phases=GPU, ranks=4, steps=600, cores=96, busy=20, gpus=[60.0] * 4 + [80.0] * 4)
    host = run.hosts["algo-1"]
    times = host.gpu_memory["gpu6"].times
    growing = {**host.gpu_memory, "gpu6": Series(times, np.linspace(20, 90, len(times)))}
    shared = replace(host, gpu_memory=growing, gpu_uuids={f"gpu{index}": f"GPU-{index}" for index in range(8)})
    own = with_ranks(replace(run, hosts={"algo-1": shared}), lambda steps: replace(steps, device_uuid=str(steps.rank)))
    assert found(own, "gpu_memory_growth") is None
    also_ours = with_ranks(own, lambda steps: replace(steps, device_uuid=str(steps.rank + 4)))
    assert "algo-1 gpu6" in found(also_ours, "gpu_memory_growth").title


@pytest.mark.parametrize(("memory", "factor"), [(10, 8), (30, 2), (56, 1)])
def test_parts_of_a_step_become_as_few_as_memory_allows(memory, factor):
    """Eight parts of 8 images, on GPUs that launches keep waiting."""
    short = {name: seconds / 4 for name, seconds in GPU.items()}
    one = found(
        on_four_hosts(
            phases=short, gpu=55, gpu_memory=memory, settings={"global_batch_size": 2048, "batch_size_per_device": 8}
        ),
        "small_batch",
    )
    parts = [fix for fix in one.fixes if fix.setting == "hyperparameters.batch_size_per_device"]
    assert bool(parts) == (factor > 1)
    assert (one.gain.expected is None) == (factor == 1)
    assert factor == 1 or f"{factor} times the images at once" in one.gain.formula


@pytest.mark.parametrize("ranks", [8, 32])
def test_programs_outside_the_run_are_counted_as_the_cores_of_one_host(ranks):
    def run(outside: float, workers: int) -> Diagnosis:
        measured = on_four_hosts(ranks=ranks, busy=90, settings={"num_workers": workers})
        hosts = {
            name: replace(host, other={OUTSIDE: Series(host.memory.times, np.full(len(host.memory.times), outside))})
            for name, host in measured.hosts.items()
        }
        return Diagnosis(replace(measured, hosts=hosts))

    said = " ".join(Comparison(run(30.0, 8), run(12.0, 6)).sentences())
    assert "programs outside the run used 30.0 of 96 cores before and 12.0 after" in said


def test_the_page_lists_the_slow_rank_first_though_it_is_slow_in_no_phase():
    beside = {NO_PHASE: 0.08, "grad_sync": 0.01, "backward": 0.15}
    run = on_four_hosts(
        phases={**GPU, "grad_sync": 0.09, "backward": 0.23},
        ranks={rank: beside if rank == 5 else {} for rank in range(16)},
    )
    assert found(run, "slow_rank").rank == 5
    first = re.sub("<[^>]*>", " ", page.rank_bars(Evidence(run)).split("<span>rank")[1])
    assert first.split()[0] == "5," and float(first.split("own ")[1].split()[0]) == pytest.approx(320, rel=0.03)
