"""Data workers and cores: when there are too many, what they cost a step, and the number that suffices."""

from __future__ import annotations

import math

from launcher.insight.contention import THREADS, WORKERS, neighbours, run_delay, runnable_per_core, step_time_spread
from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.findings import NOTICEABLE
from launcher.insight.length import too_short

TOO_MANY = 2.0
"""Workers per usable core of their process from which there are too many: they then only take turns."""

FULL = 0.9
"""Share of the usable cores from which they count as full: at most 1 / 0.9 = 1.11 times the work fits on them."""

CROWDED = 0.8
"""Share of the usable cores in use from which tasks wait for each other's."""

MANY = 16
"""Workers a process that are suspected though there are more cores: each may run several threads, and be bound to some of the cores. KT
published no number, only that it was large."""

OFTEN_FULL = 0.5
"""Share of the samples with a core at 95 % or more from which a thread may be the limit."""

SWINGING = 1.5
"""Slow steps over quick ones from which steps swing. KT's six published iterations take from 9 to 32 s: 3.5."""


def workers_exceed_cores(evidence: Evidence) -> bool:
    """Whether there are too many workers for the cores."""
    each = evidence.cores_each
    return bool(evidence.workers and each and evidence.workers >= max(TOO_MANY * each, each + 2))


def taken_by_workers(evidence: Evidence) -> float | None:
    """Share of a step that too many workers visibly cost; None if there are not too many, or they do no harm.

    It shows as a wait for data; or, as in KT's job, as an idle device or as unsteady steps on the same cores. It is unknown if neither
    the wait nor the device was measured, or if the run is too short.
    """
    if too_short(evidence) or (evidence.share("data_wait") is None and evidence.gpu_idle is None):
        return None
    kept = kept_by_workers(evidence)
    if kept is not None:
        return kept
    if suspected(evidence):
        return evidence.gpu_idle
    if not workers_exceed_cores(evidence) or evidence.busy is None or evidence.busy < 0.6:
        return None
    wait, idle = evidence.lost_to_data or 0.0, evidence.gpu_idle
    if wait >= NOTICEABLE:
        ready = runnable_per_core(evidence)
        if evidence.busy < CROWDED and ready is not None and ready < 1:
            return None  # nobody waits for a core: the workers wait for something else, as many as they are
        return max(wait, idle or 0.0)
    if evidence.busy < CROWDED:
        return None
    if evidence.on_gpu:
        if run_delay(evidence) is not None:
            return None  # the threads that drive the GPU had their cores
        return idle if idle is not None and idle >= IDLE_GPU else None
    unsteady = evidence.unsteady or 0.0
    pressed = evidence.pressure is not None and evidence.pressure >= 0.5
    return max(unsteady, NOTICEABLE) if evidence.busy >= FULL and (pressed or unsteady >= NOTICEABLE) else None


def kept_from_core(evidence: Evidence) -> float | None:
    """Share of a step that is lost while the threads that drive the device are ready and have no core; None: too little, or not recorded.

    What a GPU does meanwhile is not lost: its queue lasts for a while. If only the process's own threads could have the core, and
    cores are left over, the delay comes from threads that wake each other.
    """
    delay, others = run_delay(evidence), neighbours(evidence)
    if delay is None:
        return None
    own_threads = bool(others) and max(others, key=lambda one: others[one]) == THREADS
    busy = evidence.slow_steps_too.busy
    if own_threads and busy is not None and busy < CROWDED:
        return None
    idle = evidence.slow_steps_too.gpu_idle
    lost = min(delay, idle) if evidence.on_gpu and idle is not None else delay
    return lost if lost >= NOTICEABLE else None


def kept_by_workers(evidence: Evidence) -> float | None:
    """The same if a GPU's data workers have the cores, more of them than needed, and hardly any step waits for data."""
    lost, others = kept_from_core(evidence), neighbours(evidence)
    if (
        lost is None
        or not evidence.on_gpu
        or not evidence.workers
        or not evidence.cores_each
        or (evidence.share("data_wait") or 0.0) >= NOTICEABLE
    ):
        return None
    if others.get(WORKERS, 0.0) < 0.5 * sum(others.values()):
        return None
    return lost if WORKERS in others and sensible_workers(evidence) < evidence.workers else None


def suspected(evidence: Evidence) -> bool:
    """Whether a run looks like KT's, and nothing recorded who has the cores: workers for every core of their process, or MANY, single
    cores full, GPUs that idle, steps that swing, and hardly any wait for data or for other ranks."""
    each, swings = evidence.cores_each, step_time_spread(evidence)
    return bool(
        run_delay(evidence) is None
        and (evidence.gpu_idle or 0.0) >= IDLE_GPU
        and (evidence.saturated or 0.0) >= OFTEN_FULL
        and evidence.workers
        and each
        and evidence.workers >= max(min(each, MANY), 2)
        and (not evidence.ranks or (swings is not None and swings >= SWINGING))
        and (evidence.share("data_wait", "grad_sync", "buffer_sync") or 0.0) < NOTICEABLE
        and not evidence.uneven
    )


def sensible_workers(evidence: Evidence) -> int:
    """The fewest workers per process for which no step waits.

    If the workers' CPU time is known: as many as prepare a step's images while the device computes it, or while all cores do the work of
    both. Time that a step lost to a core that others had is not counted as computing.
    Else: as many as fill the cores that the training process leaves. It counts as one core, or as none if it mostly waits.
    """
    cores, own, step = evidence.cores_each or 1.0, evidence.own_cpu, evidence.step_seconds
    whole = evidence.all_cpu
    waits = evidence.share("data_wait") or 0.0
    if own is None or whole is None or not evidence.workers or not step:
        return max(1, math.floor(cores - (0.0 if waits >= 0.5 else 1.0) + 0.5))
    theirs = whole - own
    lost = kept_from_core(evidence) or 0.0
    needed = 1 - (evidence.lost_to_data or 0.0) - lost
    lasts = max(whole / cores, needed * step if evidence.on_gpu else 0.0)
    return min(max(1, math.ceil(theirs / lasts - 0.1)), max(1, math.floor(cores + 0.5))) if lasts else 1
