"""One optimizer step and one pass over a loader, as the clock notes them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Cut(NamedTuple):
    """A moment within a step, and what the step had by then."""

    time: float
    moment: Any
    cpu: float
    phases: int
    paused: float


class Step:
    """One step, under way or over."""

    __slots__ = (
        *("number", "began", "ended", "begin", "end", "cpu", "data_wait", "phases", "paused", "optimizers"),
        *("batches", "samples", "loader", "cut"),
    )

    def __init__(self, number: int, began: float, begin: Any, cpu: float = 0.0):
        """
        Args:
            number: from 1.
            began: seconds of the host's clock.
            begin: the same moment of the timer.
            cpu: seconds that the process had used by then.
        """
        self.number, self.began, self.begin, self.cpu = number, began, begin, cpu
        self.ended, self.end = began, begin
        self.data_wait, self.paused = 0.0, 0.0
        self.phases: list[tuple[str, Any, Any]] = []
        """Name, and the timer's moments of its begin and end."""
        self.optimizers: list[int] = []
        self.batches, self.samples = 0, 0
        self.loader: Loading | None = None
        """The pass over a loader that its first batch came from."""
        self.cut = Cut(began, begin, cpu, 0, 0.0)
        """Where its last optimizer step ended."""


class Loading:
    """One pass over a loader."""

    __slots__ = ("loader", "number", "began", "trained", "batches")

    def __init__(self, loader: Any, number: int):
        """
        Args:
            loader: what the hooks know of it.
            number: of the pass, from 1.
        """
        self.loader, self.number, self.batches = loader, number, 0
        self.began, self.trained = 0.0, -1


def trains(step: Step) -> bool:
    """Whether a step had a backward pass by now."""
    return any(name == "backward" for name, *_ in step.phases)
