"""A loader whose workers are threads, for decoders that free Python's lock: they put each image into its place in its batch."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image

from training.data.batches import EvaluationBatches, Images, SampleKey, TrainingBatches, parts_of
from training.runtime import accelerator

Made = TypeVar("Made")

CPU = torch.device("cpu")

AHEAD = 2
"""Batches that are made while one is used."""

PARTS = 4
"""Parts a batch is divided into, for each thread: one slow image then keeps few others waiting."""


class ThreadedLoader:
    """The batches of a sampler, in its order, made by threads that live as long as an iteration.

    Args:
        dataset: indexed by a SampleKey, gives a tuple that begins with a uint8 image (channels, height, width) of one shape for all; or
            None for one that is left out. Where it has `begin_batch`, that takes the SampleKeys of a batch and gives what is asked
            instead for them, a function from a SampleKey to such a tuple, by several threads at once.
        collate: makes a batch of such tuples and of their images together, uint8 (batch, channels, height, width).
        pin_for: the device that gets the batches. Where it is a GPU all their tensors are pinned, so that it fetches them by itself.
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
        return self._batches(iter(self.batch_sampler))  # which epoch it is, is settled here, as in a DataLoader

    def _batches(self, batches: Iterator[list[SampleKey]]) -> Iterator[Any]:
        Image.init()  # all of Pillow's formats, which it would else look for at the first that it meets, in several threads
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="data worker")
        waiting: deque[_Batch] = deque()
        try:
            waiting.extend(_Batch(self, draws, pool) for draws in itertools.islice(batches, AHEAD))
            while waiting:
                waiting.extend(_Batch(self, draws, pool) for draws in itertools.islice(batches, 1))
                yield waiting[0].result()
                waiting.popleft()
        finally:  # also where a program that failed ends with an iteration still open
            for batch in waiting:
                batch.cancel()
            pool.shutdown(wait=True)


class _Batch:
    """One batch in the making."""

    def __init__(self, loader: ThreadedLoader, draws: list[SampleKey], pool: ThreadPoolExecutor):
        self._loader, self._draws = loader, draws
        begin = getattr(loader.dataset, "begin_batch", None)
        self._item: Callable[[SampleKey], Any] = begin(draws) if begin is not None else loader.dataset.__getitem__
        self._lock = threading.Lock()
        self._images: torch.Tensor | None = None
        self._items: list[Any] = [None] * len(draws)
        self._unmade = len(draws)
        self._whole: Any = None
        parts = parts_of(draws, max(1, len(draws) // (loader.threads * PARTS)))
        self._parts: list[Future[None]] = [pool.submit(self._make, part) for part in parts]

    def result(self) -> Any:
        """The batch when it is whole; None where every image is left out. What failed in a thread is raised here."""
        for part in self._parts:
            part.result()
        return self._whole

    def cancel(self) -> None:
        """What no thread has begun is not made."""
        for part in self._parts:
            part.cancel()

    def _make(self, places: range) -> None:
        for place in places:
            item = self._item(self._draws[place])
            if item is not None:
                np.copyto(self._buffer(item[0])[place].numpy(), item[0].numpy())
                self._items[place] = item
        with self._lock:
            self._unmade -= len(places)
            last = not self._unmade
        if last:  # here, and not in the thread that trains
            self._whole = self._collated()

    def _collated(self) -> Any:
        there = [place for place, item in enumerate(self._items) if item is not None]
        if self._images is None:  # no item came
            return None
        images = self._images if len(there) == len(self._items) else self._images[there]
        batch = self._loader.collate([self._items[place] for place in there], images)
        return pinned_batch(batch, self._loader.pin_for)

    def _buffer(self, image: torch.Tensor) -> torch.Tensor:
        """Where the batch's images go, from the first on that shows how large they are."""
        with self._lock:
            if self._images is None:
                shape = (len(self._draws), *image.shape)
                self._images = torch.empty(
                    shape, dtype=image.dtype, pin_memory=accelerator.is_gpu(self._loader.pin_for)
                )
            return self._images


def pinned_batch(batch: Any, device: torch.device) -> Any:
    """A batch, a list or a NamedTuple and what is in it, with its CPU tensors where a GPU fetches them by itself."""
    if not accelerator.is_gpu(device):
        return batch
    if isinstance(batch, torch.Tensor):
        return accelerator.pinned(batch, device)
    if not isinstance(batch, (list, tuple)):
        return batch
    values = [pinned_batch(value, device) for value in batch]
    return batch._make(values) if hasattr(batch, "_make") else values


class PerBatchMemo(Generic[Made]):
    """A function that is called once for each of its arguments, whichever thread asks first; the others wait for what it gives."""

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
