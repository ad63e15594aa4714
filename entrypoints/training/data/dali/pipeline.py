"""Training batches whose pixels NVIDIA DALI makes, on the GPU if there is one.

DALI only makes pixels. The kit itself decides which images come when, who takes which share of a batch, what is drawn for an image and
what replaces a broken one, so order, resuming, the teacher's cache and labels are those of the other paths.
"""

from __future__ import annotations

import importlib.util
import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from training.data.batches import SampleKey, TrainingBatches
from training.data.dali import graph
from training.data.dali.graph import QUEUED, Operations, Prepared
from training.data.decode.reference import ReferencePreprocessor
from training.data.workers import Workers
from training.distributed.world import World
from training.runtime import accelerator

if TYPE_CHECKING:
    from nvidia.dali.backend import TensorListCPU, TensorListGPU

AHEAD = 2
"""Batches that are read and drawn before DALI takes them."""

READERS = 8
"""Threads that read and draw: they mostly wait for files, and while one draws the others cannot."""

DRAWS_PER_TASK = 16


class DaliPreprocessor(ReferencePreprocessor):
    """The preprocessor of single images where DALI makes whole batches: an example of one, and what DALI does not decode."""

    name = "dali"

    def about(self) -> str:
        """What decodes, for the log."""
        return "preprocessing dali: NVIDIA DALI makes training images, Pillow decodes what DALI cannot"


class Item(Protocol):
    """One image that a batch is made of."""

    @property
    def image_index(self) -> int:
        """The image's index."""

    @property
    def prepared(self) -> Prepared:
        """DALI's inputs for it."""


class DrawnSample(Protocol):
    """One draw of a batch, read: what DALI shall make for it, and what is done with that."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Its own image, then others."""


OneItem = TypeVar("OneItem", bound=Item)
OneDrawn = TypeVar("OneDrawn", bound=DrawnSample)


class Recipe(Protocol[OneItem, OneDrawn]):
    """How one kind of batch is made."""

    operations: Operations
    items_per_draw: int
    """The most items per draw."""

    def begin_batch(self, fallback_indices: Collection[int]) -> Callable[[SampleKey], OneDrawn]:
        """Returns what reads one batch's draws, in several threads; an Item that two of them need as a partner is one object.

        Args:
            fallback_indices: indices of images that the reference decoder decodes instead of DALI.
        """

    def finish(self, batch: ReadBatch[OneItem, OneDrawn], pixels: torch.Tensor) -> Any:
        """The finished batch, a NamedTuple of tensors.

        Args:
            pixels: uint8 (items, channels, height, width) of the batch's items, on the device; it may be modified.

        Returns:
            Its other tensors may be on the CPU, pinned if the pixels are on a GPU. Nothing in it waits for the device.
        """


@dataclass(frozen=True)
class ReadBatch(Generic[OneItem, OneDrawn]):
    """A batch that has been read, for DALI to make."""

    draws: list[SampleKey]
    drawn: list[OneDrawn]
    items: list[OneItem]
    """The items of all draws, each once."""

    def places(self, items: list[OneItem]) -> list[int]:
        """The position of each in `self.items`."""
        place = {id(item): place for place, item in enumerate(self.items)}
        return [place[id(item)] for item in items]


class Batch(NamedTuple):
    """A batch that is being read."""

    draws: list[SampleKey]
    parts: list[Future[list[DrawnSample]]]

    def read(self) -> ReadBatch[Item, DrawnSample]:
        """The batch once all of it is read; what failed is raised here."""
        drawn = [one for part in self.parts for one in part.result()]
        return ReadBatch(self.draws, drawn, [*{id(item): item for one in drawn for item in one.items}.values()])


class DaliBatches:
    """Iterates over this rank's micro-batches of the epoch that `batches` was started with, with images on the device.

    A file that DALI decodes differently or not at all is decoded as on the reference path. If DALI stops on a damaged file that
    no check foresaw, the batch is made again that way; only then is it known whether the image is broken.

    Args:
        threads: CPU threads of DALI.
    """

    def __init__(self, recipe: Recipe[Any, Any], batches: TrainingBatches, world: World, threads: Workers):
        self.recipe, self.batches, self.world, self.threads = recipe, batches, world, threads
        self._readers = ThreadPoolExecutor(READERS, "dali-reader")
        self._fallback_indices: set[int] = set()
        """Images that DALI has stopped on."""
        self._most = batches.batch_size_per_device * recipe.items_per_draw
        self._running: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._start()

    def about(self) -> str:
        """What makes the pixels, for the log."""
        import nvidia.dali

        return f"DALI {nvidia.dali.__version__} on the {self.world.device.type.upper().replace('CUDA', 'GPU')}, {self.threads.about}"

    def __len__(self) -> int:
        """Micro-batches of a whole epoch."""
        return len(self.batches) * self.batches.accumulation

    def __iter__(self) -> Iterator[Any]:
        before = self._running()
        if before is not None:
            before.close()  # so that nothing of it is left in DALI's queue
        epoch = self._epoch(iter(self.batches))  # the epoch is fixed here, as in a DataLoader
        self._running = weakref.ref(epoch)
        return epoch

    def _epoch(self, draws: Iterator[list[SampleKey]]) -> Generator[Any, None, None]:
        planned: deque[Batch] = deque()
        queued: deque[ReadBatch[Item, DrawnSample]] = deque()

        def top_up() -> None:
            while len(planned) < AHEAD and (batch := next(draws, None)) is not None:
                planned.append(self._plan(batch))
            while planned and len(queued) < QUEUED:
                queued.append(planned.popleft().read())
                with suppress(RuntimeError):  # from an earlier batch, whose own turn raises it
                    self._feed(queued[-1].items)

        try:
            top_up()
            while queued:
                try:
                    pixels = self._pixels()
                except RuntimeError:
                    pixels = self._again(queued)
                batch = queued.popleft()
                top_up()  # first, so that DALI goes on while the model works
                yield self.recipe.finish(batch, pixels)
        finally:
            for left in planned:
                for part in left.parts:
                    part.cancel()
            for _ in queued:
                with suppress(RuntimeError):
                    self._pixels()

    def _plan(self, draws: list[SampleKey]) -> Batch:
        """A batch whose files are being read."""
        one = self.recipe.begin_batch(frozenset(self._fallback_indices))
        tasks = [draws[first : first + DRAWS_PER_TASK] for first in range(0, len(draws), DRAWS_PER_TASK)]
        return Batch(draws, [self._readers.submit(lambda task: [*map(one, task)], task) for task in tasks])

    # -- DALI ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a new graph: one in which an operator failed does nothing any more."""
        device = self.world.device
        self._graph = graph.build(
            self.recipe.operations,
            images=self._most,
            threads=max(1, self.threads.count),
            device_id=(device.index or 0) if accelerator.is_gpu(device) else None,
        )
        # A graph's first run fills its queue, so it takes as many batches. These also show early whether DALI
        # works here at all.
        for _ in range(QUEUED):
            self._give([graph.example(self.recipe.operations)])
        self._graph.schedule_run()
        for _ in range(QUEUED):
            self._pixels()

    def _give(self, images: list[Prepared]) -> None:
        for name, values in graph.inputs(images, self.recipe.operations).items():
            self._graph.feed_input(name, values)

    def _feed(self, items: list[Item]) -> None:
        """Start making a batch; `_pixels` returns it."""
        self._give([item.prepared for item in items])
        self._graph.schedule_run()

    def _pixels(self) -> torch.Tensor:
        """uint8 (images, channels, height, width) of the oldest batch that was fed, on the device.

        Raises:
            RuntimeError: DALI stopped on it, or on one that was fed with it.
        """
        try:
            (made,) = self._graph.share_outputs()
        except (
            StopIteration,
            IndexError,
        ) as error:  # what DALI raises for a batch that it did not take after it had stopped
            raise RuntimeError(f"DALI did not start a batch: {error}") from error
        try:
            return _own_tensor(made, self.world.device)
        finally:
            self._graph.release_outputs()

    def _again(self, queued: deque[ReadBatch[Item, DrawnSample]]) -> torch.Tensor:
        """Retry the oldest batch alone, then with what DALI stopped on decoded by the reference decoder; then feed the others again.

        Raises:
            BrokenImage: an image cannot be decoded, and broken ones are to end the run; the message names it.
            RuntimeError: DALI fails without a damaged image too, for example for lack of memory.
        """
        batch, pixels = queued[0], None
        for attempt in range(3):
            self._start()
            try:
                self._feed(batch.items)
                pixels = self._pixels()
                break
            except RuntimeError as error:
                if attempt == 2:
                    raise RuntimeError(f"DALI cannot make a batch of training images: {error}") from error
                named = [int(place) for place in re.findall(r"sample #(\d+)", str(error))] if attempt == 0 else []
                self._fallback_indices |= {batch.items[place].image_index for place in named or range(len(batch.items))}
                batch = self._plan(batch.draws).read()  # other images replace what proves broken
        queued[0] = batch
        assert pixels is not None
        for other in list(queued)[1:]:
            with suppress(RuntimeError):
                self._feed(other.items)
        return pixels


def _own_tensor(made: TensorListCPU | TensorListGPU, device: torch.device) -> torch.Tensor:
    """A copy of DALI's output, since DALI reuses its memory."""
    from nvidia.dali.backend import TensorListCPU

    if isinstance(made, TensorListCPU):
        return torch.from_numpy(np.array(made.as_array()))
    gpu, stream = accelerator.module(device), accelerator.side_stream(device, "pixels")
    with gpu.stream(stream):  # waiting for this one does not wait for the model
        copied = from_dlpack(made.as_tensor()).clone()
    stream.synchronize()
    copied.record_stream(gpu.current_stream(device))
    return copied


def require_package() -> None:
    """Check before training that DALI is installed.

    Raises:
        ValueError: it is missing; the message says how to install it.
    """
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        cuda = 120 if (torch.version.cuda or "13") < "13" else 130
        raise ValueError(
            f"preprocessing: dali needs NVIDIA's package: pip install nvidia-dali-cuda{cuda}, or write preprocessing: cpu"
        )
