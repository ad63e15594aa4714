"""A run's data and its loaders: this rank's batches of training and held-out images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate

from training.data.batches import (
    Announce,
    EvaluationBatches,
    Images,
    TrainingBatches,
    nearest_divisors,
    share_of_batch,
)
from training.data.dali.pipeline import DaliBatches, Recipe
from training.data.kept import KeptBatches, budget
from training.data.loader_processes import LoaderProcesses
from training.data.orders import Order
from training.data.threads import ThreadedLoader
from training.data.worker_processes import from_clean_server, in_own_group
from training.data.workers import Workers, choose, choose_threads
from training.distributed.world import World
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

Collate = Callable[..., Any]
"""Makes one batch of a dataset's items and, if they are stacked already, their images, uint8 (batch, channels, height, width)."""

Batches = Iterable[Any]
"""What a loader yields in each pass; None in place of a batch that is left out."""

Training = TypeVar("Training", bound=Images, covariant=True)
HeldOut = TypeVar("HeldOut", bound=Images, covariant=True)


def collate_items(items: Sequence[tuple[Any, ...]], images: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """A batch of tuples that begin with an image."""
    if images is not None:
        return [images, *default_collate([tuple(item[1:]) for item in items])]
    batch: Sequence[torch.Tensor] = default_collate([*items])
    return batch


@dataclass(frozen=True)
class Data(Generic[Training, HeldOut]):
    """A run's training and held-out datasets, each indexed by a SampleKey."""

    classes: list[str]
    training: Training
    held_out: HeldOut
    collate_training: Collate
    """Returns a NamedTuple of tensors."""
    collate_held_out: Collate = collate_items
    order: Order | None = None
    """How training images are shuffled. None: all of them together."""
    announce: Announce | None = None
    """Gets the training images that an epoch will draw; see TrainingBatches."""
    notes: Sequence[str] = ()
    """Choices made when the data was opened, with reasons, for the log."""
    recipe: Recipe[Any, Any] | None = None
    """How DALI makes the training batches. None: workers do."""
    elsewhere: Callable[[], tuple[Any, ...]] | None = None
    """Picklable. Opens the training images on the host that calls it, and returns them, what makes batches of them and, where servers run
    a teacher, what opens it."""
    labelled_share: float = 1.0
    """Share of the images drawn in an epoch that have a label, 0 to 1."""
    views_per_decode: int = 1
    """Consecutive views of a training image that are made from one decoding."""
    numbered: bool = False
    """Labels are class numbers, whatever the classes are called; otherwise the names tell which images belong to a class."""

    @property
    def epoch_images(self) -> int:
        """The most training images that an epoch draws."""
        return len(self.training) if self.order is None else self.order.epoch_images


Remote = Callable[[Data[Any, Any], TrainingBatches], Batches]
"""Returns a sampler's batches of training images, made by other hosts."""


@dataclass(frozen=True)
class Loaders:
    """This rank's batches."""

    train: Batches
    """Micro-batches of the epoch that `train_batches` was started with."""
    train_batches: TrainingBatches
    validation: KeptBatches
    workers: Workers

    @property
    def crowd(self) -> int:
        """Training micro-batches that arrive together, because each worker process makes whole ones in parallel with the others; 0: they
        arrive one by one."""
        in_processes = isinstance(self.train, (DataLoader, LoaderProcesses))
        return self.workers.count if in_processes else 0


def open_loaders(
    data: Data[Images, Images],
    settings: TrainingSettings,
    world: World,
    *,
    batch_size_per_device: int,
    held_out_batch_size: int | None = None,
    views: int | None = None,
    remote: Remote | None = None,
    log: Callable[[str], None] = lambda _: None,
    sampler: type[TrainingBatches] = TrainingBatches,
) -> Loaders:
    """Loaders over a run's data.

    Args:
        batch_size_per_device: images per forward pass of a process.
        held_out_batch_size: the same of held-out images, which may be larger. None: `batch_size_per_device`.
        views: number of views of each training image. None: new ones every epoch.
        remote: fetches the training batches from other hosts. None: this host makes them.
        log: logs how many workers make the batches, and why.
        sampler: decides which training images make which batch.

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
    batches = sampler(
        data.epoch_images,
        settings.global_batch_size,
        world,
        settings.seed,
        accumulation=share // batch_size_per_device,
        views=views,
        together=data.views_per_decode,
        order=data.order,
        announce=data.announce if remote is None else None,
    )
    workers = choose(settings, world, data.training, views=batches.drawn_together, anywhere=data.announce is None)
    train: Batches
    if remote is not None:
        train = remote(data, batches)
        log("training images come from other hosts")
        log(f"evaluation: {workers.about}")
    elif data.recipe is None:
        log(workers.about)
        train = _loader(data.training, batches, data.collate_training, workers, world, keep_workers=True)
    else:
        train = DaliBatches(data.recipe, batches, world, choose_threads(settings, world))
        log(train.about())
        log(f"evaluation: {workers.about}")
    return Loaders(
        train,
        batches,
        held_out_loader(
            data.held_out, held_out_batch_size or batch_size_per_device, workers, world, data.collate_held_out
        ),
        workers,
    )


def held_out_loader(
    dataset: Images, batch_size: int, workers: Workers, world: World, collate: Collate = collate_items
) -> KeptBatches:
    """This rank's share of held-out images, each exactly once over all ranks; None in place of a batch that is left out.

    Its workers live for one pass: if kept, they would double the training workers and be idle most of the time. Later passes take the
    batches from memory, if it has room for them.
    """
    batches = EvaluationBatches(len(dataset), batch_size, world)
    loader = _loader(dataset, batches, collate, workers, world, keep_workers=False)
    return KeptBatches(loader, budget())


def _loader(
    dataset: Images,
    batches: TrainingBatches | EvaluationBatches,
    collate: Collate,
    workers: Workers,
    world: World,
    *,
    keep_workers: bool,
) -> Batches:
    on_gpu = accelerator.is_gpu(world.device)
    if workers.kind == "threads" and workers.count:
        return ThreadedLoader(dataset, batches, collate, workers.count, pin_for=world.device)
    if workers.kind == "loader" and workers.count:
        return LoaderProcesses(dataset, batches, collate, workers.count, pin_for=world.device, zero_copy=keep_workers)
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # it asks for an index and a length, and torch's Dataset promises no length
        batch_sampler=batches,
        collate_fn=functools.partial(_collate_present, collate),
        num_workers=workers.count,
        persistent_workers=keep_workers and workers.count > 0,
        pin_memory=on_gpu,
        multiprocessing_context=from_clean_server() if on_gpu and workers.count else None,
        worker_init_fn=in_own_group,
        # without one, each new iterator takes a global random number, and a resumed run would have different dropout
        generator=torch.Generator(),
    )


def _collate_present(collate: Collate, items: list[Any]) -> Any:
    """A batch of the items that are not left out; None if there are none."""
    items = [item for item in items if item is not None]
    return collate(items) if items else None
