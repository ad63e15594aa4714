"""Items 3 and 4: the host never waits for the GPU within a step, and the stop flag's answer does not wait for later work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from training.data.dali.pipeline import ReadBatch
from training.data.dali.views import ViewsByDali
from training.data.views import open_data
from training.settings.distillation import TeacherCacheSettings
from training.tasks.segmentation import Segmentation
from training.teacher.frozen import FrozenModel, Teacher

from tests.gpu import pictures
from tests.gpu.bench import Bench, Engine
from tests.gpu.clocks import host_milliseconds, queue_sleep
from tests.gpu.groups import one_rank
from tests.gpu.outcomes import Result
from tests.gpu.scripts import has_dali

WARM_UP, STEPS = 4, 5

ASLEEP = 500.0
"""Milliseconds that the GPU is busy while the host runs a step: far more than the host needs for a step of the shallow models."""

BUSY = "a step behind a busy GPU"

TRIES = 3
"""The minimum of these counts: the first may still allocate pinned memory, which waits for the device."""


def distillation(bench: Bench, result: Result) -> None:
    """Online distillation with averaged weights, on batches from workers of each kind."""
    for kind in ("processes", "threads", "loader"):
        _never_waits(bench, result, _distillation(bench, worker_type=kind).steps(), f"batches by {kind}")
    bench.require_gpu(BUSY)


def filling_distillation(bench: Bench, result: Result) -> None:
    """Distillation that fills a cache: the logits are copied and written in the background."""
    engine = _distillation(bench, teacher_cache=TeacherCacheSettings(views=1))
    _never_waits(bench, result, engine.steps(), "filling the cache")
    result.expect(engine.task.cache.hits == 0, "every step fills the cache")
    bench.require_gpu(BUSY)


def cached_distillation(bench: Bench, result: Result) -> None:
    """Distillation on a filled cache: the first epoch fills it."""
    engine = _distillation(bench, teacher_cache=TeacherCacheSettings(views=1))
    steps = engine.steps()
    for _ in range(len(engine.loaders.train_batches)):
        next(steps)
    misses = engine.task.cache.misses
    _never_waits(bench, result, steps, "filled cache")
    result.figures |= {"records found": engine.task.cache.hits, "records computed": misses}
    result.expect(engine.task.cache.misses == misses, "the filled cache holds every record")
    bench.require_gpu(BUSY)


def grouped_distillation(bench: Bench, result: Result) -> None:
    """Distillation under DistributedDataParallel, asking after every step whether to stop."""
    with one_rank(bench) as world:
        engine = _distillation(bench, world=world)

        def steps() -> Iterator[None]:
            for _ in engine.steps():
                engine.run.stop.agreed()
                yield

        # waiting for the answer of two steps before is by design, so a long kernel may hold up the host
        _never_synchronizes(bench, result, steps())
        engine.run.stop.finish()


def segmentation(bench: Bench, result: Result) -> None:
    """A segmenter that learns from masks and a teacher of pixels, with Dice loss."""
    settings = bench.segmentation_settings(dice_weight=1.0, hard_label_weight=0.5)

    def task(state: Any, run: Any) -> Segmentation:
        teacher = Teacher(
            [
                FrozenModel(
                    bench.segmenter(bench.sizes.shallow_encoder),
                    settings.model,
                    settings.model_options,
                    precision="bf16",
                )
            ]
        )
        return Segmentation(state.trained, teacher.to(bench.device), settings, bench.world(), run.timeline)

    engine = bench.engine(
        settings, bench.masked_noise(_images(bench)), bench.segmenter(bench.sizes.shallow_encoder), None, make_task=task
    )
    _never_waits(bench, result, engine.steps(), "segmentation")
    bench.require_gpu(BUSY)


def dali(bench: Bench, result: Result) -> None:
    """What is done with DALI's pixels; and whole steps on DALI's batches if it is installed."""
    varied = {"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.25, "min_crop_area": 0.5}
    sizes = bench.sizes
    student = sizes.shallow_student
    settings = bench.settings(student=student.name, image_size=sizes.image_size, num_workers=2, **varied)
    root = pictures.labelled(bench.folder / "train", _images(bench), 4, sizes.photograph)
    _finish_never_waits(bench, result, ViewsByDali(open_data(root, root, settings, 3).training))
    if not has_dali():
        result.left_out.append("whole steps on DALI's batches: nvidia.dali is not installed")
        return
    settings = replace(settings, preprocessing="dali")
    data = open_data(root, root, settings, 3)
    engine = bench.engine(settings, data, bench.model(student), bench.teacher(sizes.shallow_teacher))
    _comes_back_early(bench, result, engine.steps(), "DALI's batches")
    bench.require_gpu(BUSY)


def stop_flag(bench: Bench, result: Result) -> None:
    """The answer comes once the work before the question is done, however much was queued after it."""
    with one_rank(bench) as world:
        for flag in (False, True):
            result.expect(world.any_async(flag)() is flag, f"the answer to {flag} is {flag}")
        bench.require_gpu("work that is queued after the question")
        times = []
        for _ in range(TRIES):
            torch.cuda.synchronize()
            queue_sleep(20)
            ask = world.any_async(True)
            queue_sleep(2 * ASLEEP)
            times.append(host_milliseconds(lambda ask=ask: result.expect(ask(), "the answer to True is True")))
            torch.cuda.synchronize()
        result.figures |= {"work before it, ms": 20, "work after it, ms": 2 * ASLEEP, "answered after, ms": max(times)}
        result.expect(max(times) < ASLEEP, "the answer came before the later work ended")


def _images(bench: Bench) -> int:
    """Of an epoch that is long enough for all steps of a check."""
    return (WARM_UP + STEPS + TRIES * 2 + 2) * bench.sizes.batch


def _distillation(bench: Bench, *, world: Any = None, **values: Any) -> Engine:
    sizes = bench.sizes
    settings = bench.settings(student=sizes.shallow_student.name, ema_decay=0.99, num_workers=2, **values)
    teacher = bench.teacher(sizes.shallow_teacher)
    data = bench.noise(_images(bench))
    return bench.engine(settings, data, bench.model(sizes.shallow_student), teacher, world=world)


def _never_waits(bench: Bench, result: Result, steps: Iterator[None], what: str) -> None:
    """No synchronising call, and no copy from pageable memory, which holds up the host only behind a busy GPU."""
    _never_synchronizes(bench, result, steps)
    _comes_back_early(bench, result, steps, what)


def _never_synchronizes(bench: Bench, result: Result, steps: Iterator[None]) -> None:
    for _ in range(WARM_UP):
        next(steps)
    bench.synchronize()
    with _no_synchronisation(bench):
        for _ in range(STEPS):
            next(steps)
    result.figures["steps without synchronisation"] = result.figures.get("steps without synchronisation", 0) + STEPS


def _comes_back_early(bench: Bench, result: Result, steps: Iterator[None], what: str) -> None:
    """The host runs a whole step while the GPU is still busy with earlier work; nothing on the CPU."""
    for _ in range(2):
        next(steps)
    if not bench.is_gpu:
        return
    times = []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        queue_sleep(ASLEEP)
        times.append(host_milliseconds(partial(next, steps)))
        torch.cuda.synchronize()
    result.rows.append(
        {"steps": what, "GPU busy before, ms": ASLEEP, "host's step, ms": min(times), "slowest try, ms": max(times)}
    )
    result.expect(min(times) < ASLEEP / 2, f"{what}: the host comes back from a step before the GPU begins with it")


def _finish_never_waits(bench: Bench, result: Result, recipe: ViewsByDali) -> None:
    """Making a batch of DALI's pixels, given pixels on the device."""
    draws = [(1, number) for number in range(bench.sizes.batch)]
    drawn = [*map(recipe.begin_batch(frozenset()), draws)]
    items = [*{id(item): item for one in drawn for item in one.items}.values()]
    side = bench.sizes.image_size
    pixels = torch.zeros(len(items), 3, side, side, dtype=torch.uint8, device=bench.device)

    def finish() -> None:
        made = recipe.finish(ReadBatch(draws, drawn, items), pixels.clone())
        result.expect(made.images.device == pixels.device, "the batch stays on the device")

    finish()
    bench.synchronize()
    with _no_synchronisation(bench):
        finish()
    if bench.is_gpu:
        queue_sleep(ASLEEP)
        taken = host_milliseconds(finish)
        torch.cuda.synchronize()
        result.figures["host's hand-over behind a busy GPU, ms"] = taken
        result.expect(taken < ASLEEP / 2, "the hand-over does not wait for a busy GPU")


@contextmanager
def _no_synchronisation(bench: Bench) -> Iterator[None]:
    """Every synchronising CUDA call of PyTorch raises; nothing on the CPU."""
    if not bench.is_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
