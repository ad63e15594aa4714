"""What a label bank costs per batch: reading, checking and decoding its logits, or filling it beyond the teacher's pass. `make bench-bank`.

1,000 classes, the 10 largest logits of each, the files in the page cache. All of `TeacherCache.answers` is measured; when filling, with a
teacher that answers at once. Filling's share is of a step of a small student alone, without any teacher: of a real step it is less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine import ALONE, CLASSES, SIZE, STUDENT, TOP_K, Samples, alternate, machine, model, ratio, table
from training.data.batches import LabelledBatch
from training.teacher.cache import TeacherCache
from training.teacher.logit_records import record_layout

IMAGES = 65_536
BATCHES = (32, 64, 128, 256)


def batch_of(numbers: np.ndarray) -> LabelledBatch:
    """A batch with what the cache reads of it."""
    images = torch.zeros(len(numbers), 3, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(numbers), dtype=torch.int64)
    return LabelledBatch(images, labels, labels, labels.float(), torch.from_numpy(numbers), torch.ones_like(labels))


def filled(folder: Path) -> TeacherCache:
    """A cache that holds the logits of all images."""
    parts = {"teacher weights": "benchmark", "transform": "none", "data": "noise", "dtype": "fp32"}
    cache = TeacherCache.open(
        folder, parts=parts, images=IMAGES, layout=record_layout(CLASSES, TOP_K, "fp16"), views=1, world=ALONE
    )
    numbers = np.arange(IMAGES)
    cache.begin_epoch([1], numbers)
    for first in range(0, IMAGES, 4096):
        batch = batch_of(numbers[first : first + 4096])
        cache.answers(batch, lambda images: torch.randn(len(images), CLASSES))
    assert cache.begin_epoch([1], numbers), "the cache is not filled"
    return cache


def filling(folder: Path, precision: str, size: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """CPU seconds per batch of filling, of all threads and of the training thread alone, by round."""
    parts = {"teacher weights": "benchmark", "transform": "none", "data": "noise", "dtype": "fp32"}
    cache = TeacherCache.open(
        folder, parts=parts, images=IMAGES, layout=record_layout(CLASSES, TOP_K, precision), views=rounds, world=ALONE
    )
    logits, whole, thread = torch.randn(size, CLASSES), [], []
    for view in range(1, rounds + 1):
        cache.begin_epoch([view], np.arange(IMAGES))
        batches = [
            batch_of(numbers)
            for numbers in np.random.RandomState(view).permutation(IMAGES)[: size * steps].reshape(steps, size)
        ]
        batches = [batch._replace(views=torch.full_like(batch.views, view)) for batch in batches]
        began, own = time.process_time(), time.thread_time()
        for batch in batches:
            cache.answers(batch, lambda _images: logits)
        thread.append((time.thread_time() - own) / steps)
        cache.sync()
        whole.append((time.process_time() - began) / steps)
    return whole, thread


def student_step(size: int) -> float:
    """CPU seconds of a small student's forward and backward pass over a batch, median of five."""
    student, images = model(STUDENT, 0).train(), torch.zeros(size, 3, SIZE, SIZE, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        student(images).square().mean().backward()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def never(_images: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the teacher ran, and the cache is filled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="batches of each size in a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    shuffled = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        cache = filled(Path(folder))

        def look_up(size: int, count: int) -> None:
            for _ in range(count):
                cache.answers(batch_of(shuffled.randint(0, IMAGES, size)), never)

        samples = alternate({str(size): partial(look_up, size) for size in BATCHES}, asked.rounds, asked.steps)
        begin = Samples()
        for _ in range(asked.rounds):
            begin.add(lambda _count: cache.begin_epoch([1], np.arange(IMAGES)), 1)
        size = cache.layout.size
    print(
        f"{machine(asked.threads)}\n{asked.rounds} rounds of {asked.steps} batches of each size; medians, quartiles in brackets\n"
    )
    rows = [("images a batch", "CPU ms", "quartiles", "wall ms", "CPU µs an image")]
    for name, sample in samples.items():
        median, low, high = (1e3 * value for value in ratio(sample.cpu, [1.0] * asked.rounds))
        wall = 1e3 * statistics.median(sample.wall)
        rows.append((name, f"{median:.3f}", f"{low:.3f}…{high:.3f}", f"{wall:.3f}", f"{1e3 * median / int(name):.2f}"))
    print(table(rows))
    seconds = statistics.median(begin.cpu)
    print(
        f"\n{size} bytes a record. Checking all {IMAGES:,} as an epoch begins: {seconds:.3f} s of CPU, {1e6 * seconds / IMAGES:.2f} µs an image"
    )

    batch, step = 64, student_step(64)
    rows = [("filled with", "CPU ms", "of the training thread", "CPU µs an image", f"share of {STUDENT}'s step")]
    for precision in ("fp16", "int8", "int4"):
        with tempfile.TemporaryDirectory() as folder:
            found = filling(Path(folder), precision, batch, asked.rounds, asked.steps)
        whole, thread = (statistics.median(seconds) for seconds in found)
        rows.append(
            (
                precision,
                f"{1e3 * whole:.3f}",
                f"{1e3 * thread:.3f}",
                f"{1e6 * whole / batch:.1f}",
                f"{whole / step:.2%}",
            )
        )
    print(f"\nBatches of {batch} images; a step of the student alone takes {1e3 * step:.0f} ms of CPU")
    print(table(rows))


if __name__ == "__main__":
    main()
