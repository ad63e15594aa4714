"""Batches that were asked for with gradients off: an evaluation's, or a training step's.

A generator or a prefetcher under `torch.no_grad()` hands on batches that are trained on. Which of both it is shows when the next batch is
asked for: what is trained on is asked for again after one step.
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
            step: begins with the evaluation.
        """
        self.step = step
        self.over: Cut | None = None
        """Where the evaluation ended, if it is one: the step is under way from there on."""
        self._passes: list[Loading] = []

    def add_batch(self, loading: Loading, samples: int, waited: float) -> bool:
        """A batch came. Returns whether a step may hold as many."""
        self._passes.append(loading)
        self.step.add_batch(loading, samples, waited)
        return self._passes.count(loading) <= AHEAD

    def is_asked_again(self, asked: Loading | None) -> bool:
        """Whether the next batch, after one step, is one of the same pass. Then its gradients are not looked at any more."""
        if asked not in self._passes:
            return False
        for loading in self._passes:
            loading.is_trained_on = True
        return True

    def becomes_evaluation(self) -> tuple[float, float]:
        """The step began only after the batches. Returns when their evaluation began, and its seconds."""
        step, over = self.step, self.over
        assert over is not None
        began, step.began, step.begin, step.cpu = step.began, over.time, over.moment, over.cpu
        step.data_wait, step.batches, step.samples, step.loader, step.epoch = 0.0, 0, 0, None, None
        if step.phases and step.phases[0][0] == "forward":
            step.phases[0] = ("forward", over.moment, over.moment)
        return began, over.time - began
