"""What the hooks saw on the training thread: noted at once, at next to no cost, and put together later, several steps at a time.

A hook is called while the step's own data fill the processor's caches, where every line of Python costs several times what it costs
in a row with others.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from launcher_observer.step_clock import StepClock

MOST, LONGEST = 60, 0.1
"""Events that wait, some ten steps of a plain loop, and seconds that one waits."""

FULL = 1000
"""Events that wait wherever they come from, such as those of a model that is used when its training is over."""

WITHIN = ("optimizer", "backward")
"""Phases that go on after a backward pass within them."""


class Events:
    """The events since the clock was last told of any."""

    def __init__(self, clock: StepClock, fail: Callable[[Exception], None]):
        """
        Args:
            fail: takes an error, and ends all of it.
        """
        self._clock, self._fail = clock, fail
        self.phase: str | None = None
        """What is under way, as far as it can be told by now."""
        self.moment: Callable[[], Any] | None = None
        """Gives the timer's moments; None: they are the host's clock."""
        self.on_settled: Callable[[], None] | None = None
        """Called when the clock was told of all of them."""
        self.at_once = True
        """Whether no event waits: in the first steps, which decide how the others are measured."""
        self._waiting: list[tuple[Callable[..., Any], float, Any, tuple[Any, ...]]] = []
        self._settled = 0.0

    def add(self, phase: str | None, act: Callable[..., Any], *arguments: Any) -> None:
        """Something happened now.

        Args:
            phase: that is under way from now on.
            act: to be called with the arguments, when the clock shows this moment.
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
        """To be called where the time that it takes is no phase's."""
        waiting = self._waiting
        if self.at_once or len(waiting) >= MOST or (waiting and waiting[-1][1] - self._settled >= LONGEST):
            self.settle()

    def settle(self) -> None:
        """Tell the clock of all events so far."""
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
