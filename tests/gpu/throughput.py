"""Item 10: images/s and MFU of distillation, with the teacher online and from a filled cache."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from training.engine.probe import RepeatedBatch
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation
from training.tasks.segmentation import Segmentation
from training.tasks.students import Student

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
        result.figures |= {"source of the peak": about["peak_source"]} if "peak_source" in about else {}


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
    """What an fp8 teacher, which the kit does not have, would gain: the teacher's forward pass with matrices in fp8 by torchao, one scale
    per row, beside that in bf16, both compiled."""
    bench.require_gpu("fp8")
    if importlib.util.find_spec("torchao") is None:
        raise NotChecked("the kit has no fp8 teacher, and torchao, by which its gain is measured, is not installed")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    def has_fp8(module: torch.nn.Module, _name: str) -> bool:
        # its kernels want multiples of 16; a head's few columns gain nothing
        return isinstance(module, torch.nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    sizes, models, logits = bench.sizes, {}, {}
    for precision in ("bf16", "fp8"):
        model = bench.model(sizes.teacher, 1).to(bench.device, torch.bfloat16).eval().requires_grad_(False)
        if precision == "fp8":
            quantize_(model.model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), filter_fn=has_fp8)
        models[precision] = model
    pattern = torch.arange(36 * 3 * sizes.image_size**2, device=bench.device).view(36, 3, sizes.image_size, -1)
    with torch.no_grad():
        for precision, model in models.items():
            logits[precision] = model(pattern.to(torch.uint8)).float()
    off = (logits["fp8"] - logits["bf16"]).norm() / logits["bf16"].norm()
    result.figures["logits apart, as a share of their size"] = float(off)
    for mode in ("eager", "compiled"):
        for batch in (256, 36):
            for precision, model in models.items():
                called = torch.compile(model, dynamic=False) if mode == "compiled" else model
                row = {"teacher": precision, "models": mode, "batch": batch}
                print("measuring", row, flush=True)  # the log's last line if one takes too long
                images = torch.randint(0, 256, (batch, 3, sizes.image_size, sizes.image_size), dtype=torch.uint8)
                result.rows.append({**row, **_forward_speed(called, images.to(bench.device))})


def _forward_speed(model: Any, images: torch.Tensor) -> dict[str, float]:
    """Over 20 forward passes, after five."""
    with torch.no_grad():
        for _ in range(5):
            model(images)
        took = device_milliseconds(lambda: [model(images) for _ in range(20)]) / 20
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
