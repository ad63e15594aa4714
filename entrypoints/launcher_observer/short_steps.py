"""Steps so short that measuring each would slow them down: some in a row are measured, then several times as many are only counted.

A counted step costs two looks at the clock. Its length and its wait for data are known, its other phases are not: windows.py lets the
work of counted steps divide as that of the measured ones beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

from launcher_observer.events import Events
from launcher_observer.step import LOADING, Loading, Step
from launcher_observer.step_clock import StepClock
from launcher_observer.timers import HostTimer
from launcher_observer.windows import SHORTEST, CountedSteps, Windows

SHORT = 0.005
"""Seconds of a step. To measure one takes some 15 µs of CPU time (tests/benchmarks/observer_cost.py), 0.3 % of this."""

MEASURED, COUNTED = 8, 120
"""Steps in a row."""

COUNTING = "counting"
"""What stands in the place of a phase while steps are only counted."""


class ShortSteps:
    """Decides whether steps are measured or counted, and counts."""

    def __init__(
        self,
        events: Events,
        clock: StepClock,
        windows: Windows,
        trains: Callable[[], bool],
        guarded: Callable[..., Any],
    ):
        """
        Args:
            trains: whether this is the training thread, and gradients are on.
            guarded: calls a function and reports its error.
        """
        self._events, self._clock, self._windows, self._trains = events, clock, windows, trains
        self._guarded = guarded
        self.is_due = False
        """Whether steps may be counted from the next batch on, or are being counted."""
        self.is_counting = False
        """Whether nobody wants to know what the step does, but for its optimizer."""
        self.has_trained = False
        """Whether an optimizer stepped since the last batch."""
        self._alike = 0
        """Steps in a row that were measured, short, and of one batch."""
        self._samples, self._cpu_each = 0, 0.0
        """Of the last of them."""
        self.batches: Any = None
        """The iterator whose batches are counted."""
        self.is_asking = False
        """Whether its next batch is waited for, which may come from another one."""
        self._waits_since = 0.0
        self._loading: Loading | None = None
        self._began = self._asked = self._cpu = 0.0
        """When the first of the counted steps began, when this one did, and what CPU time the process had used at first."""
        self._steps, self._waited, self._slowest, self._waits_now = 0, 0.0, 0.0, 0.0

    def measured(self, step: Step) -> None:
        """A step was measured."""
        is_short = step.ended - step.began < SHORT and step.batches == 1 and not step.other_batches and not step.paused
        self._alike = self._alike + 1 if is_short else 0
        self.is_due = self._alike >= MEASURED
        self._samples, self._cpu_each = step.samples, step.cpu

    def begins(self, batches: Any) -> bool:
        """Whether steps are counted from the next batch of this iterator on. To be called while `is_due`."""
        loading = getattr(batches, LOADING, None)
        if loading is None or loading.loader.role != "training" or not self._trains():
            return False
        self._cpu = process_time()
        self._events.add(None, self._clock.leave, self._cpu)
        self._events.settle()  # which tells of the last steps, and perhaps that they are not alike
        if not self.is_due or not self._clock.is_idle:
            return False
        self._events.phase, self.is_counting, self.has_trained = COUNTING, True, False
        self.batches, self._loading = batches, loading
        self._began = self._asked = self._clock.now
        self._steps, self._waited, self._slowest, self._waits_now = 0, 0.0, 0.0, 0.0
        return True

    def goes_on(self) -> bool:
        """The next batch of `batches` is asked for: whether the step with it is counted too."""
        asked = perf_counter()
        if self.has_trained:
            seconds = asked - self._asked
            if self._steps + 1 == COUNTED or seconds >= SHORTEST:
                self._guarded(self._end, asked)
                return False
            self._steps += 1
            self._waited += self._waits_now
            if seconds > self._slowest:
                self._slowest = seconds
            self._asked, self._waits_now, self.has_trained = asked, 0.0, False
        self._waits_since, self.is_asking = asked, True
        return True

    def batch_came(self) -> None:
        self._waits_now += perf_counter() - self._waits_since
        self.is_asking = False

    def batch_failed(self) -> None:
        """Mostly since there is none: the step before was the epoch's last."""
        self.is_asking = False
        self._guarded(self._end, self._waits_since)

    def end(self) -> None:
        """Something else happens than another step: what follows is measured."""
        if self.is_counting:
            self._guarded(self._end, perf_counter())
        self.is_due, self._alike = False, 0

    def _end(self, now: float) -> None:
        """Write down what was counted. The step under way is over if it was trained in; else its optimizer's step will be the next."""
        assert self._loading is not None
        self.is_counting = self.is_due = False
        self._alike, self._events.phase, self.batches = 0, None, None
        slow = None
        if self.has_trained and now - self._asked >= SHORTEST:  # it shall stand alone
            slow = Step(self._clock.steps + self._steps + 1, self._asked, self._asked)
            slow.ended = slow.end = now
            slow.data_wait, slow.batches, slow.samples, slow.loader = self._waits_now, 1, self._samples, self._loading
        elif self.has_trained:
            self._steps += 1
            self._waited += self._waits_now
            self._slowest = max(self._slowest, now - self._asked)
            self._asked = now
        cpu = process_time() - self._cpu
        self._clock.pass_over(self._steps + (slow is not None), self._cpu + cpu)
        if slow is not None:
            slow.cpu = max(0.0, cpu - self._steps * self._cpu_each)
            cpu -= slow.cpu
        if self._steps:
            number = self._clock.steps - (slow is not None)
            counted = CountedSteps(
                number, self._steps, self._began, self._asked, self._waited, self._slowest, cpu, self._samples, self._loading
            )  # fmt: skip
            self._windows.add(HostTimer(), counted)
        if slow is not None:
            self._windows.add(HostTimer(), slow)
