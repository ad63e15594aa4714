"""The step clock, on events in an order that is rare."""

from __future__ import annotations

from typing import Any

from launcher_observer.setups import Loader
from launcher_observer.step import Step
from launcher_observer.step_clock import StepClock

OUTER, INNER, OTHER = 1, 2, 3
"""Optimizers: a wrapper's step takes that of the one within, and one that fails."""


class Training:
    """Reports its events to a clock; each takes a second."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.clock = StepClock(self.steps.append, lambda *_: None)
        self.clock.now = self.clock.moment = 0.0
        self.loading = Loader(1, ("train.py", 1, "", None), {"batch_size": 8}).next_pass()

    def happens(self, act: Any, *arguments: Any) -> None:
        self.clock.now = self.clock.moment = self.clock.now + 1.0
        act(*arguments)

    def batch(self) -> None:
        self.happens(self.clock.batch_asked, self.loading, True, 0.0)
        self.happens(self.clock.batch_came, self.loading, 8, 1.0)

    def backward(self) -> None:
        self.happens(self.clock.backward_begins)
        self.happens(self.clock.backward_ends)

    def optimizer(self, outer: int, *within: int) -> None:
        self.happens(self.clock.optimizer_begins, outer)
        for optimizer in within:
            self.optimizer(optimizer)
        self.happens(self.clock.optimizer_ends, outer, 0.0)

    def fails(self, optimizer: int) -> None:
        self.happens(self.clock.optimizer_begins, optimizer)


def test_a_step_that_failed_is_left_out_once_also_where_the_next_one_holds_another():
    training = Training()
    training.batch()
    training.backward()
    training.fails(OTHER)
    for _ in range(3):
        training.batch()
        training.backward()
        training.optimizer(OUTER, INNER)
    training.clock.close()
    assert [(step.number, step.batches, step.samples, step.optimizers) for step in training.steps] == [
        (number, 1, 8, [OUTER]) for number in (1, 2, 3)
    ]
    assert [step.data_wait for step in training.steps] == [1.0] * 3
