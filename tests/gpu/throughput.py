"""Item 10: images a second and MFU of distillation, teacher online and from a filled cache."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training.engine.probe import RepeatedBatch
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation
from training.tasks.students import Student

from tests.gpu import machine
from tests.gpu.bench import Bench, seconds_a_step
from tests.gpu.clocks import host_milliseconds
from tests.gpu.outcomes import NotChecked, Result

EPOCH = 32
"""Steps of an epoch; with a cache each one begins with a look at its records."""

COUNTED = 2
"""Images of the passes whose floating-point operations are counted."""


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
        operations = {"online": _of_teacher(bench) + _of_student(bench), "cached": _of_student(bench)}
        fresh, cached = engine.loaders, engine.task
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        engine.task = Distillation([Student(engine.state.trained, settings)], teacher, timeline=engine.run.timeline)
        result.rows.append(_measured(bench, engine, batch, mode, "online", operations["online"]))
        engine.loaders, engine.task = fresh, cached
        steps = engine.steps()  # fills the cache
        for _ in range(EPOCH):
            next(steps)
        steps.close()
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        computed = cached.cache.misses
        result.rows.append(_measured(bench, engine, batch, mode, "cached", operations["cached"]))
    result.expect(cached.cache.misses == computed, "the filled cache holds every record")
    if bench.is_gpu:
        name = torch.cuda.get_device_name(bench.device)
        known = machine.peak(name)
        result.figures |= {"peak, TFLOP/s": known[0] / 1e12 if known else f"not known for {name}"}
        result.figures |= {"source of the peak": known[1]} if known else {}


def fp8_teacher(bench: Bench, result: Result) -> None:
    """The kit has none."""
    raise NotChecked("not built: the kit has no fp8 teacher")


def _measured(bench: Bench, engine: Any, batch: int, mode: str, logits: str, operations: float) -> dict[str, Any]:
    """A row of the table."""
    steps = engine.steps()
    first = host_milliseconds(lambda: (next(steps), bench.synchronize()))
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = seconds_a_step(bench, steps, 5, 10)
    steps.close()
    size = engine.run.settings.global_batch_size
    known = machine.peak(torch.cuda.get_device_name(bench.device)) if bench.is_gpu else None
    return {
        "batch": batch,
        "models": mode,
        "logits": logits,
        "images/s": size / seconds,
        "ms a step": seconds * 1000,
        "MFU": size / seconds * operations / known[0] if known else None,
        "GFLOP an image": operations / 1e9,
        "peak memory, GiB": torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.is_gpu else None,
        "first step, s": first / 1000,
    }


def _of_teacher(bench: Bench) -> float:
    """Floating-point operations of the teacher's forward pass over an image; a multiplication and an addition are two."""
    return _counted(bench, bench.sizes.teacher, backward=False)


def _of_student(bench: Bench) -> float:
    """Likewise of the student's forward and backward passes."""
    return _counted(bench, bench.sizes.student, backward=True)


def _counted(bench: Bench, chosen: Any, *, backward: bool) -> float:
    """As products: a fused attention kernel may lack a formula in FlopCounterMode."""
    model = bench.model(chosen).to(bench.device)
    images = torch.zeros(
        COUNTED, 3, bench.sizes.image_size, bench.sizes.image_size, dtype=torch.uint8, device=bench.device
    )
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, contextlib.nullcontext() if backward else torch.no_grad():
        logits = model(images)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() / COUNTED
