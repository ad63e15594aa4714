"""Data workers and cores: when there are too many, what they cost a step, and the number that suffices."""

from __future__ import annotations

import math

from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.findings import NOTICEABLE

TOO_MANY = 2.0
"""Workers per usable core of their process from which there are too many: they then only take turns."""

FULL = 0.9
"""Share of the usable cores from which they count as full: at most 1 / 0.9 = 1.11 times the work fits on them."""


def crowded(evidence: Evidence) -> bool:
    """Whether there are too many workers for the cores."""
    each = evidence.cores_each
    return bool(evidence.workers and each and evidence.workers >= max(TOO_MANY * each, each + 2))


def taken_by_workers(evidence: Evidence) -> float | None:
    """Share of a step that too many workers cost, as far as it shows; None where there are not too many, or no harm.

    It shows as a wait for data; or, as in KT's job, as an idle device or as unsteady steps on the same cores. It is unknown where neither
    the wait nor the device was measured, or only first steps were.
    """
    if evidence.only_first_steps or (evidence.share("data_wait") is None and evidence.gpu_idle is None):
        return None
    if not crowded(evidence) or evidence.busy is None or evidence.busy < 0.6:
        return None
    wait, idle = evidence.share("data_wait") or 0.0, evidence.gpu_idle
    if wait >= NOTICEABLE:
        return max(wait, idle or 0.0)
    if evidence.busy < 0.8:
        return None
    if evidence.on_gpu:
        return idle if idle is not None and idle >= IDLE_GPU else None
    unsteady = evidence.unsteady or 0.0
    pressed = evidence.pressure is not None and evidence.pressure >= 0.5
    return max(unsteady, NOTICEABLE) if evidence.busy >= FULL and (pressed or unsteady >= NOTICEABLE) else None


def sensible_workers(evidence: Evidence) -> int:
    """The fewest workers per process for which no step waits.

    With the workers' CPU time: as many as prepare a step's images while the device computes it, or while all cores do the work of both.
    Else: as many as fill the cores that the training process leaves. Where its CPU time was not measured either, it counts as one core,
    or as none where it mostly waits.
    """
    cores, own, step = evidence.cores_each or 1.0, evidence.own_cpu, evidence.step_seconds
    whole = evidence.all_cpu
    waits = evidence.share("data_wait") or 0.0
    if own is None or whole is None or not evidence.workers or not step:
        return max(1, math.floor(cores - (0.0 if waits >= 0.5 else 1.0) + 0.5))
    theirs = whole - own
    lasts = max(whole / cores, (1 - waits) * step if evidence.on_gpu else 0.0)
    return min(max(1, math.ceil(theirs / lasts - 0.1)), max(1, math.floor(cores + 0.5))) if lasts else 1
