"""Item 9: a step on one repeated batch, and on JPEGs that workers of each kind decode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.profiler import ProfilerActivity, profile
from training.data.loaders import Loaders, open_loaders
from training.data.views import open_data
from training.engine.probe import RepeatedBatch
from training.measure.operators import summarise

from tests.gpu import pictures
from tests.gpu.bench import Bench, seconds_per_step
from tests.gpu.outcomes import Result

PROFILED = 5

SLACK = 1.05
"""By how much one repeated batch may be slower than fresh images: noise."""


def speeds(bench: Bench, result: Result) -> None:
    """Images/s and the GPU's idle share for a ViT student on labels alone, which has the shortest step."""
    sizes, classes = bench.sizes, min(bench.sizes.classes, 4)
    root = pictures.labelled(bench.folder / "train", sizes.photographs, classes, sizes.photograph)
    settings = bench.settings(
        student=sizes.student.name,
        hard_label_weight=1.0,
        global_batch_size=sizes.large_batch,
        image_size=sizes.image_size,
        min_crop_area=0.25,
        horizontal_flip=True,
    )
    data = open_data(root, root, settings, 3)
    engine = bench.engine(settings, data, bench.model(sizes.student), None)
    fresh = engine.loaders
    engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
    steps, images = engine.steps(), sizes.large_batch
    best = seconds_per_step(bench, steps, 5, 10)
    busy = kernel_seconds(bench, steps) if bench.is_gpu else None
    steps.close()
    result.rows.append(_row("one batch over and over", 0, best, images, busy, None))
    for kind in ("threads", "processes", "loader"):
        chosen = replace(settings, worker_type=kind)
        engine.loaders = open_loaders(data, chosen, bench.world(), batch_size_per_device=images)
        alone = images / _seconds_per_batch(engine.loaders, sizes.seconds)
        steps = engine.steps()
        seconds = seconds_per_step(bench, steps, 5, 10, engine.loaders.crowd)
        steps.close()
        result.rows.append(_row(kind, engine.loaders.workers.count, seconds, images, busy, alone))
    result.figures["decoder"] = data.notes[0]
    fastest = max(row["images/s"] for row in result.rows[1:])
    result.figures["best input's share of one batch's speed"] = fastest / result.rows[0]["images/s"]
    bench.require_gpu("a comparison of speeds")
    result.expect(
        fastest <= result.rows[0]["images/s"] * SLACK, "one batch over and over is at least as fast as fresh images"
    )


def _seconds_per_batch(loaders: Loaders, least: float) -> float:
    """Mean seconds to make a batch while nothing else runs.

    Args:
        least: seconds that are measured.
    """
    batches, crowd = _on_and_on(loaders), max(loaders.crowd, 1)
    for _ in range(max(5, crowd)):
        next(batches)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < least or count < 2 * crowd or count % crowd:
        next(batches)
        count += 1
    taken = (time.perf_counter() - started) / count
    batches.close()
    return taken


def _on_and_on(loaders: Loaders) -> Iterator[Any]:
    """Batches of one epoch after another."""
    epoch = 0
    while True:
        epoch += 1
        loaders.train_batches.start(epoch, 0)
        yield from loaders.train


def _row(
    what: str, workers: int, seconds: float, images: int, busy: float | None, alone: float | None
) -> dict[str, Any]:
    return {
        "input": what,
        "workers": workers,
        "images/s": images / seconds,
        "ms a step": seconds * 1000,
        "GPU idle": None if busy is None else max(0.0, 1 - busy / seconds),
        "input alone, images/s": alone,
    }


def kernel_seconds(bench: Bench, steps: Any) -> float:
    """Busy seconds of the GPU per step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            next(steps)
        bench.synchronize()
    return float(summarise(recorded, PROFILED)["seconds"])
