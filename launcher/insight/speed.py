"""Measured speed-up of one run over another: over all of the training that both did, with first steps and pauses."""

from __future__ import annotations

import numpy as np

from launcher.insight import windows
from launcher.insight.control import changes
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE
from launcher.insight.length import common, work_of_a_step
from launcher.insight.ratio import FEWEST, Measured, Ratio, added, ratio, total
from launcher.insight.touches import START


def measured(before: Evidence, after: Evidence) -> Ratio | None:
    """Work per second after, over before, in the part that both did; None if a run was not timed."""
    if not (before.ranks and after.ranks):
        return None
    before, after = common(before, after)
    _, each = work_of_a_step(before, after)
    work = [windows.steps_done(run.ranks[0]) * one for run, one in zip((before, after), each)]
    seconds = training(after)
    longer = Measured(seconds.value + start_cost(before, after), seconds.variance, seconds.degrees_of_freedom)
    return ratio(training(before).over(work[0]), longer.over(work[1]))


def training(evidence: Evidence) -> Measured:
    """Seconds from the start of the first step to the end of the last, pauses included, of a run whose steps were measured.

    The first steps count as they were. Of the others, those that begin an epoch have their own spread, unless fewer than FEWEST windows
    do not begin one, and so has each kind of pause.
    A kind with too few for a spread of its own is assumed to spread as usual steps do in that time.
    """
    steps = evidence.ranks[0]
    counts, steady = windows.counts(steps), windows.steady(steps)
    seconds = np.nan_to_num(steps.seconds["step"]) + windows.between(steps, evidence.measurements.stalls) / counts
    first = np.concatenate([[False], np.diff(steps.epoch) > 0])
    if (steady & ~first).sum() < FEWEST <= (steady & first).sum():  # epochs are as short as windows
        first = np.zeros_like(first)
    counts = counts * windows.steps_done(steps) / counts.sum()  # includes windows that were not read
    usual = total(seconds[steady & ~first], counts[steady & ~first])
    if not usual.degrees_of_freedom:
        return Measured(evidence.training_seconds, 0.0, 0)
    parts = [total(seconds[steady & first], counts[steady & first])]
    for kind in {stall.kind for stall in evidence.measurements.stalls}:
        pauses = np.array(
            [one.seconds for one in evidence.measurements.stalls if (one.kind, one.rank) == (kind, steps.rank)]
        )
        parts.append(total(pauses, np.ones(len(pauses))))
    few = sum(part.value for part in parts if not part.degrees_of_freedom)
    alike = Measured(usual.value + few, usual.variance * (1 + few / usual.value), usual.degrees_of_freedom)
    spread = added([alike, *(part for part in parts if part.degrees_of_freedom)])
    return Measured(evidence.training_seconds, spread.variance, spread.degrees_of_freedom)


def start_cost(before: Evidence, after: Evidence) -> float:
    """Seconds that the second run took longer to its first step, if the change can cause that; else 0.

    NOTICEABLE more is noise: starts of one job differ by that much. Less counts for nothing: the first run leaves files in memory.
    """
    starts = [start for run in (before, after) if (start := start_seconds(run)) is not None]
    if len(starts) < 2 or not any(touch.can_touch(START) for touch in changes(before, after).values()):
        return 0.0
    first, second = starts
    return second - first if second > first * (1 + NOTICEABLE) else 0.0


def start_seconds(evidence: Evidence) -> float | None:
    """Seconds from the process's start to the start of its first step, on the slowest rank; None: not recorded."""
    until, steps = evidence.facts.get("seconds_to_first_step"), evidence.ranks[0] if evidence.ranks else None
    if until is None or steps is None:
        return None
    longest = steps.extra.get("slowest_step", steps.seconds["step"])[0]  # in the first window that is the first step
    return max(0.0, float(until - longest)) if np.isfinite(longest) else None
