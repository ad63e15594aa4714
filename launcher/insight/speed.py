"""How much faster one run trained than another, as it was measured: over the whole of its training, with first steps and pauses."""

from __future__ import annotations

import numpy as np

from launcher.insight import windows
from launcher.insight.control import changes
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE
from launcher.insight.ratio import Measured, Ratio, added, ratio, total
from launcher.insight.touches import START


def measured(before: Evidence, after: Evidence) -> Ratio | None:
    """Work a second after, over before; None where a run was not timed."""
    if not (before.ranks and after.ranks):
        return None
    images = unit(before, after) == "images"
    work = [
        windows.steps_done(run.ranks[0]) * (run.settings["global_batch_size"] if images else 1)
        for run in (before, after)
    ]
    seconds = training(after)
    longer = Measured(seconds.value + start_cost(before, after), seconds.variance, seconds.freedom)
    return ratio(training(before).over(work[0]), longer.over(work[1]))


def unit(before: Evidence, after: Evidence) -> str:
    """What the work of two runs is counted in: images, or steps where a batch is not known."""
    known = all(isinstance(run.settings.get("global_batch_size"), int) for run in (before, after))
    return "images" if known else "steps"


def training(evidence: Evidence) -> Measured:
    """Seconds from the first step's begin to the last one's end, pauses included, of a run whose steps were measured.

    The first steps count as they were. Of the others, those that begin an epoch have their own spread, and so has each kind of pause.
    """
    steps = evidence.ranks[0]
    counts, steady = windows.counts(steps), windows.steady(steps)
    seconds = np.nan_to_num(steps.seconds["step"]) + windows.between(steps, evidence.measurements.stalls) / counts
    first = np.concatenate([[False], np.diff(steps.epoch) > 0])
    counts = counts * windows.steps_done(steps) / counts.sum()  # those of windows that were not read too
    usual = total(seconds[steady & ~first], counts[steady & ~first])
    parts = [usual, total(seconds[steady & first], counts[steady & first])]
    for kind in {stall.kind for stall in evidence.measurements.stalls}:
        pauses = np.array(
            [one.seconds for one in evidence.measurements.stalls if (one.kind, one.rank) == (kind, steps.rank)]
        )
        parts.append(total(pauses, np.ones(len(pauses))))
    spread = added(parts)
    return Measured(evidence.training_seconds, spread.variance, spread.freedom if usual.freedom else 0)


def start_cost(before: Evidence, after: Evidence) -> float:
    """Seconds that the second run took longer until its first step, where the change can cause that; else 0.

    NOTICEABLE more is noise: starts of one job differ by so much. Less counts for nothing: the first run leaves files in memory.
    """
    starts = [start for run in (before, after) if (start := start_seconds(run)) is not None]
    if len(starts) < 2 or not any(touch.can_touch(START) for touch in changes(before, after).values()):
        return 0.0
    first, second = starts
    return second - first if second > first * (1 + NOTICEABLE) else 0.0


def start_seconds(evidence: Evidence) -> float | None:
    """Seconds from the process's start to its first step's begin, on the slowest rank; None: not recorded."""
    until, steps = evidence.facts.get("seconds_to_first_step"), evidence.ranks[0] if evidence.ranks else None
    if until is None or steps is None:
        return None
    longest = steps.extra.get("slowest_step", steps.seconds["step"])[0]  # in the first window that is the first step
    return max(0.0, float(until - longest)) if np.isfinite(longest) else None
