"""A loader whose workers are threads, for decoders that release the GIL; each image goes straight into its place in the batch."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image

from training.data import storage
from training.data.batches import EvaluationBatches, Images, SampleKey, TrainingBatches, map_tensors, parts_of
from training.runtime import accelerator

Made = TypeVar("Made")

CPU = torch.device("cpu")

AHEAD = 2
"""Batches that are made while one is used."""

PARTS = 4
"""Parts per thread that a batch is divided into: one slow image then keeps few others waiting."""


class ThreadedLoader:
    """A sampler's batches, in its order, made by threads that live as long as an iteration.

    Args:
        dataset: indexed by a SampleKey, returns a tuple that begins with a uint8 image (channels, height, width) of one shape for all,
            or None for an image that is left out. If it has `begin_batch`, that is called instead with a batch's SampleKeys, and returns
            a function from a SampleKey to such a tuple, which several threads call at once.
        collate: makes a batch of such tuples and their stacked images, uint8 (batch, channels, height, width).
        pin_for: the device that gets the batches. If it is a GPU, all their tensors are pinned, so that it fetches them by DMA.
    """

    def __init__(
        self,
        dataset: Images,
        batch_sampler: TrainingBatches | EvaluationBatches,
        collate: Callable[[list[Any], torch.Tensor], Any],
        threads: int,
        *,
        pin_for: torch.device = CPU,
    ):
        self.dataset, self.batch_sampler, self.collate = dataset, batch_sampler, collate
        self.threads, self.pin_for = threads, pin_for

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.batch_sampler))  # the epoch is fixed here, as in a DataLoader

    def _batches(self, batches: Iterator[list[SampleKey]]) -> Iterator[Any]:
        Image.init()  # all of Pillow's formats; else several threads would load them at the first that needs them
        ended = threading.Event()
        pool = ThreadPoolExecutor(self.threads, "data worker", self._begin_thread, (ended,))
        waiting: deque[BatchInTheMaking] = deque()
        try:
            waiting.extend(self._begun(draws, pool) for draws in itertools.islice(batches, AHEAD))
            while waiting:
                waiting.extend(self._begun(draws, pool) for draws in itertools.islice(batches, 1))
                yield waiting[0].result()
                waiting.popleft()
        finally:  # also when a failed program ends with an iteration still open
            ended.set()
            for batch in waiting:
                batch.cancel()
            pool.shutdown(wait=True)

    def _begin_thread(self, ended: threading.Event) -> None:
        # pinning memory asks the current device, which is set per thread and by default the first GPU
        accelerator.make_current(self.pin_for)
        storage.wait_until(ended)

    def _begun(self, draws: list[SampleKey], pool: ThreadPoolExecutor) -> BatchInTheMaking:
        return BatchInTheMaking(self.dataset, draws, self._collated, pool, self.threads, self._memory)

    def _collated(self, items: list[Any], images: torch.Tensor) -> Any:
        return pinned_batch(self.collate(items, images), self.pin_for)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=accelerator.is_gpu(self.pin_for))


class BatchInTheMaking:
    """One batch, made in parts by a pool's threads.

    Args:
        dataset, collate: as ThreadedLoader takes them.
        threads: how many the pool has.
        memory: returns a tensor of a shape and a dtype to hold the images.
    """

    def __init__(
        self,
        dataset: Images,
        draws: list[SampleKey],
        collate: Callable[[list[Any], torch.Tensor], Any],
        pool: ThreadPoolExecutor,
        threads: int,
        memory: Callable[[Sequence[int], torch.dtype], torch.Tensor],
    ):
        self._draws, self._collate, self._memory = draws, collate, memory
        begin = getattr(dataset, "begin_batch", None)
        self._item: Callable[[SampleKey], Any] = begin(draws) if begin is not None else dataset.__getitem__
        self._lock = threading.Lock()
        self._images: torch.Tensor | None = None
        self._items: list[Any] = [None] * len(draws)
        self._unmade = len(draws)
        self._whole: Any = None
        parts = parts_of(draws, max(1, len(draws) // (threads * PARTS)))
        self._parts: list[Future[None]] = [pool.submit(self._make, part) for part in parts]

    def result(self) -> Any:
        """The batch once it is whole; None if every image is left out. What failed in a thread is raised here."""
        for part in self._parts:
            part.result()
        return self._whole

    def cancel(self) -> None:
        """Drop the parts that no thread has begun."""
        for part in self._parts:
            part.cancel()

    def settle(self) -> None:
        """Wait until no thread works on it any more, whatever became of it."""
        wait(self._parts)

    def _make(self, places: range) -> None:
        for place in places:
            item = self._item(self._draws[place])
            if item is not None:
                np.copyto(self._buffer(item[0])[place].numpy(), item[0].numpy())
                self._items[place] = item
        with self._lock:
            self._unmade -= len(places)
            last = not self._unmade
        if last:  # here, and not in the thread that takes it
            self._whole = self._collated()

    def _collated(self) -> Any:
        there = [place for place, item in enumerate(self._items) if item is not None]
        if self._images is None:  # no item came
            return None
        images = self._images if len(there) == len(self._items) else self._images[there]
        return self._collate([self._items[place] for place in there], images)

    def _buffer(self, image: torch.Tensor) -> torch.Tensor:
        """The tensor for the batch's images, made when the first one shows how large they are."""
        with self._lock:
            if self._images is None:
                self._images = self._memory((len(self._draws), *image.shape), image.dtype)
            return self._images


def pinned_batch(batch: Any, device: torch.device) -> Any:
    """A batch with its CPU tensors pinned, if the device is a GPU."""
    if not accelerator.is_gpu(device):
        return batch
    return map_tensors(batch, lambda values: accelerator.pinned(values, device))


class PerBatchMemo(Generic[Made]):
    """Calls a function once per distinct arguments, in whichever thread asks first; the others wait for its result."""

    def __init__(self, function: Callable[..., Made]):
        self._function, self._lock = function, threading.Lock()
        self._results: dict[tuple[object, ...], Future[Made]] = {}

    def __call__(self, *arguments: object) -> Made:
        with self._lock:
            result, first = self._results.get(arguments), False
            if result is None:
                result, first = self._results.setdefault(arguments, Future()), True
        if first:
            try:
                result.set_result(self._function(*arguments))
            except BaseException as error:
                result.set_exception(error)
        return result.result()
