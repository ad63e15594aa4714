"""Measures what a whole step really takes of a GPU's memory: no prediction knows workspaces, copies and fragmentation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from training.data.batches import Images, share_of_batch
from training.data.loaders import Data
from training.distributed.world import World
from training.engine.device_batches import on_device
from training.engine.state import TrainingState
from training.measure.timeline import Timeline
from training.runtime import accelerator, failure

Losses = Mapping[str, torch.Tensor]


class StepTrial:
    """Steps on synthetic batches, which leave no trace in the states.

    Args:
        task: of the bare models, without a collective, as ranks do not run out of memory together.
        data: a batch repeats one of its images.
        optimizer_bytes: what the optimizer keeps in addition after its first step.
    """

    def __init__(
        self,
        task: Callable[[Any], Iterator[Losses]],
        states: Sequence[TrainingState],
        data: Data[Images, Images],
        optimizer_bytes: int,
    ):
        self._task, self._states, self._optimizer_bytes = task, states, optimizer_bytes
        self._one = data.collate_training([data.training[1, 0]])

    def fits(self, size: int) -> bool:
        """Whether the forward pass, the backward pass and the optimizer's state fit for `size` images; of several processes' passes, one
        that follows others of the same step."""
        world, global_batch_size = self._states[0].world, self._states[0].settings.global_batch_size
        accumulates = world.size > 1 and size < share_of_batch(global_batch_size, world)
        return self.held(size, accumulates=accumulates) is not None

    def held(self, size: int, *, accumulates: bool = False) -> int | None:
        """The most bytes that a step of `size` images holds beyond what is held now; None: it does not fit.

        Args:
            accumulates: the pass finds the gradients of earlier passes, which DDP's buckets, held now, do not contain.
        """
        device = self._states[0].world.device
        buffers = [(buffer, buffer.clone()) for state in self._states for buffer in state.trainable.buffers()]
        try:
            with accelerator.same_random_numbers(device):
                return accelerator.measured_memory(device, lambda: self._step(size, device, accumulates))
        except RuntimeError as error:  # libraries word a lack of workspace in their own way
            if isinstance(error, accelerator.OUT_OF_MEMORY) or re.search(failure.GPU_FULL.pattern, str(error)):
                return None
            raise
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            accelerator.synchronize(device)
            accelerator.module(device).empty_cache()

    def _step(self, size: int, device: torch.device, accumulates: bool = False) -> None:
        values = (value.expand(size, *value.shape[1:]) for value in self._one)
        state = self._states[0]
        batches = on_device(iter([self._one._make(values)]), state.world, Timeline(device), state.settings.copy_stream)
        batch = next(batches)
        held: list[Any] = [torch.empty(self._optimizer_bytes, dtype=torch.uint8, device=device)]
        each = [[item for item in one.trainable.parameters() if item.requires_grad] for one in self._states]
        if accumulates:
            held += [torch.empty_like(parameter) for learned in each for parameter in learned]
        asked = self._task(batch)
        for one, learned in zip(self._states, each):
            with one.precision.autocast():
                loss = next(asked)["loss"]
            # not backward(): the hooks on the parameters would make DDP take this pass for its first one, and with static_graph exchange
            # no gradients later
            held.append(torch.autograd.grad(loss, learned, allow_unused=True))


def largest_that_fits(sizes: list[int], trial: StepTrial, world: World, log: Callable[[str], None]) -> int:
    """The first of these batch sizes whose step fits on every rank's GPU. A collective.

    Args:
        sizes: in descending order.
        log: logs each size that did not fit.

    Raises:
        ValueError: none fits.
    """
    for size in sizes:
        if world.all(trial.fits(size)):
            return size
        log(f"batch_size_per_device auto: a step of {size} images ran out of the GPU's memory, trying fewer")
    raise ValueError(
        "batch_size_per_device auto: not even one image fits in the GPU's memory. Take a smaller model or image_size, set zero or "
        "precision bf16, or take a larger device"
    )
