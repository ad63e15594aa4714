"""The numbers of a run's steps: their time, the shares of their phases, and what lies between them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from launcher.insight import windows
from launcher.insight.findings import MAX_SHARE
from launcher.insight.measurements import Measurements, Steps
from launcher.insight.phases import parents


class StepEvidence:
    """Numbers of a run's steps; None: not measured."""

    def __init__(self, measurements: Measurements):
        self.measurements = measurements
        self.settings = measurements.settings
        self.facts = measurements.facts
        self.script = measurements.script

    @functools.cached_property
    def ranks(self) -> tuple[Steps, ...]:
        """The ranks with at least one logged step."""
        return tuple(steps for steps in self.measurements.ranks if len(steps.step) and "step" in steps.seconds)

    @property
    def only_first_steps(self) -> bool:
        """Whether steps were timed, but none after the first ones, which are slower."""
        return bool(self.ranks) and all(windows.steps_done(steps) <= windows.WARM_UP_STEPS for steps in self.ranks)

    @functools.cached_property
    def world_size(self) -> int | None:
        """Training processes; None: not known."""
        known = self.facts.get("world_size") or len(self.ranks) or None
        return None if known is None else int(known)

    @functools.cached_property
    def unsteady(self) -> float | None:
        """Share of the time by which usual steps are slower than quick ones (their 10th percentile), on the first rank."""
        if not self.ranks:
            return None
        steps = self.ranks[0]
        kept = windows.steady(steps)
        if kept.sum() < 8:
            return None
        seconds = windows.each_step(steps, steps.seconds["step"], kept)
        return max(0.0, 1 - float(np.percentile(seconds, 10)) / float(np.mean(seconds)))

    @functools.cached_property
    def slowest_step(self) -> float | None:
        """Seconds of the longest single step after the first ones, of any rank."""
        longest = [
            steps.extra["slowest_step"][windows.steady(steps)] for steps in self.ranks if "slowest_step" in steps.extra
        ]
        return float(np.nanmax(np.concatenate(longest))) if longest else None

    def mean_extra(self, name: str) -> float | None:
        """Mean over ranks of a per-step number, slow steps included; None if a rank lacks it.

        All steps count equally, however few of them a window holds: the observer gives a slow one a window of its own.
        """
        return self._mean_extra(name, windows.steady, windows.counts)

    def _mean_extra(
        self, name: str, counted: Callable[[Steps], np.ndarray], weights: Callable[[Steps], np.ndarray]
    ) -> float | None:
        """
        Args:
            counted: (n,) bool, which of a rank's windows count.
            weights: (n,) of each of them.
        """
        means = []
        for steps in self.ranks:
            values = steps.extra.get(name)
            if values is None or not (where := counted(steps) & np.isfinite(values)).any():  # a rank without it
                return None
            means.append(float(np.average(values[where], weights=weights(steps)[where])))
        return float(np.mean(means)) if means else None

    def cores_used(self, cpu_seconds: float | None) -> float | None:
        """Cores that this CPU time per step, a number of `mean_extra`, takes: over the time of the same steps, slow ones included, since
        computing may be what makes a step slow. None if either was not measured."""
        return cpu_seconds / self.steady_step_seconds if cpu_seconds is not None and self.steady_step_seconds else None

    @functools.cached_property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, over ranks."""
        means = [windows.timed_mean(steps, "step") for steps in self.ranks]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def steady_step_seconds(self) -> float | None:
        """The same with the outliers, which CPU times per step include too."""
        means = [windows.timed_mean(steps, "step", np.ones(len(steps.step), bool)) for steps in self.ranks]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def mfu(self) -> float | None:
        """Model FLOP utilisation in usual steps, 0 to 1: mean over ranks; None: not known."""
        return self.mean_rate("mfu")

    def mean_rate(self, name: str) -> float | None:
        """Mean over ranks of a number per second in usual steps: over their time, not over the steps; None if a rank lacks it."""
        return self._mean_extra(name, windows.usual, lambda steps: steps.seconds["step"] * windows.counts(steps))

    @functools.cached_property
    def phases(self) -> dict[str, float]:
        """Share of each phase in a step: the median over ranks, so that one slow rank does not speak for all."""
        names = {phase for steps in self.ranks for phase in steps.seconds if phase != "step"}
        return {name: self._share(name) for name in sorted(names)}

    def _share(self, phase: str) -> float:
        shares = []
        for steps in self.ranks:
            seconds, whole = windows.mean_seconds(steps, phase), windows.mean_seconds(steps, "step")
            if seconds is not None and whole:
                shares.append(seconds / whole)
        return float(np.median(shares)) if shares else 0.0

    def share(self, *phases: str) -> float | None:
        """Share of a step that these phases take together, at most MAX_SHARE; None if none of them was measured."""
        known = [self.phases[phase] for phase in phases if phase in self.phases]
        return min(MAX_SHARE, sum(known)) if known else None

    @functools.cached_property
    def device_share(self) -> float:
        """Share of a step in its phases without the wait for data. On a GPU they are the device's own time, and a host that does not wait
        for it gets its batches meanwhile: together with that wait they may take more than a step."""
        return sum(share for name, share in self.phases.items() if name != "data_wait" and name not in parents())

    @functools.cached_property
    def lost_to_data(self) -> float | None:
        """Share of a step that is saved if no step waits for data: the wait, except what the device's phases need of the step anyway. These
        say more than an idle GPU's samples, which count gaps within the phases too. None: the wait was not measured."""
        wait = self.share("data_wait")
        return None if wait is None else min(wait, max(0.0, 1 - self.device_share))

    @property
    def forward_share(self) -> float | None:
        return self.share("student_forward", "forward")

    @functools.cached_property
    def unaccounted(self) -> float | None:
        """Share of a step in no phase; None if too few phases were measured to tell."""
        if self.forward_share is None or "backward" not in self.phases or "data_wait" not in self.phases:
            return None
        return max(0.0, 1 - sum(share for name, share in self.phases.items() if name not in parents()))

    def outside_phases(self, steps: Steps) -> np.ndarray | None:
        """(n,) seconds per step in no phase, of each window of a rank; None if too few phases were measured to tell."""
        if self.unaccounted is None:
            return None
        named = [values for phase, values in steps.seconds.items() if phase != "step" and phase not in parents()]
        outside: np.ndarray = np.nan_to_num(steps.seconds["step"]) - np.nan_to_num(named).sum(axis=0)
        return outside.clip(0.0)

    def seconds_outside_phases(self, steps: Steps) -> float:
        """A rank's mean seconds of a usual step in no phase; 0 if too few phases were measured to tell."""
        outside, usual = self.outside_phases(steps), windows.usual(steps)
        return 0.0 if outside is None else float(np.average(outside[usual], weights=windows.counts(steps)[usual]))

    @functools.cached_property
    def steps_seconds(self) -> float:
        """Seconds of all steps of the first rank, warm-up included."""
        if not self.ranks:
            return 0.0
        return windows.seconds(self.ranks[0])

    def stall_seconds(self, kind: str) -> float:
        """Seconds of all stalls of a kind on the first rank: others may wait for its checkpoint within their evaluation. If that rank had
        none of any kind, on the rank where they took longest."""
        first = self.ranks[0].rank if self.ranks else None
        if any(stall.rank == first for stall in self.measurements.stalls):
            return sum(stall.seconds for stall in self.measurements.stalls if (stall.kind, stall.rank) == (kind, first))
        by_rank: dict[int, float] = {}
        for stall in self.measurements.stalls:
            if stall.kind == kind:
                by_rank[stall.rank] = by_rank.get(stall.rank, 0.0) + stall.seconds
        return max(by_rank.values(), default=0.0)

    @functools.cached_property
    def training_seconds(self) -> float:
        """Seconds of steps, of stalls, and of other time between steps."""
        kinds = {stall.kind for stall in self.measurements.stalls}
        pauses = float(windows.between(self.ranks[0], self.measurements.stalls).sum()) if self.ranks else 0.0
        return self.steps_seconds + sum(self.stall_seconds(kind) for kind in kinds) + pauses

    @functools.cached_property
    def steps_part(self) -> float:
        """Share of the training time at the speed of usual steps; the rest are stalls, outliers and the first steps."""
        if not self.training_seconds or not self.step_seconds:
            return 1.0
        usual = self.step_seconds * windows.steps_done(self.ranks[0])
        return min(1.0, usual / self.training_seconds)
