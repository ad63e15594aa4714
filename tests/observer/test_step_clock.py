"""The step clock, on events in an order that is rare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from launcher_observer import step_clock
from launcher_observer.setups import Loader
from launcher_observer.step import Loading, Step
from launcher_observer.step_clock import StepClock
from launcher_observer.timers import HostTimer

OUTER, INNER, OTHER = 1, 2, 3
"""Optimizers: a wrapper's step takes that of the one within, and one that fails."""


def another_loader(number: int = 2) -> Loader:
    return Loader(number, ("train.py", number, "", None), {"batch_size": 8})


class Training:
    """Reports its events to a clock; each takes a second."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.trained_on: list[Loader] = []
        """The loaders whose batches were, each once."""
        self.paused: list[tuple[str, int, float, float]] = []
        """Each pause: its kind, the steps before it, its start and its seconds."""
        self.evaluated: list[Loading] = []
        self.clock = StepClock(self.steps.append, lambda *pause: self.paused.append(pause), self.evaluated.append)
        self.clock.now = self.clock.moment = 0.0
        self.loader = another_loader(1)
        self.loading = self.loader.next_pass()

    def happens(self, act: Any, *arguments: Any) -> None:
        self.clock.now = self.clock.moment = self.clock.now + 1.0
        act(*arguments)

    def batch(self, loading: Loading | None = None) -> None:
        """
        Args:
            loading: pass over another loader.
        """
        self.happens(self.clock.batch_asked, loading or self.loading, True, 0.0)
        self.happens(self.clock.batch_came, loading or self.loading, 8, 1.0)

    def exhausts(self, loading: Loading | None = None) -> None:
        self.happens(self.clock.batch_asked, loading or self.loading, True, 0.0)
        self.happens(self.clock.loader_ended, loading or self.loading)

    def restarts(self, *, training: bool = True) -> None:
        """The next pass, after a minute of something else."""
        self.clock.now += 60.0
        self.happens(self.clock.loader_restarts, training)
        self.loading = self.loader.next_pass()

    def backward(self) -> None:
        self.happens(lambda: self.trains_on(self.clock.backward_begins()))
        self.happens(self.clock.backward_ends)

    def trains_on(self, passes: Sequence[Loading]) -> None:
        self.trained_on += [one.loader for one in passes if one.loader not in self.trained_on]

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


def test_a_backward_pass_in_which_optimizers_step_is_the_next_steps_where_no_loader_is_seen():
    training = Training()
    for _ in range(3):
        training.clock.now += 10.0
        training.happens(training.clock.backward_begins)
        training.optimizer(OUTER)
        training.optimizer(OTHER)
        training.happens(training.clock.backward_ends)
    assert seconds(training)[1:] == [16.0, 16.0]
    for step in training.steps:
        assert step.optimizers == [OUTER, OTHER]
        assert [name for name, *_ in step.phases if name != "optimizer"].count("backward") >= 2
        assert all(step.begin <= begin <= end <= step.end for _, begin, end in step.phases)


def test_a_timer_that_changes_within_a_backward_pass_loses_no_later_forward_pass():
    """A GPU's, after the first step, where optimizers step as soon as a gradient is there and no loader is seen."""
    training = Training()
    ended = training.steps.append

    def first_ends(step: Step) -> None:
        ended(step)
        if step.number == 1:
            training.clock.use(HostTimer())

    training.clock = StepClock(first_ends, lambda *pause: None, lambda loading: None)
    training.clock.now = training.clock.moment = 0.0
    for _ in range(4):
        training.happens(training.clock.backward_begins)
        training.optimizer(OUTER)
        training.optimizer(OTHER)
        training.happens(training.clock.backward_ends)
    training.clock.close()
    assert [step.optimizers for step in training.steps] == [[OUTER, OTHER]] * 4
    assert all("forward" in [name for name, *_ in step.phases] for step in training.steps[2:])


def seconds(training: Training) -> list[float]:
    """Of each step."""
    training.clock.close()
    return [step.end - step.begin for step in training.steps]


@pytest.mark.parametrize("training_loader", [True, False], ids=["training", "evaluation"])
def test_a_step_whose_pass_is_over_ends_with_its_optimizer_where_a_loader_restarts(training_loader):
    training = Training()
    for _ in range(2):
        for number in range(3):
            training.batch()
            if number == 2:  # islice would not ask, and a prefetcher asks before its last batch
                training.exhausts()
            training.backward()
            training.optimizer(OUTER)
            training.optimizer(OTHER)
        training.restarts(training=training_loader)
    assert [step.optimizers for step in training.steps] == [[OUTER, OTHER]] * 6
    assert max(seconds(training)) < 60


def test_so_does_one_whose_batch_was_read_in_the_step_before():
    """As accelerate reads: one batch ahead."""
    training = Training()
    for _ in range(2):
        training.batch()
        for ahead in (training.batch, training.batch, training.exhausts):
            ahead()
            training.backward()
            training.optimizer(OUTER)
        training.restarts()
    assert max(seconds(training)) < 60
    assert [step.batches for step in training.steps] == [2, 1, 0] * 2


def test_a_step_that_lacks_its_optimizer_goes_on_in_the_next_pass():
    """Six batches of three passes, four a step: the gradients of two are kept."""
    training, batches = Training(), 0
    for _ in range(2):
        for _ in range(6):
            training.batch()
            training.backward()
            batches += 1
            if batches % 4 == 0:
                training.optimizer(OUTER)
        training.restarts()
    training.clock.close()
    assert [step.batches for step in training.steps] == [4, 4, 4]


def test_a_step_that_has_the_only_batch_of_its_pass_ends_where_the_next_is_requested():
    training = Training()
    for _ in range(3):
        training.batch()
        training.backward()
        training.optimizer(OUTER)
        training.restarts()
    assert [length > 60 for length in seconds(training)] == [True, True, False]


def test_so_does_one_that_ends_with_a_batch_of_another_loaders_new_pass():
    """What starting its workers takes in every step is the step's."""
    training, beside = Training(), another_loader()
    for _ in range(4):
        training.batch()
        training.backward()
        training.optimizer(OUTER)
        training.clock.now += 60.0
        training.happens(training.clock.loader_restarts, True)
        training.batch(beside.next_pass())
    training.clock.close()
    assert [step.end - step.begin > 60 for step in training.steps] == [True] * 4


def test_two_loaders_that_steps_read_are_both_trained_on():
    training, beside = Training(), another_loader()
    others = beside.next_pass()
    for _ in range(3):
        training.batch()
        training.batch(others)
        training.backward()
        training.optimizer(OUTER)
    training.clock.close()
    assert training.trained_on == [training.loader, beside]
    assert [(step.batches, step.samples) for step in training.steps] == [(1, 16)] * 3


def test_a_loader_that_a_step_looks_into_now_and_then_is_none_that_is_trained_on():
    training, held_out = Training(), another_loader()
    for number in range(9):
        training.batch()
        if number % 4 == 2:  # a batch to draw
            training.batch(held_out.next_pass())
        training.backward()
        training.optimizer(OUTER)
    assert training.trained_on == [training.loader]


def test_the_first_step_begins_with_the_pass_that_the_second_begins_with():
    """A look into two loaders, the training's among them, is none of it."""
    training, held_out = Training(), another_loader()
    training.loader.role = "unknown"
    training.batch(held_out.next_pass())
    training.batch(training.loader.next_pass())
    training.clock.now += 60.0
    for number in range(3):
        training.batch()
        training.backward()
        assert training.trained_on == ([] if number == 0 else [training.loader])
        training.optimizer(OUTER)
    assert max(seconds(training)) < 60
    assert [(step.batches, step.samples, step.data_wait) for step in training.steps] == [(1, 8, 1.0)] * 3
    assert {step.loader for step in training.steps} == {training.loading}


@pytest.mark.parametrize("then", ["it is asked again", "a checkpoint", "the end"])
def test_a_pass_over_the_training_loader_in_which_nothing_is_trained_is_an_evaluation(then):
    training = Training()
    training.loader.role = "training"
    training.batch()
    training.backward()
    training.optimizer(OUTER)
    training.exhausts()
    training.loading = training.loader.next_pass()
    began = training.clock.now + 1
    training.batch()
    training.batch()
    training.exhausts()
    ended = training.clock.now
    if then == "it is asked again":
        training.restarts()
        assert training.loading.number == 2, "the second that is trained on"
        ended = training.clock.now
    elif then == "a checkpoint":
        training.happens(training.clock.checkpoint_begins)
        ended = training.clock.now
        training.happens(training.clock.checkpoint_ends)
    training.clock.close()
    assert training.paused[0] == ("evaluate", 1, began, ended - began)
    assert [step.batches for step in training.steps] == [1]


def test_a_pass_whose_batches_are_trained_on_after_its_end_is_none():
    """transformers' Trainer reads all batches of a step first: here those of the whole epoch."""
    training = Training()
    training.loader.role = "training"
    for _ in range(3):
        training.batch()
        training.batch()
        training.exhausts()
        training.backward()
        training.backward()
        training.optimizer(OUTER)
        training.restarts()
    training.clock.close()
    assert [(step.batches, step.epoch) for step in training.steps] == [(2, 1), (2, 2), (2, 3)]
    assert not training.paused


def trained_step(training: Training) -> None:
    training.batch()
    training.backward()
    training.optimizer(OUTER)


@pytest.mark.parametrize("then", ["training", "a checkpoint", "the end"])
@pytest.mark.parametrize("ahead", [False, True], ids=["a batch at a time", "one ahead"])
def test_a_pass_whose_gradients_no_optimizer_uses_is_an_evaluation(ahead, then):
    """As in attacks on the model, or maps of what it looks at. A reader that is one ahead asks before it works on its last batch."""
    training, held_out = Training(), another_loader()
    attacked = held_out.next_pass()
    for _ in range(2):
        trained_step(training)
    began = training.clock.now + 1
    for _ in range(2):
        training.batch(attacked)
        training.backward()
        training.backward()
    if ahead:
        training.batch(attacked)
    training.exhausts(attacked)
    ended = training.clock.now
    if ahead:
        training.backward()
    if then == "a checkpoint":
        training.happens(training.clock.checkpoint_begins)
        ended = training.clock.now
        training.happens(training.clock.checkpoint_ends)
    elif then == "training":
        ended = training.clock.now + 1
        trained_step(training)
    training.clock.close()
    assert training.trained_on == [training.loader] and training.evaluated == [attacked]
    assert training.paused[0] == ("evaluate", 2, began, ended - began)
    assert [step.batches for step in training.steps] == [1] * (3 if then == "training" else 2)


def test_one_whose_gradients_an_optimizer_uses_at_its_end_is_none():
    """Full-batch steps on a second loader."""
    training, second = Training(), another_loader()
    trained_step(training)
    for _ in range(2):
        whole = second.next_pass()
        for _ in range(3):
            training.batch(whole)
            training.backward()
        training.exhausts(whole)
        training.optimizer(OUTER)
    training.clock.close()
    assert training.trained_on == [training.loader, second] and not training.evaluated and not training.paused
    assert [step.batches for step in training.steps] == [1, 3, 3]


def test_a_checkpoint_after_an_evaluation_of_a_part_counts_once():
    """Its batches are read with gradients on, and its loader is left before its end."""
    training, held_out = Training(), another_loader()
    training.loader.role = "training"
    trained_step(training)
    began = training.clock.now + 1
    part = held_out.next_pass()
    training.batch(part)
    training.batch(part)
    training.happens(training.clock.checkpoint_begins)
    saved = training.clock.now
    training.clock.now += 9
    training.happens(training.clock.checkpoint_ends)
    trained = training.clock.now + 1
    trained_step(training)
    training.clock.close()
    assert training.paused == [("checkpoint", 1, saved, 10.0), ("evaluate", 1, began, trained - began - 10.0)]


def test_an_evaluation_amid_accumulated_gradients_leaves_the_batches_before_it_in_their_step():
    """It is read with gradients on."""
    training, held_out = Training(), another_loader()
    training.loader.role = "training"
    trained_step(training)
    for _ in range(2):
        training.batch()
        training.backward()
    evaluated = held_out.next_pass()
    began = training.clock.now + 1
    training.batch(evaluated)
    training.exhausts(evaluated)
    ended = training.clock.now + 1
    trained_step(training)
    training.clock.close()
    step = training.steps[1]
    assert (step.batches, step.samples, step.data_wait, [*step.fed.values()]) == (3, 24, 3.0, [3])
    assert [name for name, *_ in step.phases].count("backward") == 3
    assert step.paused == ended - began and training.paused == [("evaluate", 1, began, ended - began)]
    assert training.evaluated == [evaluated] and training.trained_on == [training.loader]


def test_gradients_that_no_optimizer_uses_are_not_kept_for_ever(monkeypatch):
    """As in an attack on the model after its training, or where a script updates its parameters itself."""
    monkeypatch.setattr(step_clock, "MAX_PARTS", 4)
    clock, held = StepClock(lambda step: None, lambda *pause: None, lambda loading: None), []
    for now in range(6):
        clock.now = clock.moment = float(now)
        clock.backward_begins()
        clock.backward_ends()
        held.append(clock.holds_a_moment())
    assert held == [True, True, False, True, True, False]
