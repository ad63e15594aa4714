"""Time that training processes cost each other: the exchange of gradients, a slow rank, unevenly used GPUs."""

from __future__ import annotations

import math

import numpy as np

from launcher.insight import windows
from launcher.insight.answers import Answer, DoesNotApply, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, Gain, percent
from launcher.insight.gains import amdahl, bounded, estimated
from launcher.insight.measurements import Steps
from launcher.insight.phases import NO_PHASE
from launcher.insight.rules.feeding import larger_batch, of_larger_batch
from launcher.show.text import listed

SHARED_PHASES = ("grad_sync", "backward", "buffer_sync")
"""Phases in which a rank may wait for the others: DistributedDataParallel reduces gradients inside backward, and synchronises buffers
before forward. A sharded model gathers its weights in forward too."""


UNUSED = 5.0
"""Percent of use below which a GPU has no process that trains."""


def communication(evidence: Evidence) -> Answer:
    """The exchange of gradients that backward does not hide."""
    if evidence.world_size == 1:
        return DoesNotApply("one process")
    shares = [
        (seconds + (windows.mean_seconds(steps, "buffer_sync") or 0.0)) / whole
        for steps in evidence.ranks
        if (seconds := windows.mean_seconds(steps, "grad_sync")) is not None
        and (whole := windows.mean_seconds(steps, "step"))
    ]
    if not shares:
        reason = evidence.why_not("grad_sync") if evidence.ranks else evidence.why_no_steps
        return NotMeasured(what="exchange of gradients", reason=reason)
    least = min(shares)  # the rank that comes last waits for nobody: what it still spends is the exchange itself
    if least < NOTICEABLE:
        return None
    share, settings = least * evidence.steps_part, evidence.settings
    missing = (evidence.world_size or 0) - len(shares)
    why = "how much of the exchange a larger batch hides is not known"
    if missing > 0:
        why = f"whether it is a wait for {_ranks_not_measured(evidence, len(shares))} is not known"
    fixes, gain = [], bounded(share, f"{amdahl(share)}; {why}")
    if in_one_memory(evidence):
        gain = gain if missing > 0 else _of_twice_the_images(evidence, least)
    elif settings.get("gradient_compression") == "none" and evidence.facts.get("backend") != "smddp":
        fixes.append(
            Fix(setting="hyperparameters.gradient_compression", value="bf16", now="none", why="half the bytes")
        )
        formula = f"half the bytes: 1 / (1 - {share:.2f} / 2)"
        if missing <= 0:
            gain = estimated(evidence, "communication_bound", share, 1 - share / 2, formula)
    fixes.append(larger_batch(evidence, 2, "half as many exchanges per epoch; scale the learning rate with it"))
    smddp = "distribution smddp, on an instance type that has it, such as ml.p4d.24xlarge; or "
    is_it = evidence.facts.get("backend") == "smddp"
    fixes.append(Fix(setting=None, value=f"{'' if is_it else smddp}fewer, larger hosts", scope="kit"))
    sent = [
        float(np.mean(evidence.during(host.network["transmit"]))) / 1e6
        for host in evidence.hosts
        if "transmit" in host.network and len(host.network["transmit"].values)
    ]
    return Finding(
        kind="communication_bound",
        title="Steps wait for the exchange of gradients",
        share=share,
        evidence=(
            f"exposed exchange: {percent(least)} of a step of {evidence.step_seconds:.3g} s on the rank that waits least "
            f"(of {len(shares)}; most {percent(max(shares))})",
            *((f"sent {np.mean(sent):.1f} MB/s a host",) if sent else ()),
        ),
        cause="the exchange takes longer than the backward pass that could hide it",
        fixes=tuple(fixes),
        gain=gain,
    )


def in_one_memory(evidence: Evidence) -> bool:
    """Whether all processes run on the cores of one machine: they exchange through its memory, and a cast to half the bytes, which takes
    their cores, makes steps longer (docs/results/diagnosis.md). A record may lack the ranks of other hosts."""
    known = len(evidence.ranks) >= (evidence.world_size or 1)
    return known and not evidence.on_gpu and len({steps.host for steps in evidence.ranks}) == 1


def _of_twice_the_images(evidence: Evidence, exchange: float) -> Gain:
    """
    Args:
        exchange: share of a step in which it waits for the exchange.
    """
    least, most = 1 / 2, 1 - (exchange + (evidence.share("optimizer") or 0.0)) / 2
    return of_larger_batch(
        evidence,
        "communication_bound",
        2,
        math.sqrt(most * least),
        "a step with twice the images takes as long at best and, apart from its exchange and its optimizer, twice as long at worst: "
        f"1 / sqrt({most:.2f} · {least:.2f})",
        unsure=math.sqrt(most / least),
    )


def slow_rank(evidence: Evidence) -> Answer:
    """The other ranks wait for a slow one."""
    if evidence.world_size == 1:
        return DoesNotApply("one process")
    if len(evidence.ranks) < 2:
        reason = evidence.why_not("ranks") if evidence.ranks else evidence.why_no_steps
        return NotMeasured(
            what="one slow rank",
            reason=f"steps of {len(evidence.ranks)} of {evidence.world_size or 'an unknown number of'} ranks: {reason}",
        )
    own = np.array([_own_seconds(evidence, steps) for steps in evidence.ranks])
    if not _one_is_slow(evidence, own):
        own = own + [evidence.seconds_outside_phases(steps) for steps in evidence.ranks]
        if not _one_is_slow(evidence, own) or not _waited_for(evidence, own):
            if _sharded(evidence):
                return NotMeasured(
                    what="one slow rank", reason="ranks of a sharded model wait for each other in forward"
                )
            if len(own) < (evidence.world_size or 0):
                reason = f"it may be {_ranks_not_measured(evidence, len(own))}"
                return NotMeasured(what="one slow rank", reason=reason)
            return None
    slowest = int(own.argmax())
    late = _as_slow(own)
    others = float(np.median(np.delete(own, late)))
    lost = (own[slowest] - others) / evidence.step_seconds
    rank, share = evidence.ranks[slowest], min(lost, 1.0) * evidence.steps_part
    phase, more = _where(evidence, slowest)
    host = evidence.measurements.hosts.get(rank.host)
    ranks = ", ".join(str(evidence.ranks[index].rank) for index in late)
    hosts = list(dict.fromkeys(evidence.ranks[index].host for index in late))
    numbers = [
        f"rank {rank.rank} on {rank.host} takes {own[slowest]:.3g} s a step without waiting, the others {others:.3g} s",
        *((f"nearly as slow: ranks {ranks}, on {listed(hosts)}",) if len(late) > 1 else ()),
        f"most of it in {phase}: {more:.3g} s more than the others",
    ]
    if host is not None and len(evidence.busy_cores(host)):
        numbers.append(
            f"{rank.host} has {evidence.busy_cores(host).mean():.1f} of {evidence.usable_cores(host):.3g} cores in use"
        )
    for name, mean in evidence.gpu_means.items():
        if name.startswith(f"{rank.host} "):
            numbers.append(f"{name}: {mean:.0f} % used")
    causes = {
        "data_wait": "its data come later: its host's cores or storage are slower or busier",
        "host_to_device": "its copies to the device are slower: a different link, or memory that is not pinned",
        NO_PHASE: "its process does more than the others between the phases, such as metrics, logs or files of one rank alone",
    }
    return Finding(
        kind="slow_rank",
        rank=rank.rank,
        title=f"Rank {rank.rank} is slow, and all others wait for it"
        if len(late) == 1
        else f"{len(late)} ranks on {listed(hosts)} are slow, and all others wait for them",
        share=share,
        evidence=tuple(numbers[:6]),
        cause=causes.get(phase, "its device is slower or shared, or its process does not get a core"),
        fixes=(
            Fix(
                setting=None, value=f"check {listed(hosts)}: other processes, clock, temperature, links; or replace it"
            ),
            *(
                (Fix(setting=None, value="input shards near every host (FSx, or File mode)"),)
                if phase == "data_wait"
                else ()
            ),
        ),
        gain=estimated(
            evidence,
            "slow_rank",
            share,
            1 - share,
            f"if the slow {'rank' if len(late) == 1 else 'ranks'} were as fast as the others: {amdahl(share)}",
        ),
    )


def uneven_gpus(evidence: Evidence) -> Answer:
    """Some GPUs are used much more than others; if ranks were timed, `slow_rank` says more."""
    means = evidence.all_gpu_means if evidence.on_gpu else {}
    if len(means) < 2:
        if means or not evidence.on_gpu:
            return DoesNotApply("one GPU" if means else "no GPU")
        return NotMeasured(what="GPUs used unevenly", reason=evidence.why_no_hosts)
    if not evidence.uneven or (len(evidence.ranks) >= 2 and not _without_a_process(evidence)):
        return None
    most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    lost = evidence.steps_part * min(max((means[most] - float(np.mean(list(means.values())))) / 100, 0.0), 1.0)
    return Finding(
        kind="uneven_gpus",
        title=f"The GPUs are used unevenly: {most} {means[most]:.0f} %, {least} {means[least]:.0f} %",
        share=lost,
        evidence=(f"mean use of {len(means)} GPUs from {means[least]:.0f} to {means[most]:.0f} %",),
        cause="the work is shared unevenly: DataParallel in one process, a GPU without a process, or a slow rank"
        if means[least] >= UNUSED
        else f"{least} is idle: there are fewer processes than GPUs",
        fixes=(_process_per_gpu(evidence, least),),
        gain=bounded(lost, f"{amdahl(lost)}; how evenly the work can be shared is not known"),
    )


def _without_a_process(evidence: Evidence) -> bool:
    """Whether a host has more GPUs than ranks, and the surplus is idle."""
    means = evidence.all_gpu_means
    for host in evidence.hosts:
        used = sorted((mean for name, mean in means.items() if name.startswith(f"{host.name} ")), reverse=True)
        if max(used[evidence.local_ranks(host) :], default=100.0) < UNUSED:
            return True
    return False


def _process_per_gpu(evidence: Evidence, idle: str) -> Fix:
    """One process per GPU; if torchrun or smddp starts them already, what else to look at."""
    why, now = "one process per GPU, each with its share of the batch", evidence.facts.get("distribution")
    if now == "none":
        return Fix(setting="distribution", value="torchrun", now=now, why=why)
    if now is None:
        return Fix(setting=None, value="torchrun --nproc-per-node=GPUS", why=why)
    if evidence.all_gpu_means[idle] < UNUSED and _without_a_process(evidence):
        gpus = sum(name.split()[0] == idle.split()[0] for name in evidence.all_gpu_means)
        return Fix(setting="compute.processes_per_host", value=gpus, why=why)
    return Fix(setting=None, value=f"check {idle}: its process, clock, temperature and links")


def _one_is_slow(evidence: Evidence, own: np.ndarray) -> bool:
    """Whether the rank that takes longest takes noticeably longer than the others.

    Args:
        own: (ranks,) seconds a step without waiting for others.
    """
    longest, others = float(own.max()), float(np.median(np.delete(own, own.argmax())))
    return longest - others >= NOTICEABLE * (evidence.step_seconds or math.inf) and longest >= 1.1 * others


def _as_slow(own: np.ndarray) -> list[int]:
    """Which ranks are slow: those that take at least half as much more than the usual one as the slowest does.

    Args:
        own: (ranks,) seconds a step without waiting for others.
    """
    usual = float(np.median(np.delete(own, own.argmax())))
    return [int(index) for index in np.flatnonzero(own - usual >= 0.5 * (own.max() - usual))]


def _ranks_not_measured(evidence: Evidence, measured: int) -> str:
    return f"a rank that was not measured: {measured} of {evidence.world_size} were"


def _waited_for(evidence: Evidence, own: np.ndarray) -> bool:
    """Whether the others' gradient exchange is longer by at least half of what the slowest rank takes longer: outside the phases, a rank
    may also wait for others in a collective of the script's own."""
    slowest = int(own.argmax())
    waits = [windows.mean_seconds(steps, "grad_sync") or 0.0 for steps in evidence.ranks]
    waited = float(np.median(np.delete(waits, slowest))) - waits[slowest]
    return waited >= 0.5 * float(own[slowest] - np.median(np.delete(own, slowest)))


def _own_seconds(evidence: Evidence, steps: Steps) -> float:
    """A rank's seconds per step without waiting for others; of backward only what is not exchange, if that is known."""
    total = 0.0
    for phase in steps.seconds:
        if phase not in ("step", *_shared_phases(evidence)):
            total += windows.mean_seconds(steps, phase) or 0.0
    return total + _own_backward(evidence, steps)


def _sharded(evidence: Evidence) -> bool:
    return evidence.script is not None and evidence.script.is_sharded


def _shared_phases(evidence: Evidence) -> tuple[str, ...]:
    return (*SHARED_PHASES, "forward") if _sharded(evidence) else SHARED_PHASES


def _own_backward(evidence: Evidence, steps: Steps) -> float:
    exchange = windows.mean_seconds(steps, "grad_sync")
    if exchange is None:
        return 0.0
    return max(0.0, (windows.mean_seconds(steps, "backward") or 0.0) - exchange)


def _where(evidence: Evidence, slowest: int) -> tuple[str, float]:
    """The phase in which a rank is slowest compared with the others, and by how many seconds per step."""
    more = {}
    for phase in evidence.ranks[slowest].seconds:
        if phase in ("step", "grad_sync", "buffer_sync") or (phase == "forward" and _sharded(evidence)):
            continue
        each = [
            _own_backward(evidence, steps) if phase == "backward" else windows.mean_seconds(steps, phase) or 0.0
            for steps in evidence.ranks
        ]
        more[phase] = each[slowest] - float(np.median(np.delete(each, slowest)))
    outside = [evidence.seconds_outside_phases(steps) for steps in evidence.ranks]
    more[NO_PHASE] = outside[slowest] - float(np.median(np.delete(outside, slowest)))
    phase = max(more, key=more.__getitem__)
    return phase, more[phase]
