"""Training loops whose loaders are asked in unusual ways: with gradients off, or with one iterator for all epochs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.observer.loop_parts import loader, loop, lower, parts


def without_gradients(batches):
    """Reads under torch.no_grad(), which holds only while the generator runs."""
    with torch.no_grad():
        iterator = iter(batches)
    while True:
        with torch.no_grad():
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def flipped(batches):
    """Augments what is read so."""
    for inputs, targets in without_gradients(batches):
        yield inputs.flip(-1), targets


@loop
def generating_without_gradients() -> nn.Module:
    """Two epochs, each with an evaluation after it; the last one over the training loader."""
    model, optimizer = parts()
    training, held_out = loader(), loader(3)
    for evaluated in (held_out, training):
        for batch in flipped(training):
            time.sleep(0.02)
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        with torch.no_grad():
            for inputs, _ in evaluated:
                model(inputs)
    return model


@loop
def accumulating_without_gradients() -> nn.Module:
    """Two batches a step."""
    model, optimizer = parts()
    for number, batch in enumerate(flipped(loader()), start=1):
        lower(model, batch)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


class Prefetcher:
    """Reads the next batch under torch.no_grad() while one is trained on."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.preload()

    @torch.no_grad()
    def preload(self) -> None:
        self.following = next(self.batches, None)

    def __iter__(self):
        while self.following is not None:
            batch = self.following
            self.preload()
            yield batch


@loop
def fetching_without_gradients() -> nn.Module:
    """A new loader each epoch, and an evaluation of one batch after the third step of each."""
    model, optimizer = parts()
    held_out = loader(3)
    for each in [loader(), loader()]:  # both live: by its place in memory a later dataset may be an earlier one
        for number, batch in enumerate(Prefetcher(each), start=1):
            time.sleep(0.02)
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
            if number == 3:
                with torch.no_grad():
                    model(next(iter(held_out))[0])
    return model


@loop
def a_new_dataset_each_epoch() -> nn.Module:
    """For training and evaluation alike, by one function. Some loaders are made and not read."""
    model, optimizer = parts()
    for _ in range(3):
        training = loader()
        held_out, _unused = loader(), loader()
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for inputs, _ in held_out:
            with torch.no_grad():
                model(inputs)
    return model


@loop
def evaluating_one_batch() -> nn.Module:
    """The next one of a loader, before the training and after two of its steps, whose batches are made without a loader."""
    model, optimizer = parts()
    held_out = iter(loader())
    for number in range(13):
        if number in (0, 4, 8):
            with torch.no_grad():
                model(next(held_out)[0])
                time.sleep(3)
        optimizer.zero_grad()
        lower(model, (torch.randn(4, 8), torch.randn(4, 1)))
        optimizer.step()
    return model


def one_ahead(batches):
    """As accelerate has it: the pass has ended before its last batch is trained on."""
    iterator = iter(batches)
    following = next(iterator)
    while following is not None:
        batch, following = following, next(iterator, None)
        yield batch


def _with_time_between(epoch: Callable[[DataLoader], Iterable]) -> nn.Module:
    """Two epochs, with three seconds after each.

    Args:
        epoch: batches of one.
    """
    model, optimizer = parts()
    batches = loader()
    for _ in range(2):
        for batch in epoch(batches):
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        time.sleep(3)
    return model


@loop
def reading_one_ahead() -> nn.Module:
    return _with_time_between(one_ahead)


@loop
def reading_a_part() -> nn.Module:
    """No batch is requested after an epoch's last."""
    return _with_time_between(lambda batches: itertools.islice(batches, 4))


@loop
def reading_one_of_each_pass() -> nn.Module:
    """Every step has a pass of its own, and ends with 20 ms of work."""
    model, optimizer = parts()
    batches = loader()
    for _ in range(6):
        optimizer.zero_grad()
        lower(model, next(iter(batches)))
        optimizer.step()
        time.sleep(0.02)
    return model


@loop
def looking_at_a_batch() -> nn.Module:
    """One of the evaluation's is drawn before the training. Evaluations compute without gradients, but read with them."""
    model, optimizer = parts()
    held_out, training = loader(3), loader()
    next(iter(held_out))
    for _ in range(2):
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for inputs, _ in held_out:
            with torch.no_grad():
                model(inputs)
    return model


@loop
def looking_into_the_training() -> nn.Module:
    """One of the training's own batches is drawn before it, and after each epoch."""
    model, optimizer = parts()
    training = loader()
    for _ in range(3):
        next(iter(training))
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        next(iter(training))
    return model


@loop
def measuring_on_what_it_trains() -> nn.Module:
    """Each epoch of training has two further passes over its loader, in which nothing is trained."""
    model, optimizer = parts()
    training = loader()
    for _ in range(3):
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for inputs, _ in training:
            with torch.no_grad():
                model(inputs)
            time.sleep(0.02)
        with torch.no_grad():
            for inputs, _ in training:
                model(inputs)
    return model


class _RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class Endless(DataLoader):
    """Ultralytics' InfiniteDataLoader: one iterator for all epochs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@loop
def never_ending() -> nn.Module:
    model, optimizer = parts()
    endless = Endless(TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4)
    for _ in range(5):
        for batch in endless:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
    return model


@loop
def accumulating_with_a_rest() -> nn.Module:
    """Four batches a step, six a pass: the gradients of the other two are kept for the next pass's first step."""
    model, optimizer = parts()
    batches = loader()
    for _ in range(3):
        for number, batch in enumerate(batches, start=1):
            lower(model, batch)
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


@loop
def cycling_a_second_loader() -> nn.Module:
    """Unlabelled batches beside the labelled ones, from a shorter loader that begins again in the middle of a step."""
    model, optimizer = parts()
    labelled, unlabelled = loader(), loader(4)
    others = iter(unlabelled)
    for _ in range(2):
        for batch in labelled:
            try:
                more, _ = next(others)
            except StopIteration:
                others = iter(unlabelled)
                more, _ = next(others)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * model(more).square().mean()
            loss.backward()
            optimizer.step()
    return model


@loop
def stepping_within_backward() -> nn.Module:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model, _ = parts()
    optimizers = {one: torch.optim.SGD([one], lr=0.01) for one in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        time.sleep(0.002)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in loader():
        lower(model, batch)
    return model
