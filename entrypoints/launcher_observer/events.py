"""What the hooks see on the training thread: noted at once, at next to no cost, and processed later, several steps at a time.

A hook runs while the step's own data fill the CPU's caches, so every line of Python costs several times what it costs in a row with
others.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from launcher_observer.step_clock import StepClock

MOST, LONGEST = 60, 0.1
"""Events that wait (some ten steps of a plain loop), and seconds that one waits."""

FULL = 1000
"""Events that wait in any case, such as those of a model in use after its training."""

WITHIN = ("optimizer", "backward")
"""Phases that continue after a backward pass within them."""


class Events:
    """The events that the clock does not know yet."""

    def __init__(self, clock: StepClock, fail: Callable[[Exception], None]):
        """
        Args:
            fail: called with an error, which ends the observer.
        """
        self._clock, self._fail = clock, fail
        self.phase: str | None = None
        """The current phase, as far as known."""
        self.moment: Callable[[], Any] | None = None
        """Returns the timer's moment; None: moments are the host's clock."""
        self.on_settled: Callable[[], None] | None = None
        """Called when the clock knows all of them."""
        self.at_once = True
        """Whether no event waits: in the first steps, which decide how the others are measured."""
        self._waiting: list[tuple[Callable[..., Any], float, Any, tuple[Any, ...]]] = []
        self._settled = 0.0

    def add(self, phase: str | None, act: Callable[..., Any], *arguments: Any) -> None:
        """Something happened now.

        Args:
            phase: the current one from now on.
            act: to be called with the arguments, once the clock is set to this moment.
        """
        try:
            now = perf_counter()
            self._waiting.append((act, now, now if self.moment is None else self.moment(), arguments))
            self.phase = phase
            if len(self._waiting) >= FULL:
                self.settle()
        except Exception as error:
            self._fail(error)

    def settle_if_due(self) -> None:
        """Call it where the time it takes belongs to no phase."""
        waiting = self._waiting
        if self.at_once or len(waiting) >= MOST or (waiting and waiting[-1][1] - self._settled >= LONGEST):
            self.settle()

    def settle(self) -> None:
        """Pass all events so far to the clock."""
        waiting, self._waiting = self._waiting, []
        clock = self._clock
        try:
            for act, clock.now, clock.moment, arguments in waiting:
                act(*arguments)
            self._settled = perf_counter()
            if self.on_settled is not None:
                self.on_settled()
        except Exception as error:
            self._fail(error)
