"""Each side of what the rules on several processes decide by: the exchange of gradients, a slow rank, uneven GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.gains import in_steps
from launcher.insight.phases import NO_PHASE
from launcher.insight.report import Report
from launcher.insight.rules.table import judge
from launcher.insight.script import Address, Part, Script
from tests.insight.planted import plant

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
"""A second."""


def report(**planted) -> Report:
    return judge(Evidence(plant(**{"phases": STEP, "noise": 0.0, "ranks": 2, **planted})))


def finding(kind: str, **planted) -> Finding | None:
    return next((one for one in report(**planted).findings if one.kind == kind), None)


def reasons(reported: Report) -> dict[str, str]:
    return {one.what: one.reason for one in reported.not_measured}


# The exchange of gradients


@pytest.mark.parametrize(
    ("phases", "share"),
    [
        ({"grad_sync": 0.09}, None),
        ({"grad_sync": 0.11}, 0.11),
        ({"grad_sync": 0.06, "buffer_sync": 0.06}, 0.12 / 1.06),
        ({"grad_sync": 0.4}, 0.4),
    ],
    ids=str,
)
def test_an_exchange_counts_from_a_tenth_of_a_step_with_that_of_buffers(phases, share):
    found = finding("communication_bound", phases={**STEP, **phases})
    assert (found and found.share) == (share and pytest.approx(share))


def test_the_rank_that_waits_least_says_what_the_exchange_takes():
    """What another one spends there is waiting for it."""
    for least, accused in ((0.05, False), (0.2, True)):
        found = finding("communication_bound", ranks={0: {"grad_sync": 0.5}, 1: {"grad_sync": least}})
        assert (found is not None) == accused
    assert "20 % of a step of 1 s on the rank that waits least (of 2; most 50 %)" in found.evidence[0]
    assert found.evidence[1] == "sent 2.1 MB/s a host"
    run = plant(phases={**STEP, "grad_sync": 0.2}, noise=0.0, ranks=2)
    silent = {name: dataclasses.replace(host, network={}) for name, host in run.hosts.items()}
    [alone] = judge(Evidence(dataclasses.replace(run, hosts=silent))).findings
    assert len(alone.evidence) == 1, "what was sent was not recorded"


def test_half_the_bytes_are_expected_to_take_half_as_long():
    phases = {**STEP, "grad_sync": 0.4}
    found = finding("communication_bound", phases=phases, gpu=60)
    assert str(found.fixes[0]).startswith("hyperparameters.gradient_compression=bf16")
    assert found.gain.expected.value == pytest.approx(1.25)  # 1 / (1 - 0.4 / 2)


@pytest.mark.parametrize("changed", [{"settings": {"gradient_compression": "bf16"}}, {"facts": {"backend": "smddp"}}])
def test_what_compresses_already_or_cannot_is_not_told_to(changed):
    found = finding("communication_bound", phases={**STEP, "grad_sync": 0.4}, gpu=60, **changed)
    assert "gradient_compression" not in str(found.fixes) and found.gain.expected is None
    assert str(found.fixes[0]).startswith("hyperparameters.global_batch_size=512 (now 256)")


def test_processes_on_the_cores_of_one_machine_are_not_told_to_compress():
    """A cast takes their cores, and the exchange goes through memory. On several hosts, and on GPUs, half the bytes help."""
    phases = {"data_wait": 0.01, "student_forward": 0.23, "backward": 0.56, "optimizer": 0.2, "grad_sync": 0.3}
    planted = {"phases": phases, "facts": {"device": "cpu"}}
    found = finding("communication_bound", **planted)
    assert str(found.fixes[0]).startswith("hyperparameters.global_batch_size=512 (now 256)")
    assert "gradient_compression" not in str(found.fixes)
    worst, best = 1 / (1 - (0.3 + 0.2) / 2), 2.0
    assert found.share == pytest.approx(0.3)
    assert found.gain.expected.value == pytest.approx((worst * best) ** 0.5)
    assert found.gain.expected.low < worst < best < found.gain.expected.high
    paused = Evidence(plant(**{**planted, "ranks": 2, "noise": 0.0, "checkpoint": (20, 8.0)}))
    [of_steps] = [one for one in judge(paused).findings if one.kind == "communication_bound"]
    part = in_steps(paused)
    assert part < 0.8 and of_steps.share == pytest.approx(0.3 * part)
    assert of_steps.gain.share == pytest.approx(part / 2), "half of the time in steps, and none of that in checkpoints"
    assert of_steps.gain.expected.value == pytest.approx(1 / (1 - part * (1 - (0.75 * 0.5) ** 0.5)))
    of_four = {
        "device": "cpu",
        "world_size": 4,
    }  # on nodes that are watched one by one: a record has its own node alone
    several = ({"ranks": {0: {}, 1: {}}, "ranks_per_host": 1}, {"facts": of_four})
    for others in (*several, {"facts": {"device": "cuda"}, "gpu": 60}):
        found = finding("communication_bound", **{**planted, **others})
        assert str(found.fixes[0]).startswith("hyperparameters.gradient_compression=bf16"), others


def test_one_process_has_no_exchange_and_no_slow_rank():
    reported = dict(report(ranks=1).not_applicable)
    assert reported["exchange of gradients"] == reported["one slow rank"] == "one process"


def test_an_exchange_of_ranks_that_were_not_timed_is_not_measured():
    reported = report(phases=None, ranks=1, gpus=[80.0, 80.0])
    assert reasons(reported)["exchange of gradients"] == "no step timeline was found"
    assert reasons(reported)["one slow rank"] == "steps of 0 of an unknown number of ranks: no step timeline was found"
    reported = report(ranks=1, facts={"world_size": 4}, not_measured={"ranks": "the others wrote nothing"})
    assert reasons(reported)["one slow rank"] == "steps of 1 of 4 ranks: the others wrote nothing"
    assert reasons(reported)["exchange of gradients"] == "grad_sync was not recorded"


# A slow rank


def slow(more: float, phase: str = "student_forward", **planted) -> Finding | None:
    """The third of three ranks takes so much longer in a phase; the others wait for it in backward."""
    base = {**STEP, "backward": STEP["backward"] + more, "grad_sync": 0.05 + more}
    late = {phase: STEP[phase] + more, "grad_sync": 0.05, **({} if phase == "backward" else {"backward": 0.66})}
    return finding("slow_rank", phases=base, ranks={0: {}, 1: {}, 2: late}, **planted)


@pytest.mark.parametrize(("more", "share"), [(0.105, None), (0.125, 0.125 / 1.125), (1.0, 0.5)])
def test_a_rank_is_slow_from_a_tenth_of_a_step(more, share):
    found = slow(more)
    assert (found and found.share) == (share and pytest.approx(share))
    assert found is None or (found.rank == 2 and found.gain.expected.value == pytest.approx(1 / (1 - share)))


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("student_forward", "its device is slower"),
        ("backward", "its device is slower"),
        ("data_wait", "its data come later"),
    ],
)
def test_it_is_reported_where_the_slow_rank_spends_more_and_how_much(phase, cause):
    found = slow(0.5, phase, busy=3.0)
    assert found.evidence[:2] == (
        "rank 2 on algo-1 takes 1.45 s a step without waiting, the others 0.95 s",
        f"most of it in {phase}: 0.5 s more than the others",
    )
    assert found.cause.startswith(cause) and "algo-1 has 3.0 of 8 cores in use" in found.evidence
    assert ("input shards near every host" in str(found.fixes)) == (phase == "data_wait")


def test_backward_does_not_count_where_its_exchange_is_not_known():
    """It holds the wait for the others."""
    ranks = {0: {}, 1: {"backward": 1.5}}
    assert finding("slow_rank", ranks=ranks) is None
    assert finding("slow_rank", ranks={0: {"grad_sync": 0.05}, 1: {**ranks[1], "grad_sync": 0.05}}).rank == 1


@pytest.mark.parametrize(
    ("more", "waited", "found"), [(0.13, 0.13, True), (0.13, 0.07, True), (0.13, 0.06, False), (0.1, 0.1, False)]
)
def test_a_rank_that_does_more_between_the_phases_is_slow_if_the_others_wait_for_it_in_their_exchange(
    more, waited, found
):
    """As one that writes logs alone. Without that wait the others may be the ones that wait, in a collective of the script's own."""
    waiting = {"grad_sync": 0.05 + waited, "backward": STEP["backward"] + waited}
    ranks = {0: {"grad_sync": 0.05, NO_PHASE: more}, 1: waiting, 2: waiting}
    reported = finding("slow_rank", ranks=ranks)
    assert (reported is not None) == found
    if found and more == waited:
        assert reported.rank == 0 and reported.evidence[1] == "most of it in no phase: 0.13 s more than the others"
        assert reported.cause.startswith("its process does more than the others between the phases")


def test_what_is_little_of_a_step_makes_no_rank_slow_though_it_is_twice_that_of_the_others():
    ranks = {0: {"grad_sync": 0.6, "student_forward": 0.04}, 1: {"grad_sync": 0.6, "student_forward": 0.1}}
    assert finding("slow_rank", ranks=ranks) is None


def test_a_slow_ranks_own_gpus_are_shown_and_it_is_found_where_no_host_was_watched():
    shown = str(slow(0.5, gpu=60, ranks_per_host=1).evidence)
    assert "algo-3 gpu0: 60 % used" in shown and "algo-1 gpu0" not in shown and "algo-3 has 2.0 of 8 cores" in shown
    assert len(slow(0.5, system=False).evidence) == 2


# Uneven GPUs


def uneven(*gpus: float, **planted) -> Finding | None:
    return finding("uneven_gpus", phases=None, ranks=1, gpus=[*gpus], **planted)


@pytest.mark.parametrize(("gpus", "share"), [((80, 52), None), ((80, 48), 0.16), ((80, 40, 40, 40), 0.3)])
def test_gpus_are_uneven_from_thirty_points_and_the_mean_could_be_that_of_the_busiest(gpus, share):
    found = uneven(*gpus)
    assert (found and found.share) == (share and pytest.approx(share, abs=0.01))
    assert found is None or found.gain.at_most == pytest.approx(1 / (1 - found.share))


@pytest.mark.parametrize(("least", "cause"), [(4, "there are fewer processes than GPUs"), (6, "shared unevenly")])
def test_a_gpu_below_five_percent_has_no_process(least, cause):
    assert cause in uneven(80, least).cause


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        ({"distribution": "none"}, "distribution=torchrun (now none): one process per GPU"),
        ({}, "torchrun --nproc-per-node=GPUS: one process per GPU"),
        ({"distribution": "torchrun"}, "check algo-1 gpu1: its process, clock, temperature and links"),
    ],
    ids=str,
)
def test_a_process_for_each_gpu_is_advised_where_there_is_none(facts, fix):
    [reported] = uneven(80, 20, facts=facts).fixes
    assert str(reported).startswith(fix)


def test_where_ranks_were_timed_the_slow_one_is_looked_for_instead():
    assert finding("uneven_gpus", gpus=[80, 20]) is None


def test_one_gpu_or_none_cannot_be_uneven_and_what_was_not_watched_is_not_measured():
    for planted, why in ((dict(gpu=80, ranks=1), "one GPU"), (dict(ranks=1), "no GPU")):
        assert dict(report(**planted).not_applicable)["GPUs used unevenly"] == why
    reported = report(ranks=1, system=False, facts={"device": "cuda"}, not_measured={"system": "monitor off"})
    assert reasons(reported)["GPUs used unevenly"] == "monitor off"


def test_one_process_beside_seven_idle_gpus_has_too_few_of_them():
    found = finding("uneven_gpus", ranks=1, gpus=[95.0] + [0.0] * 7)
    assert found is not None and "there are fewer processes than GPUs" in found.cause
    assert finding("uneven_gpus", ranks=1, gpus=[95.0, 0.0], facts={"device": "cpu"}) is None


@pytest.mark.parametrize("gpus", [[95.0, 95.0, 0.0, 0.0], [95.0, 95.0, 95.0, 0.0]], ids=str)
def test_gpus_without_a_process_are_found_beside_timed_ranks(gpus):
    found = finding("uneven_gpus", gpus=gpus, ranks=len(gpus) - gpus.count(0.0))
    assert "there are fewer processes than GPUs" in found.cause
    reported = finding("uneven_gpus", gpus=gpus, ranks=len(gpus) - gpus.count(0.0), facts={"distribution": "torchrun"})
    assert str(reported.fixes[0]).startswith("compute.processes_per_host=4: one process per GPU")
    assert finding("uneven_gpus", gpus=[95.0, 95.0, 95.0, 40.0], ranks=4) is None, "the slow rank's GPU"


# A sharded model


def sharded(**planted):
    """Of two ranks, whose weights are shared out: both gather them in forward."""
    parts = (Part(of="data_parallel", at=Address("train.py", 9, ""), values={"class": "fully_shard"}, via=None),)
    run = plant(**{"phases": STEP, "noise": 0.0, "ranks_per_host": 1, **planted})
    return judge(Evidence(dataclasses.replace(run, script=Script(parts=parts))))


def test_of_a_sharded_model_no_rank_is_blamed_for_waiting_in_forward():
    """Rank 0 writes a log, and rank 1 waits for its weights."""
    ranks = {0: {NO_PHASE: 0.15}, 1: {"student_forward": 0.48}}
    plain = judge(Evidence(plant(phases=STEP, noise=0.0, ranks=ranks)))
    assert [one.rank for one in plain.findings if one.kind == "slow_rank"] == [1], "of a plain one this is its own work"
    reported = sharded(
        ranks={0: {NO_PHASE: 0.15}, 1: {"forward": 0.48}}, phases={"data_wait": 0.01, "forward": 0.33, "backward": 0.66}
    )
    assert not [one for one in reported.findings if one.kind == "slow_rank"]
    assert "sharded model wait for each other in forward" in reasons(reported)["one slow rank"]
    late = sharded(ranks={0: {}, 1: {"data_wait": 0.4}}, phases={"data_wait": 0.01, "forward": 0.33, "backward": 0.66})
    [found] = [one for one in late.findings if one.kind == "slow_rank"]
    assert found.rank == 1 and "most of it in data_wait" in found.evidence[1]


def test_smddp_is_not_advised_to_a_run_on_it():
    advice = [
        str(finding("communication_bound", phases={**STEP, "grad_sync": 0.3}, facts={"backend": backend}).fixes[-1])
        for backend in ("nccl", "smddp")
    ]
    assert "smddp" in advice[0] and advice[1] == "fewer, larger hosts"


def test_a_process_for_each_gpu_is_not_advised_where_there_is_one():
    """As where a script leaves all of them on the first GPU: which is looked at."""
    found = finding("uneven_gpus", phases=None, ranks=1, gpus=[95.0, 0.0], facts={"distribution": "torchrun"})
    assert str(found.fixes[0]).startswith("check algo-1 gpu1")
