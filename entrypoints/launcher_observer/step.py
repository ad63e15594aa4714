"""One optimizer step and one pass over a loader, as the clock records them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Cut(NamedTuple):
    """A moment within a step, and what the step had by then."""

    time: float
    moment: Any
    cpu: float
    phases: int
    paused: float


class Held(NamedTuple):
    """A moment within a step, and what it had read by then."""

    cut: Cut
    batches: int
    samples: int
    data_wait: float


class Step:
    """One step, under way or over."""

    __slots__ = (
        *("number", "began", "ended", "begin", "end", "cpu", "data_wait", "phases", "paused", "optimizers"),
        *("batches", "samples", "loader", "epoch", "fed", "cut"),
    )

    def __init__(self, number: int, began: float, begin: Any, cpu: float = 0.0):
        """
        Args:
            number: from 1.
            began: seconds of the host's clock.
            begin: the same moment by the timer.
            cpu: CPU seconds of the process by then.
        """
        self.number, self.began, self.begin, self.cpu = number, began, begin, cpu
        self.ended, self.end = began, begin
        self.data_wait, self.paused = 0.0, 0.0
        self.phases: list[tuple[str, Any, Any]] = []
        """Name, and the timer's moments of its start and end."""
        self.optimizers: list[int] = []
        self.batches, self.samples = 0, 0
        self.loader: Loading | None = None
        """The pass over a loader that its first batch came from."""
        self.epoch: int | None = None
        """That pass's number at the time: an endless iterator may begin another while this step waits to be counted."""
        self.fed: dict[Loading, int] = {}
        """The passes that its batches came from, the first one first, and how many of each."""
        self.cut = Cut(began, begin, cpu, 0, 0.0)
        """Where its last optimizer step ended."""

    def held(self, now: float, moment: Any, cpu: float) -> Held:
        """What it holds so far."""
        return Held(Cut(now, moment, cpu, len(self.phases), self.paused), self.batches, self.samples, self.data_wait)

    def take_back(self, held: Held, loading: Loading) -> None:
        """Leave out what came after a moment, with the pass that was first asked then."""
        del self.phases[held.cut.phases :]
        self.paused = held.cut.paused
        self.batches, self.samples, self.data_wait = held.batches, held.samples, held.data_wait
        self.fed.pop(loading, None)

    def add_batch(self, loading: Loading, samples: int, waited: float) -> None:
        """
        Args:
            samples: in the batch.
            waited: seconds for it.
        """
        self.data_wait += waited
        self.samples += samples
        if self.loader is None:
            self.loader, self.epoch = loading, loading.number
        self.fed[loading] = self.fed.get(loading, 0) + 1
        self.batches += self.loader.loader is loading.loader


class Loading:
    """One pass over a loader; for an endless iterator, the current pass."""

    __slots__ = ("loader", "number", "began", "trained", "optimized", "batches", "repeats_after", "is_trained_on")

    def __init__(self, loader: Any, number: int):
        """
        Args:
            loader: what the hooks know about it.
            number: of the pass, from 1.
        """
        self.loader, self.number, self.batches = loader, number, 0
        self.began, self.trained, self.optimized = 0.0, -1, -1
        """When its first batch was requested, and what the clock had counted by then of backward passes and optimizer steps together, and
        of optimizer steps; -1: it was not."""
        self.repeats_after: int | None = None
        """Batches after which an endless iterator begins the next pass; None: it ends."""
        self.is_trained_on = False
        """Whether its batches were seen to be trained on although requested with gradients off."""

    def count_batch(self) -> None:
        """A batch of this pass or the next arrived."""
        if self.batches and self.batches == self.repeats_after:
            self.loader.passes += 1
            self.number, self.batches = self.loader.passes, 0
        self.batches += 1

    def is_no_epoch(self) -> None:
        """Nothing was trained on in this pass: unless another has begun, it does not count."""
        if self.number == self.loader.passes:
            self.loader.passes -= 1


def trains(step: Step) -> bool:
    """Whether a step has had a backward pass."""
    return any(name == "backward" for name, *_ in step.phases)
