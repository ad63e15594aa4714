"""How far a run's training threads are kept from their cores, and by whom."""

from __future__ import annotations

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.host_evidence import FEW_SAMPLES

WORKERS, THREADS, PROGRAMS = "workers", "threads", "programs"
"""Who else uses a host's cores: data workers, the other threads of the training processes, programs outside the run."""

COMPUTING = 0.9
"""Share of a core from which the training thread hardly waits for other threads of its process."""


def run_delay(evidence: Evidence) -> float | None:
    """Share of step time in which the training thread was ready to run and had no core: mean over ranks; None: not recorded."""
    return _share_of_steps(evidence, "run_delay_seconds")


def why_no_delay(evidence: Evidence) -> str:
    """Why the wait for a core is not known."""
    return evidence.measurements.not_measured.get("run_delay", "the training thread's run-queue delay was not recorded")


def thread_cpu(evidence: Evidence) -> float | None:
    """Cores that the training thread keeps busy, 0 to 1: mean over ranks; None: not recorded."""
    return _share_of_steps(evidence, "thread_cpu_seconds")


def lost_to(evidence: Evidence, whom: str) -> float | None:
    """Share of step time in which the training thread has no core because others have it: of its wait for one, the part that they and not
    the rest may cause, and no more than their share of the cores; None: not recorded.

    The run's other threads count only if there are more than cores: else, without the others, they have cores of their own.

    Args:
        whom: WORKERS, the data's, or PROGRAMS, outside the run.
    """
    delay, others = run_delay(evidence), neighbours(evidence)
    theirs = others.get(whom)
    if delay is None or theirs is None:
        return None
    rivals = sum(others.get(one, 0.0) for one in (WORKERS, PROGRAMS) if one != whom)
    rivals += others.get(THREADS, 0.0) if oversubscribed(evidence) else 0.0
    return min(delay * theirs / (theirs + rivals or 1.0), theirs / usable_cores(evidence))


def peers(evidence: Evidence) -> float:
    """How much another thread of the process computes on a CPU beside the training thread, relative to it, 0 to 1."""
    computing = evidence.ranks_each * (thread_cpu(evidence) or 0.0)
    return 0.0 if evidence.on_gpu or not computing else min(neighbours(evidence).get(THREADS, 0.0) / computing, 1.0)


def cost_of_workers(evidence: Evidence) -> float:
    """Share of step time that data workers cost by the cores that they take; 0 if it was not recorded.

    If an operator runs on two threads, each waits for a core as often as the other, and the training thread for its peer too.
    """
    return (1 + peers(evidence)) * (lost_to(evidence, WORKERS) or 0.0)


def spinning_cores(evidence: Evidence) -> float:
    """Cores of a host that other threads of the training process hold while its training thread prepares the images, in a job that computes
    on a GPU; 0 if workers prepare them, or the training thread mostly waits. Whether they work or spin cannot be seen.

    OpenMP's threads wait for the next operator without giving their core away (GOMP_SPINCOUNT,
    https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). On an H100 machine a script that decoded one image after the other by
    itself kept 15 of 16 cores busy this way.
    """
    computes = (thread_cpu(evidence) or 0.0) >= COMPUTING
    return neighbours(evidence).get(THREADS, 0.0) if evidence.on_gpu and evidence.workers == 0 and computes else 0.0


def oversubscribed(evidence: Evidence) -> bool:
    """Whether a training process runs more compute threads than it has cores."""
    threads, each = evidence.facts.get("threads"), evidence.cores_each
    return threads is not None and each is not None and threads > max(1.0, each)


def usable_cores(evidence: Evidence) -> float:
    """Of a host: mean over the training hosts, of which at least one was watched."""
    return float(np.mean([evidence.usable_cores(host) for host in evidence.hosts]))


def step_time_spread(evidence: Evidence) -> float | None:
    """Time of slow steps (90th percentile) over that of quick ones (10th), on the first rank.

    In a run with few usual steps all but the very first count, as in the log of six that KT published. None: fewer than FEW_SAMPLES count.
    """
    if not evidence.ranks:
        return None
    steps = evidence.ranks[0]
    kept = windows.steady(steps)
    if kept.sum() < FEW_SAMPLES:
        kept = np.arange(len(steps.step)) > 0
    if kept.sum() < FEW_SAMPLES:
        return None
    quick, slow = np.percentile(windows.each_step(steps, steps.seconds["step"], kept), (10, 90))
    return float(slow / quick) if quick else None


def runnable_per_core(evidence: Evidence) -> float | None:
    """Mean tasks of a host that run or are ready to, over its usable cores: above 1 some wait; None: not recorded."""
    each = [
        float(evidence.during(series).mean()) / evidence.usable_cores(host)
        for host in evidence.hosts
        for (_, name, _), series in host.other.items()
        if name == "RunnableTasks" and len(series.values)
    ]
    return float(np.mean(each)) if each else None


def programs_outside(evidence: Evidence) -> dict[str, float]:
    """Mean cores of a host that programs outside the run use while steps run, by name, the most first; empty if none was seen."""
    used: dict[str, float] = {}
    looks = 0
    for host in evidence.hosts:
        total = host.other.get(("neighbours", "CoresOutsideTheRun", ""))
        if total is None:
            continue
        begin, end = evidence.period
        if not (
            (begin <= total.times) & (total.times <= end)
        ).any():  # the run is shorter than the time between two looks
            begin, end = -np.inf, np.inf
        looks += int(((begin <= total.times) & (total.times <= end)).sum())
        for (kind, name, _), series in host.other.items():
            if kind == "neighbour":
                inside = (begin <= series.times) & (series.times <= end)
                used[name] = used.get(name, 0.0) + float(series.values[inside].sum())
    return (
        {name: cores / looks for name, cores in sorted(used.items(), key=lambda one: -one[1]) if cores} if looks else {}
    )


def neighbours(evidence: Evidence) -> dict[str, float]:
    """Cores of a host that are busy with anything but its training threads, by WORKERS, THREADS and PROGRAMS, if recorded."""
    found = {}
    if evidence.hosts:
        ranks = evidence.ranks_each
        workers = evidence.cores_used(evidence.mean_extra("worker_cpu_seconds"))
        if workers is not None and evidence.workers != 0:
            found[WORKERS] = ranks * workers
        own, thread = evidence.cores_used(evidence.own_cpu), thread_cpu(evidence)
        if own is not None and thread is not None:
            found[THREADS] = ranks * max(0.0, own - thread)
    outside = programs_outside(evidence)
    return {**found, **({PROGRAMS: sum(outside.values())} if outside else {})}


def _share_of_steps(evidence: Evidence, name: str) -> float | None:
    """A per-step number over the step's seconds, slow steps included: mean over the ranks that recorded it."""
    shares = []
    for steps in evidence.ranks:
        if name not in steps.extra:
            continue
        values, seconds = steps.extra[name], steps.seconds["step"]
        where = windows.steady(steps) & np.isfinite(values) & np.isfinite(seconds)
        weights = windows.counts(steps)[where]
        whole = float((seconds[where] * weights).sum())
        if whole:
            shares.append(float((values[where] * weights).sum()) / whole)
    return float(np.mean(shares)) if shares else None
