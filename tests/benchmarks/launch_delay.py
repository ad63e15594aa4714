"""What decoding costs the thread that launches kernels, beside 16 workers of each kind on the simulated accelerator. `make bench-workers`.

A step takes a batch from the kit's own loader, of JPEGs of 400 x 300 pixels, and launches 500 kernels of 60 microseconds of a core each;
two steps fit into the device's queue. Each worker type trains in its own process, in turns, round after round; the first repeats one
batch, so nothing else runs. The launching itself is timed; the delay is how much longer it takes than the first's. No memory is pinned,
since there is no driver: beside a GPU, processes would also have a thread of the training process copy each batch into pinned memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from engine import ALONE, ROOT, machine, progress, ratio, table
from photographs import SMALL, write_images
from training.data.loaders import open_loaders
from training.data.views import open_data
from training.settings.scripts import LabelledImageSettings

NONE = "none"
WAYS = (NONE, "threads", "processes", "loader")

LAUNCHES, LAUNCH_SECONDS, KERNEL_SECONDS = 500, 60e-6, 300e-6

WARM_UP = 6
"""Steps of each training that do not count, since workers start in them."""


def batches(root: Path, kind: str, workers: int, images: int) -> Iterator[Any]:
    """Of the kit's own loader, endlessly."""
    settings = LabelledImageSettings(
        image_size=224, global_batch_size=images, min_crop_area=0.08, horizontal_flip=True, epochs=1_000_000,
        num_workers=0 if kind == NONE else workers, worker_type="auto" if kind == NONE else kind,
    )  # fmt: skip
    loaders = open_loaders(open_data(root, root, settings, 3), settings, ALONE, batch_size_per_device=images)
    if kind == NONE:
        loaders.train_batches.start(1)
        yield from cycle([next(iter(loaders.train))])
    for epoch in range(1, sys.maxsize):
        loaders.train_batches.start(epoch)
        yield from loaders.train


def train(root: Path, kind: str, workers: int, images: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step: waiting for its batch, launching, and the whole step."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    import simulated_accelerator

    simulated_accelerator.install()
    device = simulated_accelerator.accelerator()
    found: dict[str, list[float]] = {"wait": [], "launch": [], "step": []}
    made, behind = batches(root, kind, workers, images), 0.0
    for number in range(WARM_UP + steps):
        asked = time.perf_counter()
        next(made)
        came = time.perf_counter()
        for _ in range(LAUNCHES):
            device.launch(KERNEL_SECONDS, LAUNCH_SECONDS)
        launched = time.perf_counter()
        device.wait_until(behind)  # a step ahead of the device, no more, or its queue would be full
        behind = device.idle_from()
        if number >= WARM_UP:
            ended = time.perf_counter()
            for name, seconds in (("wait", came - asked), ("launch", launched - came), ("step", ended - asked)):
                found[name].append(seconds)
    made.close()
    return found


def in_a_process(root: Path, kind: str, options: argparse.Namespace) -> dict[str, list[float]]:
    numbers = [str(value) for value in (options.workers, options.images, options.steps)]
    command = [sys.executable, __file__, "--train", str(root), kind, *numbers]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return found


def row(
    kind: str, rounds: Sequence[dict[str, list[float]]], alone: Sequence[dict[str, list[float]]]
) -> tuple[str, ...]:
    launches, waits, steps = (
        1000 * np.concatenate([one[name] for one in rounds]) for name in ("launch", "wait", "step")
    )
    means = [[statistics.fmean(one["launch"]) for one in each] for each in (rounds, alone)]
    delay = "-" if rounds is alone else "{:.3f} ({:.3f} to {:.3f})".format(*ratio(*means))
    return (
        "one batch over and over" if kind == NONE else kind,
        f"{np.median(launches):.1f}",
        f"{launches.mean():.1f}",
        f"{np.percentile(launches, 90):.1f}",
        f"{launches.max():.0f}",
        delay,
        f"{np.median(waits):.1f}",
        f"{steps.mean():.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--images", type=int, default=64, help="of a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        root, kind, *numbers = options.train
        print(json.dumps(train(Path(root), kind, *map(int, numbers))))
        return
    print(machine(1))
    print(
        f"{options.workers} workers, {options.images} images a step, {options.rounds} rounds of {options.steps} steps"
    )
    rounds: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "small"
        write_images(root, SMALL, 256, 1024)
        for number in range(options.rounds):
            for kind in [*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]]:
                rounds[kind].append(in_a_process(root, kind, options))
            progress(f"round {number + 1} of {options.rounds}")
    head = ("data workers", "launch, ms", "mean", "90 % below", "longest", "x alone, of means", "wait, ms", "step, ms")
    print(table([head, *(row(kind, done, rounds[NONE]) for kind, done in rounds.items())]))


if __name__ == "__main__":
    main()
