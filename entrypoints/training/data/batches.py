"""Samplers: which views of which images form each batch, in the same order at any world size and from any step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from training.data.orders import FreeOrder, Order, of_epoch
from training.distributed.world import World

SampleKey = tuple[int, int]
"""(view, image index): what a sampler yields, so that a worker process knows the view too."""


class Images(Protocol):
    """A run's images, indexed by a SampleKey. DataLoader accepts them like a torch Dataset, which declares no length."""

    def __len__(self) -> int: ...

    def __getitem__(self, draw: SampleKey, /) -> Any:
        """One batch item: a tuple that begins with the image. None: the image is left out."""


Announce = Callable[[np.ndarray], Callable[[int], None]]
"""Announces to a source what will be read from it; see TrainingBatches."""


UNLABELLED = -100
"""Stands for the class number of an unlabelled image. torch.nn.functional.cross_entropy ignores it by default."""


class LabelledBatch(NamedTuple):
    """Views of training images, each with its own label and the label of the image mixed into it."""

    images: torch.Tensor
    """uint8 (batch, channels, height, width)."""
    labels: torch.Tensor
    """int64 (batch,), class numbers, or UNLABELLED."""
    labels_b: torch.Tensor
    """int64 (batch,), class numbers of the images mixed in; `labels` where nothing is mixed in."""
    lam: torch.Tensor
    """float32 (batch,), each image's own share of its mix, in 0…1; 1 where nothing is mixed in."""
    indices: torch.Tensor
    """int64 (batch,), which training images."""
    views: torch.Tensor
    """int64 (batch,), which view of each."""


class TaughtBatch(NamedTuple):
    """A LabelledBatch, with the teacher's logits for its images."""

    images: torch.Tensor
    labels: torch.Tensor
    labels_b: torch.Tensor
    lam: torch.Tensor
    indices: torch.Tensor
    views: torch.Tensor
    records: torch.Tensor
    """uint8 (batch, record size), the logits as training.teacher.logit_records encodes them."""


class MaskedBatch(NamedTuple):
    """Training images, each with its mask."""

    images: torch.Tensor
    """uint8 (batch, channels, height, width)."""
    masks: torch.Tensor
    """uint8 (batch, height, width), class numbers, or `ignore_index`."""
    indices: torch.Tensor
    """int64 (batch,), which training images."""
    views: torch.Tensor
    """int64 (batch,), which view of each."""


CPU_FIELDS = ("indices", "views", "records")
"""Fields of a batch that are read on the CPU, whichever device trains."""


def map_leaves(batch: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """A batch of nested lists and NamedTuples with `change` applied to each instance of `kinds`; all else stays as it is."""
    if isinstance(batch, kinds):
        return change(batch)
    if not isinstance(batch, (list, tuple)):
        return batch
    values = [map_leaves(value, kinds, change) for value in batch]
    return batch._make(values) if hasattr(batch, "_make") else values


def map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`map_leaves` over a batch's tensors."""
    return map_leaves(batch, torch.Tensor, change)


def bytes_of(batch: Any) -> int:
    """Total bytes of a batch's tensors."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    return sum(map(bytes_of, batch)) if isinstance(batch, (list, tuple)) else 0


def views_of(epoch: int, views: int | None, together: int = 1) -> range:
    """The views, from 1 on, that an epoch draws of each of its images; with `views`, a multiple of `together`, they repeat."""
    visit = (epoch - 1) // together
    first = 1 + together * (visit if views is None else visit % (views // together))
    return range(first, first + together)


def visit_of(view: int, together: int = 1) -> int:
    """The visit, from 1 on, that a view of an image belongs to; all views of a visit share one arrangement of the images."""
    return (view - 1) // together + 1


def parts_of(draws: Sequence[SampleKey], size: int) -> list[range]:
    """Ranges of about `size` draws each that a batch is split into; the views of an image stay in one range."""
    begins = [place for place, draw in enumerate(draws) if place == 0 or draw[1] != draws[place - 1][1]]
    chosen: list[int] = []
    for place in begins:
        if not chosen or place >= chosen[-1] + size:
            chosen.append(place)
    return [range(first, after) for first, after in zip(chosen, [*chosen[1:], len(draws)])]


def share_of_batch(global_batch_size: int, world: World) -> int:
    """Images that each process takes per optimizer step.

    Raises:
        ValueError: the processes cannot have equal shares.
    """
    share, rest = divmod(global_batch_size, world.size)
    if rest or not share:
        valid = " or ".join(str(count * world.size) for count in (share, share + 1) if count)
        raise ValueError(f"global_batch_size {global_batch_size} is not divisible by {world.size} processes: {valid}")
    return share


class TrainingBatches(Sampler[list[SampleKey]]):
    """This rank's micro-batches of each optimizer step, shuffled by seed and epoch; the last incomplete batch is dropped.

    The global batches are the same at any world size. Rank r of n takes the r-th of n equal parts of each, in `accumulation` parts.

    Epochs that draw the same view draw the same images in a different order, so what the first of them caches is all that the
    others need. Neighbouring pairs of the view's order stay together, because mixing pairs them (`mixing.partners`).

    With N = `together` consecutive views of an image, N epochs visit each image once: each epoch draws an N-th of the images, with N
    views of each.

    Args:
        images: the most that an epoch draws.
        accumulation: micro-batches per optimizer step.
        views: number of views of each image. None: new ones every epoch.
        together: number of consecutive views of an image.
        order: how images are shuffled. None: all of them together.
        announce: called when an epoch begins with the images that this rank will draw, int64 (images,), in order. It returns a
            function that is called at each batch with the number of images requested so far, so that a source can read ahead.

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
        together: int = 1,
        order: Order | None = None,
        announce: Announce | None = None,
    ):
        assert global_batch_size % together == 0 and (views is None or views % together == 0), "as the settings say"
        share = share_of_batch(global_batch_size, world)
        if share % accumulation:
            valid = nearest_divisors(share, accumulation)
            raise ValueError(f"{share} images of each process do not divide into {accumulation} parts: {valid}")
        if images < global_batch_size:
            most = images // world.size * world.size
            fix = f"lower it to {most} or less" if most else f"give at least {world.size} images, one a process"
            raise ValueError(f"{images} training images make no batch of global_batch_size {global_batch_size}: {fix}")
        self.images, self.global_batch_size, self.world, self.seed = images, global_batch_size, world, seed
        self.accumulation, self.views, self.together = accumulation, views, together
        self._order, self._announce = order or FreeOrder(images), announce
        self.epoch, self._first_step = 1, 0

    @property
    def batch_size_per_device(self) -> int:
        """Images per micro-batch."""
        return self.global_batch_size // (self.world.size * self.accumulation)

    @property
    def drawn_together(self) -> int:
        """Consecutive views of an image in a batch."""
        return self.together

    def __len__(self) -> int:
        """Optimizer steps per epoch; each has `accumulation` micro-batches."""
        return self.images // self.global_batch_size

    def start(self, epoch: int, first_step: int = 0) -> None:
        """Make the next iteration yield this epoch, from 1 on, without its first `first_step` optimizer steps."""
        assert epoch >= 1 and 0 <= first_step <= len(self)
        self.epoch, self._first_step = epoch, first_step

    def indices(self, epoch: int) -> np.ndarray:
        """The images that all ranks together draw in an epoch, int64 (steps × global_batch_size / together,), in order."""
        steps, visit = len(self), visit_of(self.views_of(epoch).start, self.together)
        visits, place = divmod(epoch - 1, self.together)
        each = self.global_batch_size // self.together
        drawn = of_epoch(self._order, self.seed, visit, 1 + visits, self.together * steps, each)
        return drawn[place * steps : (place + 1) * steps].flatten()

    def own_indices(self, epoch: int) -> np.ndarray:
        """The images that this rank draws in a whole epoch, int64 (steps, accumulation, batch_size_per_device), in order; each image
        appears once per view drawn of it."""
        return self._own(np.repeat(self.indices(epoch), self.together))  # an image's views one after the other

    def views_of(self, epoch: int) -> range:
        """The views that an epoch draws of each of its images."""
        return views_of(epoch, self.views, self.together)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        images = self.own_indices(self.epoch)
        views = self._own(np.resize(self.views_of(self.epoch), len(self) * self.global_batch_size))
        batches, of_batches = (draws[self._first_step :].reshape(-1, images.shape[-1]) for draws in (images, views))
        asked_for = self._announce(batches.ravel()) if self._announce else None
        return _draws(of_batches, batches, asked_for)

    def _own(self, draws: np.ndarray) -> np.ndarray:
        """This rank's part of all ranks' draws (steps × global_batch_size,): (steps, accumulation, batch_size_per_device)."""
        return draws.reshape(len(self), self.world.size, self.accumulation, -1)[:, self.world.rank]


class LabellingBatches(TrainingBatches):
    """This rank's micro-batches over all of a view's images, in the view's order, for a frozen teacher to label once.

    For a given micro-batch size, a view's batches are the same at any world size; the last is filled up with the view's first images.
    Of every n batches that are requested, rank r of n takes the r-th; all ranks take equally many.

    Args: as TrainingBatches.
    """

    def __init__(self, *args: Any, **values: Any):
        super().__init__(*args, **values)
        self.global_batch_size, self.accumulation = self.batch_size_per_device * self.world.size, 1
        self._rounds = np.empty((0, self.world.size), np.int64)

    @property
    def drawn_together(self) -> int:
        """1: each batch is of a single view."""
        return 1

    def of_view(self, view: int) -> np.ndarray:
        """The batches of a view, int64 (batches, images)."""
        size = self.batch_size_per_device
        images = self._order.arranged(self.seed, visit_of(view, self.together)).images[: self.images]
        return np.resize(images, (-(-self.images // size), size))

    def start_view(self, view: int, wanted: np.ndarray) -> None:
        """Make the next iteration yield the batches of a view, as `of_view` gives them, that `wanted`, bool (batches,), selects."""
        self.epoch, chosen = view, np.flatnonzero(wanted)
        self._rounds = np.resize(chosen, (-(-len(chosen) // self.world.size), self.world.size))

    def __len__(self) -> int:
        """Batches that each rank takes of the view."""
        return len(self._rounds)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        batches = self.of_view(self.epoch)[self._rounds[:, self.world.rank]]
        asked_for = self._announce(batches.ravel()) if self._announce else None
        return _draws(np.full_like(batches, self.epoch), batches, asked_for)


def _draws(
    views: np.ndarray, batches: np.ndarray, asked_for: Callable[[int], None] | None
) -> Iterator[list[SampleKey]]:
    """The draws of each batch, from views and image indices, both int64 (batches, draws)."""
    for count, (of_batch, batch) in enumerate(zip(views, batches), start=1):
        if asked_for is not None:
            asked_for(count * len(batch))
        yield [*zip(of_batch.tolist(), batch.tolist())]


class EvaluationBatches(Sampler[list[SampleKey]]):
    """This rank's share of all images, each exactly once over all ranks."""

    def __init__(self, images: int, batch_size: int, world: World):
        self.indices = range(world.rank, images, world.size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for first in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[first : first + self.batch_size]]


def nearest_divisors(number: int, size: int) -> str:
    """The nearest divisors of `number` below and above a `size` that does not divide it."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below, above = ([d for d in divisors if d < size][-1:], [d for d in divisors if d > size][:1])
    return " or ".join(map(str, below + above))
