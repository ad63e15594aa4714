"""Items 3 and 10: copies and the teacher's pass by streams of their own, `copy_stream` and `teacher_stream`: their order, and what they bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from training.engine.probe import RepeatedBatch
from training.teacher.frozen import Teacher

from tests.gpu.bench import Bench, Engine, Model, seconds_per_step
from tests.gpu.outcomes import Result
from tests.gpu.throughput import LEARNING, SAME
from tests.gpu.turns import ROUNDS

STREAMS: dict[str, dict[str, bool]] = {
    "none": {},
    "copies": {"copy_stream": True},
    "copies and the teacher": {"copy_stream": True, "teacher_stream": True},
}
"""What has a stream of its own."""

STEPS, IMAGES = 5, 4096


def ordered(bench: Bench, result: Result) -> None:
    """Whole steps under torch's own sanitizer, which knows which kernel of which stream uses what memory
    (https://docs.pytorch.org/docs/stable/cuda._sanitizer.html)."""
    sizes = bench.sizes
    teacher = bench.teacher(sizes.shallow_teacher)
    engine = _engine(bench, sizes.shallow_student, teacher, sizes.batch, STREAMS["copies and the teacher"])
    steps = engine.steps()
    next(steps)
    bench.synchronize()
    bench.require_gpu("torch's sanitizer of streams")
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # until this check's process ends
    for _ in range(STEPS):
        next(steps)
    bench.synchronize()
    result.figures["steps without a race"] = STEPS
    values, other = torch.zeros(1 << 20, device=bench.device), torch.cuda.Stream()
    try:
        with torch.cuda.stream(other):
            values += 1
    except _sanitizer.CUDASanitizerErrors:
        result.figures["a race that was planted"] = "found"
    result.expect("a race that was planted" in result.figures, "the sanitizer finds a stream that waits for nothing")


def speeds(bench: Bench, result: Result, *, batch: int) -> None:
    """Steps on one batch, which is copied anew each time, in turns; and that models learn the same, as far as two runs do. All have one
    teacher, which is built and compiled once."""
    sizes, size, learned = bench.sizes, bench.sizes.throughput_batch or batch, dict[str, torch.Tensor]()
    running: dict[str, Iterator[None]] = {}
    with bench.compiling():
        teacher = bench.teacher(sizes.teacher, compile=True)
        for name, values in STREAMS.items():
            compiled = {"compile": True, "compile_teacher": True, **values}
            engine = _engine(bench, sizes.student, teacher, size, compiled)
            engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
            running[name] = engine.steps()
            for _ in range(LEARNING):
                next(running[name])
            bench.synchronize()
            learned[name] = torch.cat([value.detach().flatten() for value in engine.state.model.parameters()]).cpu()
        found: dict[str, list[float]] = {name: [] for name in STREAMS}
        held = dict.fromkeys(STREAMS, 0)
        for _ in range(ROUNDS):
            for name, steps in running.items():
                before = _reset_peak(bench)
                found[name].append(seconds_per_step(bench, steps, 2, 5))
                if bench.is_gpu:
                    held[name] = max(held[name], torch.cuda.max_memory_allocated(bench.device) - before)
    for name, seconds in found.items():
        took = median(seconds)
        ratio = median(own / plain for own, plain in zip(seconds, found["none"]))
        row = {"batch": batch, "streams of": name, "images/s": size / took, "ms a step": took * 1000}
        result.rows.append({**row, "times that of none": ratio, "GiB a step": held[name] / 2**30})
    start = torch.cat([value.detach().flatten() for value in bench.model(sizes.student).parameters()])
    change = (learned["none"] - start).norm()
    for name in [*STREAMS][1:]:
        off = float((learned[name] - learned["none"]).norm() / change)
        result.figures[f"{batch}, {name}: off after {LEARNING} steps, as a share of what they changed"] = off
        result.expect(off < SAME, f"with streams of {name}, a model learns what it learns without")
    bench.require_gpu("a comparison of speeds")


def _reset_peak(bench: Bench) -> int:
    """Bytes that tensors take now, from which the peak is counted."""
    if not bench.is_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats(bench.device)
    return int(torch.cuda.memory_allocated(bench.device))


def _engine(bench: Bench, student: Model, teacher: Teacher, images: int, values: dict[str, Any]) -> Engine:
    """Of a teacher that answers on every step."""
    settings = bench.settings(student=student.name, global_batch_size=images, num_workers=2, **values)
    return bench.engine(settings, bench.noise(IMAGES), bench.model(student), teacher)
