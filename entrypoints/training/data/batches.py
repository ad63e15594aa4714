"""Which view of which image makes which batch: the same order at any number of processes, from any step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from training.distributed import World
from training.script_settings import TrainingSettings

Draw = tuple[int, int]
"""(view, image number): what a sampler yields, so that a worker process knows the view too."""


class LabelledBatch(NamedTuple):
    """Views of training images, each with its label, and with the label of the image that is mixed in."""

    images: torch.Tensor
    """uint8 (batch, channels, height, width)."""
    labels: torch.Tensor
    """int64 (batch,), class numbers."""
    other_labels: torch.Tensor
    """int64 (batch,), class numbers of the images mixed in; `labels` where nothing is mixed in."""
    own_share: torch.Tensor
    """float32 (batch,), how much of an image is its own, in 0…1; 1 where nothing is mixed in."""
    numbers: torch.Tensor
    """int64 (batch,), which training images."""
    views: torch.Tensor
    """int64 (batch,), which view of each."""


def view_of(epoch: int, views: int | None) -> int:
    """The view that an epoch draws of each image, from 1 on; with `views` they come round again."""
    return epoch if views is None else (epoch - 1) % views + 1


def view_order(images: int, seed: int, view: int) -> np.ndarray:
    """All image numbers, int64 (images,), shuffled: the first of them are drawn, and two neighbours are partners in mixing.

    numpy promises that RandomState's numbers never change (NEP 19); torch.randperm promises nothing between versions.
    """
    return np.random.RandomState([seed, view]).permutation(images)


def share_of_batch(global_batch_size: int, world: World) -> int:
    """Images of one optimizer step that each process takes.

    Raises:
        ValueError: the processes cannot have equal shares.
    """
    share, rest = divmod(global_batch_size, world.size)
    if rest or not share:
        valid = " or ".join(str(count * world.size) for count in (share, share + 1) if count)
        raise ValueError(f"global_batch_size {global_batch_size} does not divide by {world.size} processes: {valid}")
    return share


class TrainingBatches(Sampler[list[Draw]]):
    """This rank's micro-batches of every optimizer step: shuffled by seed and epoch, the last incomplete batch left out.

    The global batches are the same at any world size; rank r of n takes the r-th n-th of each, in `accumulation` parts.

    Epochs that draw the same view draw the same images, in another order, so that what the first of them kept is all that
    the others need. Two neighbours of the view's order stay together, because mixing pairs them (`mixing.partners`).

    Args:
        accumulation: micro-batches an optimizer step.
        views: how many views of each image there are. None: a new one every epoch.

    Raises:
        ValueError: a batch does not divide, or there are too few images for one.
    """

    def __init__(
        self,
        images: int,
        global_batch_size: int,
        world: World,
        seed: int,
        *,
        accumulation: int = 1,
        views: int | None = None,
    ):
        share = share_of_batch(global_batch_size, world)
        if share % accumulation:
            valid = _nearest_divisors(share, accumulation)
            raise ValueError(f"{share} images of each process do not divide into {accumulation} parts: {valid}")
        if images < global_batch_size:
            most = images // world.size * world.size
            cure = f"lower it to {most} or less" if most else f"give at least {world.size} images, one a process"
            raise ValueError(f"{images} training images make no batch of global_batch_size {global_batch_size}: {cure}")
        self.images, self.global_batch_size, self.world, self.seed = images, global_batch_size, world, seed
        self.accumulation, self.views = accumulation, views
        self.epoch, self._first_step = 1, 0

    def __len__(self) -> int:
        """Optimizer steps an epoch; each has `accumulation` micro-batches."""
        return self.images // self.global_batch_size

    def start(self, epoch: int, first_step: int = 0) -> None:
        """What the next iteration yields: an epoch, from 1 on, without its first so many optimizer steps."""
        assert epoch >= 1 and 0 <= first_step <= len(self)
        self.epoch, self._first_step = epoch, first_step

    def numbers(self, epoch: int) -> np.ndarray:
        """The images that all ranks together draw in an epoch, int64 (steps × global_batch_size,), in their order."""
        view = view_of(epoch, self.views)
        drawn = view_order(self.images, self.seed, view)[: len(self) * self.global_batch_size]
        pairs = np.random.RandomState([self.seed, view, epoch]).permutation(-(-len(drawn) // 2))
        places = (2 * pairs[:, None] + [0, 1]).ravel()
        return drawn[places[places < len(drawn)]]

    def __iter__(self) -> Iterator[list[Draw]]:
        view = view_of(self.epoch, self.views)
        steps = self.numbers(self.epoch).reshape(len(self), self.world.size, self.accumulation, -1)
        batches = steps[self._first_step :, self.world.rank].reshape(-1, steps.shape[-1])
        return ([(view, number) for number in batch.tolist()] for batch in batches)


class EvaluationBatches(Sampler[list[Draw]]):
    """This rank's share of all images, each exactly once over all ranks."""

    def __init__(self, images: int, batch_size: int, world: World):
        self.numbers = range(world.rank, images, world.size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        for first in range(0, len(self.numbers), self.batch_size):
            yield [(0, number) for number in self.numbers[first : first + self.batch_size]]


Collate = Callable[[list], Any]
"""Makes one batch of a dataset's items."""


@dataclass(frozen=True)
class Data:
    """What a run learns from and is measured on: two datasets, each indexed by a Draw."""

    classes: list[str]
    training: Dataset
    held_out: Dataset
    collate_training: Collate
    """Gives a NamedTuple of tensors."""
    collate_held_out: Collate = default_collate


@dataclass(frozen=True)
class Loaders:
    """This rank's batches."""

    train: DataLoader
    """Micro-batches of the epoch that `train_batches` was started with."""
    train_batches: TrainingBatches
    validation: DataLoader


def open_loaders(
    data: Data, settings: TrainingSettings, world: World, *, batch_size_per_device: int, views: int | None = None
) -> Loaders:
    """Loaders over a run's data.

    Args:
        batch_size_per_device: images that a process passes through the model at once.
        views: how many views of each training image there are. None: a new one every epoch.

    Raises:
        ValueError: a batch does not divide, or there are too few images for one.
    """
    share = share_of_batch(settings.global_batch_size, world)
    if share % batch_size_per_device:
        raise ValueError(
            f"batch_size_per_device {batch_size_per_device} does not divide the {share} images of each process "
            f"(global_batch_size {settings.global_batch_size} over {world.size}): "
            f"{_nearest_divisors(share, batch_size_per_device)}"
        )
    batches = TrainingBatches(
        len(data.training),
        settings.global_batch_size,
        world,
        settings.seed,
        accumulation=share // batch_size_per_device,
        views=views,
    )
    return Loaders(
        _loader(data.training, batches, data.collate_training, settings.num_workers, world, keep_workers=True),
        batches,
        held_out_loader(data.held_out, batch_size_per_device, settings, world, data.collate_held_out),
    )


def held_out_loader(
    dataset: Dataset, batch_size: int, settings: TrainingSettings, world: World, collate: Collate = default_collate
) -> DataLoader:
    """This rank's share of held-out images, each exactly once over all ranks.

    Its worker processes live for one evaluation each: kept, they would double those of training, idle most of the time.
    """
    batches = EvaluationBatches(len(dataset), batch_size, world)
    return _loader(dataset, batches, collate, settings.num_workers, world, keep_workers=False)


def _loader(
    dataset: Dataset, batches: Sampler[list[Draw]], collate: Collate, workers: int, world: World, *, keep_workers: bool
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=keep_workers and workers > 0,
        pin_memory=world.device.type == "cuda",
        # without one, each new iterator takes a global random number, and a resumed run would have other dropout
        generator=torch.Generator(),
    )


def _nearest_divisors(number: int, size: int) -> str:
    """The divisors of a number just below and just above a size that is none."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below, above = ([d for d in divisors if d < size][-1:], [d for d in divisors if d > size][:1])
    return " or ".join(map(str, below + above))
