"""Items 7 and 8: which kernels run, what the operator table counts, and what torch.compile recompiles."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from training.data.loaders import held_out_loader
from training.measure.operators import summarise
from training.tasks.evaluation import evaluate

from tests.gpu.bench import Bench
from tests.gpu.outcomes import Result

STEPS = 5

ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
"""PyTorch's operators for flash attention; cuDNN has its own on Hopper."""

SLOWER_ATTENTION = ("_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention")


def fused(bench: Bench, result: Result) -> None:
    """Flash attention in both models, one kernel for AdamW, and operators that take no longer than the wall clock."""
    sizes = bench.sizes
    settings = bench.settings(student=sizes.student.name, num_workers=2)
    data = bench.noise(4 * STEPS * sizes.batch)
    engine = bench.engine(settings, data, bench.model(sizes.student), bench.teacher(sizes.teacher))
    steps = engine.steps()
    for _ in range(STEPS):
        next(steps)
    bench.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        bench.synchronize()
        wall = (time.perf_counter() - started) / STEPS
    calls = {event.key: event.count for event in recorded.key_averages()}
    found = summarise(recorded, STEPS)
    result.rows += [
        {name: row[name] for name in ("name", "calls", "seconds", "share")} for row in found["operators"][:10]
    ]
    result.figures |= {
        "flash attention, calls a step": _calls(calls, ATTENTION),
        "slower attention, calls a step": _calls(calls, SLOWER_ATTENTION),
        "fused AdamW, calls a step": _calls(calls, ("_fused_adamw_",)),
        "operators together, ms a step": found["seconds"] * 1000,
        "wall, ms a step": wall * 1000,
        "table is of the": found["device"],
    }
    result.expect(_calls(calls, ("_fused_adamw_",)) >= 1, "AdamW's step is one fused operator")
    bench.require_gpu("flash attention, and kernel times")
    blocks = len(engine.state.model.model.blocks) + len(engine.task.teacher.members[0].model.model.blocks)
    result.figures["blocks of both models"] = blocks
    result.expect(_calls(calls, ATTENTION) == blocks, "every block of both models runs flash attention")
    result.expect(_calls(calls, SLOWER_ATTENTION) == 0, "no block runs a slower attention")
    result.expect(found["device"] == "GPU", "the table is of the GPU's kernels")
    result.expect(found["seconds"] <= wall * 1.02, "the operators take no longer than the wall's clock")


def compiled(bench: Bench, result: Result) -> None:
    """A compiled teacher after a ragged evaluation, and a compiled student around one: nothing is recompiled."""
    sizes = bench.sizes
    settings = bench.settings(student=sizes.shallow_student.name, compile=True, num_workers=2)
    student, size = bench.model(sizes.shallow_student), sizes.batch
    world, ragged = bench.world(), bench.noise(2 * size + size // 2)

    def record(moment: str) -> int:
        graphs = _graphs()
        before = sum(row["graphs"] for row in result.rows)
        result.rows.append({"moment": moment, "graphs": graphs - before})
        return graphs - before

    with bench.compiling():
        teacher = bench.teacher(sizes.shallow_teacher, compile=True)
        engine = bench.engine(settings, bench.noise(20 * size), student, teacher)
        held_out = held_out_loader(ragged.held_out, size, engine.loaders.workers, world, ragged.collate_held_out)
        evaluate(teacher, held_out, world)
        in_evaluation = record("the teacher's ragged evaluation")
        steps = engine.steps()
        for _ in range(4):
            next(steps)
        record("four steps")
        evaluate(engine.state.evaluated, held_out, world, autocast=engine.state.precision.autocast)
        in_between = record("the student's ragged evaluation")
        for _ in range(4):
            next(steps)
        later = record("four more steps")
        images = torch.zeros(2 * size, 3, sizes.image_size, sizes.image_size, dtype=torch.uint8, device=bench.device)
        teacher(images)
        larger = record("the teacher's first batch of twice the size")
        bench.synchronize()
    result.expect(in_evaluation == 1, "the ragged evaluation compiles the teacher once")
    result.expect(in_between == 0, "the student's evaluation compiles nothing")
    result.expect(later == 0, "steps after an evaluation compile nothing")
    result.expect(larger >= 1, "the teacher's graph is for one batch size: no other one fits it")


def _graphs() -> int:
    """Graphs that torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def _calls(calls: dict[str, Any], names: tuple[str, ...]) -> float:
    """Calls per step of operators, by the end of their names."""
    return sum(count for key, count in calls.items() if key.removeprefix("aten::") in names) / STEPS
