"""Item 10: images a second and MFU of distillation, teacher online and from a filled cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from training.engine.probe import RepeatedBatch
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation
from training.tasks.students import Student

from tests.gpu.bench import Bench, Engine, seconds_a_step
from tests.gpu.clocks import host_milliseconds
from tests.gpu.outcomes import NotChecked, Result

EPOCH = 32
"""Steps of an epoch; with a cache each one begins with a look at its records."""


def distillation(bench: Bench, result: Result, *, batch: int, mode: str) -> None:
    """One batch over and over, so that no input side is in it.

    Args:
        mode: eager, compiled, or reduce-overhead: compiled into CUDA graphs, which the kit has no setting for.
    """
    sizes, size = bench.sizes, bench.sizes.throughput_batch or batch
    compile_models = mode != "eager"
    settings = bench.settings(
        student=sizes.student.name,
        global_batch_size=size,
        compile=compile_models,
        compile_teacher=compile_models,
        num_workers=2,
        teacher_cache=TeacherCacheSettings(views=1),
    )
    with bench.compiling(**({"mode": mode} if mode == "reduce-overhead" else {})):
        teacher = bench.teacher(sizes.teacher, compile=compile_models)
        engine = bench.engine(settings, bench.noise(EPOCH * size), bench.model(sizes.student), teacher)
        pixels = torch.zeros(1, 3, sizes.image_size, sizes.image_size, dtype=torch.uint8)
        engine.run.arithmetic.count(pixels, [engine.state.counted], teacher.counted)
        fresh, cached = engine.loaders, engine.task
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        engine.task = Distillation([Student(engine.state.trained, settings)], teacher, timeline=engine.run.timeline)
        result.rows.append(_measured(bench, engine, batch, mode, "online"))
        engine.loaders, engine.task = fresh, cached
        steps = engine.steps()  # fills the cache
        for _ in range(EPOCH):
            next(steps)
        steps.close()
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        computed = cached.cache.misses
        result.rows.append(_measured(bench, engine, batch, mode, "cached"))
    result.expect(cached.cache.misses == computed, "the filled cache holds every record")
    about = engine.run.arithmetic.about()
    result.expect(len(about.get("gflop_an_image", ())) == 1, f"operations are counted ({about['why_no_mfu']})")
    if bench.is_gpu:
        peaks = ", ".join(f"{peak:g} in {name}" for name, peak in about.get("peak_tflops", {}).items())
        result.figures |= {"peak, TFLOP/s": peaks or about["why_no_mfu"]}
        result.figures |= {"source of the peak": about["peak_source"]} if "peak_source" in about else {}


def convolutions(bench: Bench, result: Result) -> None:
    """A convolutional model on labels alone, with the algorithms that cuDNN takes by itself, and with those that it found to be the fastest."""
    sizes = bench.sizes
    for timed in (False, True):
        settings = bench.settings(
            student=sizes.encoder.name,
            hard_label_weight=1.0,
            global_batch_size=sizes.large_batch,
            cudnn_benchmark=timed,
        )
        engine = bench.engine(settings, bench.noise(EPOCH * sizes.large_batch), bench.model(sizes.encoder), None)
        pixels = torch.zeros(1, 3, sizes.image_size, sizes.image_size, dtype=torch.uint8)
        engine.run.arithmetic.count(pixels, [engine.state.counted])
        engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
        row = _measured(bench, engine, sizes.large_batch, "eager", "labels alone")
        result.rows.append({"cudnn_benchmark": timed, **row})
    bench.require_gpu("a comparison of speeds")


def fp8_teacher(bench: Bench, result: Result) -> None:
    """The kit has none."""
    raise NotChecked("not built: the kit has no fp8 teacher")


def _measured(bench: Bench, engine: Engine, batch: int, mode: str, logits: str) -> dict[str, Any]:
    """A row of the table."""
    steps = engine.steps()
    first = host_milliseconds(lambda: (next(steps), bench.synchronize()))
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = seconds_a_step(bench, steps, 5, 10)
    steps.close()
    size, arithmetic = engine.run.settings.global_batch_size, engine.run.arithmetic
    done = arithmetic.window(size, size if logits == "online" else 0, seconds, 1)
    return {
        "batch": batch,
        "models": mode,
        "logits": logits,
        "images/s": size / seconds,
        "ms a step": seconds * 1000,
        "MFU": done.get("mfu"),
        "GFLOP an image": done["tflops"] * 1000 * seconds / size if done else None,
        "peak memory, GiB": torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.is_gpu else None,
        "first step, s": first / 1000,
    }
