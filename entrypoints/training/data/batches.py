"""Which images make which batch: the same batches in the same order at any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from training.distributed import World
from training.script_settings import TrainingSettings

Draw = tuple[int, int]
"""Which image of which epoch: what a sampler yields, so that a worker process knows the epoch too."""


class TrainingBatches(Sampler[list[Draw]]):
    """This rank's share of every global batch: shuffled by seed and epoch, the last incomplete batch left out.

    The global batches are the same at any world size; rank r of n takes the r-th n-th of each.
    """

    def __init__(self, images: int, global_batch_size: int, world: World, seed: int):
        if global_batch_size % world.size:
            raise ValueError(f"global_batch_size {global_batch_size} does not divide by {world.size} processes")
        if images < global_batch_size:
            raise ValueError(f"{images} training images make no batch of {global_batch_size}: lower global_batch_size")
        self.images, self.global_batch_size, self.world, self.seed, self.epoch = (
            images,
            global_batch_size,
            world,
            seed,
            0,
        )

    def __len__(self) -> int:
        return self.images // self.global_batch_size

    def __iter__(self) -> Iterator[list[Draw]]:
        order = torch.randperm(
            self.images, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        ).tolist()
        share = self.global_batch_size // self.world.size
        for step in range(len(self)):
            first = step * self.global_batch_size + self.world.rank * share
            yield [(self.epoch, number) for number in order[first : first + share]]


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


@dataclass(frozen=True)
class Data:
    """The loaders of a run and the names of its classes."""

    classes: list[str]
    train: DataLoader
    train_batches: TrainingBatches
    validation: DataLoader


def load_batches(
    classes: list[str],
    training: Dataset,
    held_out: Dataset,
    settings: TrainingSettings,
    world: World,
    collate_held_out: Callable[[list], Any] | None = None,
) -> Data:
    """Loaders over two datasets, each indexed by a Draw.

    Args:
        collate_held_out: makes a batch of the held-out dataset's items. None: stacks them.

    Raises:
        ValueError: there are too few images for one batch, or the batch does not divide by the processes.
    """
    batches = TrainingBatches(len(training), settings.global_batch_size, world, settings.seed)
    held_out_batches = EvaluationBatches(len(held_out), max(1, settings.global_batch_size // world.size), world)
    workers = {
        "num_workers": settings.num_workers,
        "persistent_workers": settings.num_workers > 0,
        "pin_memory": world.device.type == "cuda",
    }
    return Data(
        classes,
        DataLoader(training, batch_sampler=batches, **workers),
        batches,
        DataLoader(held_out, batch_sampler=held_out_batches, collate_fn=collate_held_out, **workers),
    )
