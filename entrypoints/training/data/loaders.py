"""What a run learns from, and the loaders that bring it: this rank's batches of training and of held-out images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from training.data.batches import (
    Announce,
    Draw,
    EvaluationBatches,
    TrainingBatches,
    nearest_divisors,
    share_of_batch,
)
from training.data.orders import Order
from training.distributed import World
from training.script_settings import TrainingSettings

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
    order: Order | None = None
    """How training images are shuffled. None: all of them among each other."""
    announce: Announce | None = None
    """What wants to be told which training images an epoch draws; see TrainingBatches."""
    notes: Sequence[str] = ()
    """What was chosen in opening the data, and why: for the log."""


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
            f"{nearest_divisors(share, batch_size_per_device)}"
        )
    batches = TrainingBatches(
        len(data.training),
        settings.global_batch_size,
        world,
        settings.seed,
        accumulation=share // batch_size_per_device,
        views=views,
        order=data.order,
        announce=data.announce,
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
