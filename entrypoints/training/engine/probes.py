"""Half of a training step alone, as fast as it goes: the input side without the model, and the model without its input side.

Which half a run waits for is a difference between speeds, not a share of its own time: a GPU computes while the host waits for data.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from training.data.loaders import Loaders
from training.distributed.world import World
from training.measure.timeline import WARM_UP_STEPS
from training.measure.usage import worker_cpu_seconds
from training.runtime import accelerator

MOST_SECONDS = 8.0
"""After which no more batches are made to measure a slow input side: it is known well enough then."""


class RepeatedBatch:
    """In a loader's place: its first batch, over and over."""

    def __init__(self, loader: Iterable[Any]):
        self._loader, self._first = loader, None

    def __iter__(self) -> Iterator[Any]:
        self._first = next(iter(self._loader)) if self._first is None else self._first
        return itertools.repeat(self._first)


def input_alone(
    loaders: Loaders,
    images: int,
    world: World,
    *,
    most_seconds: float | None = None,
    first_step: int = 0,
    crowd: int = 0,
) -> dict[str, float]:
    """Make micro-batches of so many images, or for some seconds, and drop them; a few before them are not counted.

    Args:
        most_seconds: None: MOST_SECONDS.
        first_step: the optimizer step, from 0 on, with whose images it begins.
        crowd: micro-batches that so many worker processes make side by side and bring all at once: so many come before those that
            count, and so many count, unless that takes thrice the time.

    Returns:
        input_images_per_second of this process, input_cpu_seconds_an_image (this process and its workers), and
        input_start_seconds: from asking the loader to its first batch, so with the start of its workers.
    """
    most_seconds = MOST_SECONDS if most_seconds is None else most_seconds
    asked, counted, batches, made = time.perf_counter(), 0, 0, _epochs(loaders, first_step)
    next(made)
    settle(world)
    first = time.perf_counter() - asked
    for _ in range(max(crowd + 1, WARM_UP_STEPS) - 1):
        next(made)
    settle(world)
    began, cpu = time.perf_counter(), time.process_time() + worker_cpu_seconds()
    while not counted or (
        counted < images and time.perf_counter() - began < most_seconds * (1 if batches >= crowd else 3)
    ):
        counted, batches = counted + len(next(made).images), batches + 1
    settle(world)
    seconds, cpu = time.perf_counter() - began, time.process_time() + worker_cpu_seconds() - cpu
    return {
        "input_images_per_second": counted / seconds,
        "input_cpu_seconds_an_image": cpu / counted,
        "input_start_seconds": first,
    }


def _epochs(loaders: Loaders, first_step: int) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    epoch, step = divmod(first_step, len(loaders.train_batches))
    for number in itertools.count(epoch + 1):
        loaders.train_batches.start(number, step)
        yield from loaders.train
        step = 0


def settle(world: World) -> None:
    """Wait for what is under way on a GPU."""
    accelerator.synchronize(world.device)
