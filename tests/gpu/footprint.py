"""Item 6: the memory that the kit predicts, beside the peak of PyTorch's allocator."""

from __future__ import annotations

from typing import Any

import torch
from training.data import loaders
from training.engine import memory
from training.engine.memory_trial import StepTrial
from training.tasks.distillation import with_teacher
from training.tasks.segmentation import Segmentation

from tests.gpu.bench import Bench, Engine
from tests.gpu.outcomes import Result
from tests.gpu.scripts import make_channels, run_script, settings_of

TOLERANCE = 0.15

STEPS = 4
"""After the first."""


def classifier(bench: Bench, result: Result) -> None:
    """A student on labels alone."""
    size = bench.sizes.large_batch
    settings = bench.settings(global_batch_size=size, hard_label_weight=1.0, ema_decay=0.999, num_workers=2)
    data = bench.noise(8 * size)
    engine = bench.engine(settings, data, bench.model(bench.sizes.student), None)
    now, _ = memory.measure([engine.state], data)
    _compare(bench, result, engine, now, data, size)


def distillation(bench: Bench, result: Result) -> None:
    """A student and a teacher that runs at every step."""
    size = bench.sizes.large_batch
    settings, data = bench.settings(global_batch_size=size, num_workers=2), bench.noise(8 * size)
    teacher = bench.teacher(bench.sizes.teacher)
    engine = bench.engine(settings, data, bench.model(bench.sizes.student), teacher)
    now, without = memory.measure([engine.state], data)
    now, _ = with_teacher(now, without, teacher, settings, memory.example(data, bench.device))
    _compare(bench, result, engine, now, data, size)


def segmentation(bench: Bench, result: Result) -> None:
    """A convolutional encoder with a decoder, on masks alone."""
    settings = bench.segmentation_settings()
    size = settings.global_batch_size
    data = bench.masked_noise(8 * size)

    def task(state: Any, run: Any) -> Segmentation:
        return Segmentation(state.trained, None, settings, bench.world(), run.timeline)

    engine = bench.engine(settings, data, bench.segmenter(bench.sizes.encoder), None, make_task=task)
    now, _ = memory.measure([engine.state], data)
    _compare(bench, result, engine, now, data, size)


def automatic(bench: Bench, result: Result) -> None:
    """train_kd.py with more images than fit: it chooses how many to process at once, and does not run out of memory."""
    from training.engine import fitting

    sizes, chosen = bench.sizes, []

    def open_loaders(*arguments: Any, **options: Any) -> Any:
        chosen.append(options["batch_size_per_device"])
        return loaders.open_loaders(*arguments, **options)

    fitting.open_loaders = open_loaders
    make_channels(bench, sizes.teacher, images=sizes.auto_batch)
    settings = settings_of(
        bench,
        sizes.student,
        global_batch_size=sizes.auto_batch,
        batch_size_per_device="auto",
        max_steps=2,
        num_workers="auto",
        log_every=1,
    )
    run_script(bench, result, "train_kd", settings, 2)
    result.figures |= {"global batch": sizes.auto_batch, "images at once": chosen[0]}
    bench.require_gpu("the memory that it takes")
    _, total = torch.cuda.mem_get_info(bench.device)
    held = torch.cuda.max_memory_allocated(bench.device)
    result.figures |= {
        "held at most, GiB": held / 2**30,
        "reserved at most, GiB": torch.cuda.max_memory_reserved(bench.device) / 2**30,
        "memory, GiB": total / 2**30,
        "allocations tried again": torch.cuda.memory_stats(bench.device)["num_alloc_retries"],
    }
    result.expect(
        held > total / 4, "it uses more than a quarter of the memory: the next larger divisor might be twice as large"
    )


def _compare(bench: Bench, result: Result, engine: Engine, kept: memory.Footprint, data: Any, images: int) -> None:
    if bench.is_gpu:
        trial = StepTrial(engine.task, [engine.state], data, kept.optimizer)
        now, _ = memory.as_tried(kept, {}, trial, images)
    else:
        now = kept
    predicted = now.step(images)
    result.figures |= {
        "images at once": images,
        "predicted, GiB": predicted / 2**30,
        "an image, MiB": max(now.activations, now.teacher_activations) / 2**20,
        "of which the forward pass keeps, MiB": max(kept.activations, kept.teacher_activations) / 2**20,
        "workspace, MiB": now.workspace / 2**20,
    }
    steps = engine.steps()
    next(steps)  # sets up the optimizer's state
    bench.synchronize()
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    for _ in range(STEPS):
        next(steps)
    bench.synchronize()
    bench.require_gpu("the memory that it takes")
    held = torch.cuda.max_memory_allocated(bench.device)
    result.figures |= {"held at most, GiB": held / 2**30, "predicted / held": predicted / held}
    result.expect(abs(predicted / held - 1) <= TOLERANCE, f"the prediction is within {TOLERANCE:.0%} of what was held")
