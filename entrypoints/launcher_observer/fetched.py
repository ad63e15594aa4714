"""Batches that were requested with gradients off: an evaluation's, or a training step's.

A generator or a prefetcher under `torch.no_grad()` hands on batches that are trained on. Which of the two it is shows at the next
request: a source that is trained on is asked again after one step.
"""

from __future__ import annotations

from launcher_observer.step import Cut, Loading, Step

AHEAD = 2
"""Batches that a loop may hold before it trains on the first: a prefetcher reads one ahead."""


class Fetched:
    """The first batches of an evaluation, and the step that they belong to if they are trained on."""

    __slots__ = ("step", "over", "_passes")

    def __init__(self, step: Step):
        """
        Args:
            step: starts with the evaluation.
        """
        self.step = step
        self.over: Cut | None = None
        """Where the evaluation ended, if it is one: the step starts there."""
        self._passes: list[Loading] = []

    def add_batch(self, loading: Loading, samples: int, waited: float) -> bool:
        """A batch arrived. Returns whether a step may hold that many."""
        self._passes.append(loading)
        self.step.add_batch(loading, samples, waited)
        return self._passes.count(loading) <= AHEAD

    def is_asked_again(self, asked: Loading | None) -> bool:
        """Whether the next batch, after one step, is of the same pass. If so, its gradient mode no longer matters."""
        if asked not in self._passes:
            return False
        for loading in self._passes:
            loading.is_trained_on = True
        return True

    def becomes_evaluation(self) -> tuple[float, float]:
        """Start the step only after the batches. Returns when their evaluation began, and its seconds."""
        step, over = self.step, self.over
        assert over is not None
        began, step.began, step.begin, step.cpu = step.began, over.time, over.moment, over.cpu
        step.data_wait, step.batches, step.samples, step.loader, step.epoch = 0.0, 0, 0, None, None
        step.fed = {}
        if step.phases and step.phases[0][0] == "forward":
            step.phases[0] = ("forward", over.moment, over.moment)
        return began, over.time - began
