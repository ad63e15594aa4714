"""Item 10: images/s and MFU of distillation, with the teacher online and from a filled cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from training.engine.probe import RepeatedBatch
from training.measure.arithmetic import Arithmetic
from training.models import fp8
from training.models.compiled import StaticBatch
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation
from training.tasks.segmentation import Segmentation
from training.tasks.students import Student
from training.teacher.frozen import Teacher

from tests.gpu.bench import Bench, Engine, seconds_per_step
from tests.gpu.clocks import device_milliseconds, host_milliseconds
from tests.gpu.groups import one_rank
from tests.gpu.outcomes import NotChecked, Result

MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False, "cuda_graphs": False},
    "compiled": {"compile": True, "cuda_graphs": False},
    "reduce-overhead": {"compile": True, "cuda_graphs": True},
}
"""How the models run, by torch's name for the last."""

EPOCH = 32
"""Steps per epoch; with a cache, each epoch begins with a look at its records."""

LEARNING, SAME = 20, 0.2
"""Steps after which weights are compared, and how far they may differ: AdamW turns a rounded sign of a tiny gradient into a whole step."""

FP8_OFF = 0.25
"""How far the logits of random weights may be apart: 3 bits of fraction are off by 3.6 % in each product, and a ViT-L has 96."""


def distillation(bench: Bench, result: Result, *, batch: int, mode: str) -> None:
    """One repeated batch, so that it excludes the input side.

    Args:
        mode: of MODES.
    """
    sizes, size = bench.sizes, bench.sizes.throughput_batch or batch
    settings = bench.settings(
        student=sizes.student.name,
        global_batch_size=size,
        num_workers=2,
        teacher_cache=TeacherCacheSettings(views=1),
        **MODES[mode],
    )
    with bench.compiling():
        teacher = bench.teacher(sizes.teacher, **MODES[mode])
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
    result.expect(len(about.get("gflop_per_image", ())) == 1, f"operations are counted ({about['why_no_mfu']})")
    if bench.is_gpu:
        peaks = ", ".join(f"{peak:g} in {name}" for name, peak in about.get("peak_tflops", {}).items())
        result.figures |= {"peak of MFU, TFLOP/s": peaks or about["why_no_mfu"]}
        if "peak_source" in about:
            result.figures |= {"source of the peak": f"{about['peak_source']}, {about['peak_date']}"}


def convolutions(bench: Bench, result: Result) -> None:
    """A convolutional model on labels alone, with the algorithms that cuDNN chooses by default, and with those that it found to be fastest;
    then compiled."""
    sizes = bench.sizes
    pixels = torch.zeros(1, 3, sizes.image_size, sizes.image_size, dtype=torch.uint8)
    for mode, timed in (("eager", False), ("eager", True), ("compiled", False), ("reduce-overhead", False)):
        settings = bench.settings(
            student=sizes.encoder.name,
            hard_label_weight=1.0,
            global_batch_size=sizes.large_batch,
            cudnn_benchmark=timed,
            **MODES[mode],
        )
        torch.backends.cudnn.benchmark = timed
        with bench.compiling():
            engine = bench.engine(settings, bench.noise(EPOCH * sizes.large_batch), bench.model(sizes.encoder), None)
            engine.run.arithmetic.count(pixels, [engine.state.counted])
            engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
            row = _measured(bench, engine, sizes.large_batch, mode, "labels alone")
        result.rows.append({"cudnn_benchmark": timed, **row})
    bench.require_gpu("a comparison of speeds")


def segmentation(bench: Bench, result: Result) -> None:
    """A segmenter on masks alone."""
    for mode, chosen in MODES.items():
        settings = bench.segmentation_settings(**chosen)
        size = settings.global_batch_size

        def task(state: Any, run: Any, settings: Any = settings) -> Segmentation:
            return Segmentation(state.trained, None, settings, bench.world(), run.timeline)

        with bench.compiling():
            model, data = bench.segmenter(bench.sizes.encoder), bench.masked_noise(EPOCH * size)
            engine = bench.engine(settings, data, model, None, make_task=task)
            engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
            result.rows.append(_measured(bench, engine, size, mode, "masks alone"))
    bench.require_gpu("a comparison of speeds")


def grouped(bench: Bench, result: Result) -> None:
    """Distillation under DistributedDataParallel, with NCCL if there is a GPU: as it is, compiled, and as CUDA graphs, which must learn
    the same."""
    sizes, learned = bench.sizes, {}
    with one_rank(bench) as world:
        for mode, chosen in MODES.items():
            settings = bench.settings(student=sizes.student.name, global_batch_size=2 * sizes.batch, **chosen)
            with bench.compiling():
                teacher = bench.teacher(sizes.student, **chosen)
                data = bench.noise(EPOCH * 2 * sizes.batch)
                engine = bench.engine(settings, data, bench.model(sizes.student), teacher, world=world)
                engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
                steps = engine.steps()
                for _ in range(LEARNING):
                    next(steps)
                steps.close()
                bench.synchronize()
                learned[mode] = torch.cat([value.detach().flatten() for value in engine.state.model.parameters()]).cpu()
                result.rows.append(_measured(bench, engine, sizes.batch, mode, "online, DDP"))
    start = torch.cat([value.detach().flatten() for value in bench.model(sizes.student).parameters()])
    change = (learned["eager"] - start).norm()
    graphs = float((learned["reduce-overhead"] - learned["compiled"]).norm() / change)
    result.figures["CUDA graphs and compiled models differ by, as a share of what they changed"] = graphs
    for mode in [*MODES][1:]:
        off = float((learned[mode] - learned["eager"]).norm() / change)
        result.figures[f"{mode}: off after {LEARNING} steps, as a share of what they changed"] = off
        result.expect(off < SAME, f"{mode} learns what the models learn as they are")


def fp8_teacher(bench: Bench, result: Result) -> None:
    """The teacher's forward pass alone, with its linear layers in fp8 beside all in bf16."""
    sizes, batches = bench.sizes, (36, 256)
    if (lacking := fp8.unsupported(bench.device)) is not None:
        raise NotChecked(lacking)
    pixels = torch.zeros(1, 3, sizes.image_size, sizes.image_size, dtype=torch.uint8)
    images = torch.randint(
        0, 256, (36, *pixels.shape[1:]), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    teachers = {precision: bench.teacher(sizes.teacher, precision) for precision in ("bf16", "fp8")}
    logits = {precision: teacher(images.to(bench.device)) for precision, teacher in teachers.items()}
    off = float((logits["fp8"] - logits["bf16"]).norm() / logits["bf16"].norm())
    result.figures["logits apart, as a share of their size"] = off
    result.expect(off < FP8_OFF, "fp8 gives about the logits that bf16 gives")
    arithmetic = {precision: Arithmetic(bench.device) for precision in teachers}
    for precision, teacher in teachers.items():
        arithmetic[precision].count(pixels, [], teacher.counted)
    for batch in batches:
        size = sizes.throughput_batch or batch
        beside = torch.zeros(size, *pixels.shape[1:], dtype=torch.uint8, device=bench.device)
        for mode in MODES:
            for precision, teacher in teachers.items():
                row = {"teacher": precision, "models": mode, "batch": batch}
                print("measuring", row, flush=True)  # the log's last line if one takes too long
                with bench.compiling():
                    speed = _forward_speed(_called(teacher, mode), beside)
                mfu = arithmetic[precision].window(0, size, speed["ms"] / 1000, 1).get("mfu")
                result.rows.append({**row, **speed, "MFU": mfu})
    bench.require_gpu("a comparison of speeds")


def _called(teacher: Teacher, mode: str) -> torch.nn.Module:
    """A teacher's only model, as it runs in a mode of MODES."""
    [member] = teacher.members
    if mode == "eager":
        return member.model
    return StaticBatch(member.model, member.name, "compile_teacher", graphs=MODES[mode]["cuda_graphs"])


@torch.no_grad()
def _forward_speed(model: torch.nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Over 20 forward passes, after five."""
    for _ in range(5):
        model(images)
    clock = device_milliseconds if images.device.type == "cuda" else host_milliseconds
    took = clock(lambda: [model(images) for _ in range(20)]) / 20
    return {"ms": took, "images/s": len(images) / took * 1000}


def _measured(bench: Bench, engine: Engine, batch: int, mode: str, logits: str) -> dict[str, Any]:
    """A row of the table."""
    steps = engine.steps()
    first = host_milliseconds(lambda: (next(steps), bench.synchronize()))
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = seconds_per_step(bench, steps, 5, 10)
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
        # the allocator's count here does not include the memory of CUDA graphs
        "peak memory, GiB": torch.cuda.max_memory_allocated(bench.device) / 2**30
        if bench.is_gpu and mode != "reduce-overhead"
        else None,
        "first step, s": first / 1000,
    }
