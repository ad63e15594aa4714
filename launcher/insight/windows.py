"""One rank's logged windows: how many steps they have, which of them count, and means over those."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from launcher.insight.measurements import Stall, Steps

WARM_UP_STEPS = 5
"""Steps that do not count as steady: in them, memory is allocated and libraries choose their kernels."""

UNKNOWN_WHERE_MISSING = {"grad_sync"}
"""Phases that are unknown if a window lacks them; any other phase that it lacks did not happen."""

FAR = 2.0
"""Multiple of the median from which a logged window is an outlier, as in Debugger's data-loading analysis."""

FAR_STEP = 5.0
"""The same for the longest step of a window."""

RARE = 0.25
"""Share of the steps above which slow ones are not outliers but the run's usual speed."""


def _once(function: Callable[[Steps], np.ndarray]) -> Callable[[Steps], np.ndarray]:
    """Compute a function once for each rank's windows, which every rule asks for again, and keep the result while these exist."""
    known: WeakKeyDictionary[Steps, np.ndarray] = WeakKeyDictionary()

    @functools.wraps(function)
    def found(steps: Steps) -> np.ndarray:
        if steps not in known:
            known[steps] = function(steps)
            known[steps].flags.writeable = False
        return known[steps]

    return found


@_once
def counts(steps: Steps) -> np.ndarray:
    """(n,) steps of each logged window."""
    recorded = steps.extra.get("steps")
    if recorded is not None and np.isfinite(recorded).all():
        logged: np.ndarray = np.maximum(recorded, 1)
        return logged
    between = np.diff(steps.step)
    usual = float(np.median(between)) if len(between) else float(steps.step[0])
    first = min(float(steps.step[0]), usual)  # a run resumed from a checkpoint begins at a later step
    derived: np.ndarray = np.maximum(np.concatenate([[first], between]), 1)
    return derived


def each_step(steps: Steps, values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Values of some windows, repeated for each of their steps: the observer's windows last half a second, however many steps that is.

    Of more than 100,000 steps, in proportion.
    """
    weights = counts(steps)[where]
    repeated: np.ndarray = np.repeat(values[where], np.ceil(weights / max(1.0, weights.sum() / 1e5)).astype(int))
    return repeated


@_once
def steady(steps: Steps) -> np.ndarray:
    """(n,) which windows count: not those of the first steps, unless there are no others, nor those that torch.profiler slowed."""
    begun = steps.step - counts(steps) - (steps.step[0] - counts(steps)[0])
    mask: np.ndarray = begun >= WARM_UP_STEPS
    if len(mask) > 1 and not mask.any():
        mask = np.arange(len(steps.step)) >= max(1, len(steps.step) // 4)
    undisturbed: np.ndarray = mask & ~(np.nan_to_num(steps.extra.get("profiled", np.zeros(len(mask)))) > 0)
    if undisturbed.any():
        return undisturbed
    return mask if mask.any() else np.ones(len(steps.step), bool)


@_once
def far(steps: Steps) -> np.ndarray:
    """(n,) which windows are outliers: rare ones far above the median of the steady ones, or with such a step."""
    seconds, kept = np.nan_to_num(steps.seconds["step"]), steady(steps)
    median = np.median(each_step(steps, seconds, kept))
    farthest = seconds > FAR_STEP * median
    if "slowest_step" in steps.extra:  # one slow step among many of a window
        farthest |= (np.nan_to_num(steps.extra["slowest_step"]) > FAR_STEP * median) & (seconds > 1.1 * median)
    # if many are twice as slow, the farthest are still outliers
    for found in ((seconds > FAR * median) | farthest, farthest):
        rare: np.ndarray = found & kept
        if counts(steps)[rare].sum() <= RARE * counts(steps)[kept].sum():
            return rare
    return np.zeros(len(seconds), bool)


@_once
def usual(steps: Steps) -> np.ndarray:
    """(n,) which windows are a run's usual speed: the steady ones without the outliers."""
    mask: np.ndarray = steady(steps) & ~far(steps)
    return mask


def mean_seconds(steps: Steps, phase: str, where: np.ndarray | None = None) -> float | None:
    """A rank's mean seconds per step of a phase, over the usual windows; with `where`, over the steady ones among those."""
    if phase not in steps.seconds:
        return None
    mask = usual(steps) if where is None else steady(steps) & where
    values, weights = steps.seconds[phase][mask], counts(steps)[mask]
    if phase in UNKNOWN_WHERE_MISSING:
        values, weights = values[np.isfinite(values)], weights[np.isfinite(values)]
    return float(np.average(np.nan_to_num(values), weights=weights)) if len(values) else None


def timed_mean(steps: Steps, phase: str, where: np.ndarray | None = None) -> float:
    """The same for a phase that this rank is known to have timed, as every rank times its steps."""
    mean = mean_seconds(steps, phase, where)
    assert mean is not None, f"{phase} was timed"
    return mean


def steps_done(steps: Steps) -> float:
    """Steps from the first window's first to the last window's last, including windows that were not read."""
    return float(steps.step[-1] - steps.step[0] + counts(steps)[0])


def seconds(steps: Steps) -> float:
    """Seconds of all those steps."""
    weights = counts(steps)
    return float(np.average(np.nan_to_num(steps.seconds["step"]), weights=weights)) * steps_done(steps)


def seconds_after_the_first(steps: Steps) -> float:
    """Seconds of the steady windows, including those that took far longer, such as waits at the start of epochs."""
    kept = steady(steps)
    return float((np.nan_to_num(steps.seconds["step"]) * counts(steps))[kept].sum())


def within(times: np.ndarray, began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """(n,) which times lie in one of some spans, which may overlap."""
    order = np.argsort(began, kind="stable")
    latest = np.concatenate([[-np.inf], np.maximum.accumulate(ended[order])])
    inside: np.ndarray = times <= latest[np.searchsorted(began[order], times, side="right")]
    return inside


def between(steps: Steps, stalls: Iterable[Stall]) -> np.ndarray:
    """(n,) seconds between each window and the one before that lie in no step and no stall, as when loaders restart.

    0 if the window before was not read.
    """
    weights = counts(steps)
    gaps = np.diff(steps.ended) - np.nan_to_num(steps.seconds["step"][1:]) * weights[1:]
    for stall in stalls:
        after = np.searchsorted(
            steps.ended, stall.began, side="right"
        )  # clocks of two lines differ by what writing takes
        if stall.rank == steps.rank and 0 < after < len(steps.ended):
            gaps[after - 1] -= stall.seconds
    gaps = np.where(np.diff(steps.step) == weights[1:], gaps, 0.0)
    whole = np.concatenate([[0.0], gaps])
    return np.where(np.isfinite(whole) & (whole > 0.0), whole, 0.0)
