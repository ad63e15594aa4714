"""What a filled teacher cache costs a batch: reading, checking and decoding its logits. `make bench-training`.

1,000 classes, the 10 largest logits of each, the files in the page cache. All of `TeacherCache.logits` is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine import ALONE, CLASSES, TOP_K, Samples, alternate, machine, ratio, table
from training.data.batches import LabelledBatch
from training.teacher.cache import TeacherCache

IMAGES = 65_536
BATCHES = (32, 64, 128, 256)


def batch_of(numbers: np.ndarray) -> LabelledBatch:
    """A batch as far as the cache looks at it."""
    images = torch.zeros(len(numbers), 3, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(numbers), dtype=torch.int64)
    return LabelledBatch(images, labels, labels, labels.float(), torch.from_numpy(numbers), torch.ones_like(labels))


def filled(folder: Path) -> TeacherCache:
    """A cache that holds the logits of all images."""
    parts = {"teacher weights": "benchmark", "transform": "none", "data": "noise", "dtype": "fp32"}
    cache = TeacherCache.open(
        folder, parts=parts, images=IMAGES, classes=CLASSES, views=1, top_k=TOP_K, precision="fp16", world=ALONE
    )
    numbers = np.arange(IMAGES)
    cache.begin_epoch(1, numbers)
    for first in range(0, IMAGES, 4096):
        batch = batch_of(numbers[first : first + 4096])
        cache.logits(batch, lambda images: torch.randn(len(images), CLASSES))
    assert cache.begin_epoch(1, numbers), "the cache is not filled"
    return cache


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
                cache.logits(batch_of(shuffled.randint(0, IMAGES, size)), never)

        samples = alternate({str(size): partial(look_up, size) for size in BATCHES}, asked.rounds, asked.steps)
        begin = Samples()
        for _ in range(asked.rounds):
            begin.add(lambda _count: cache.begin_epoch(1, np.arange(IMAGES)), 1)
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


if __name__ == "__main__":
    main()
