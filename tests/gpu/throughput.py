"""Item 10: images/s and MFU of distillation, with the teacher online and from a filled cache, of other models, and of single settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from training.data.views import open_data
from training.engine.probe import RepeatedBatch
from training.measure.arithmetic import Arithmetic
from training.models import fp8
from training.models.compiled import StaticBatch
from training.runtime import numa
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation
from training.tasks.segmentation import Segmentation
from training.tasks.students import Student
from training.teacher.frozen import Teacher

from tests.gpu import pictures
from tests.gpu.bench import Bench, Engine, seconds_per_step
from tests.gpu.clocks import device_milliseconds, host_milliseconds
from tests.gpu.groups import one_rank
from tests.gpu.outcomes import NotChecked, Result
from tests.gpu.turns import ROUNDS, in_turns

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

WARM_UP, ALIKE = 20, 0.01
"""Steps before those that count, and how far the losses of two runs of the same job may be apart."""

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
        engine.run.arithmetic.count(_image(bench), [engine.state.counted], teacher.counted)
        fresh, cached = engine.loaders, engine.task
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        engine.task = Distillation([Student(engine.state.trained, settings)], teacher, timeline=engine.run.timeline)
        steps = engine.steps()
        first = _first_step(bench, steps)
        result.rows.append(_measured(bench, engine, steps, batch, mode, "online", first))
        engine.loaders, engine.task = fresh, cached
        steps = engine.steps()  # fills the cache
        for _ in range(EPOCH):
            next(steps)
        steps.close()
        engine.loaders = replace(fresh, train=RepeatedBatch(fresh.train))
        computed = cached.cache.misses
        result.rows.append(_measured(bench, engine, engine.steps(), batch, mode, "cached"))
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
    each also compiled, in turns, and in a process of its own: a process keeps the algorithm that it took first, whatever is set later
    later (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/Conv_v8.cpp, run_single_conv)."""
    variants = {(mode, timed): f"{mode}-{timed}" for mode in MODES for timed in (False, True)}
    found = in_turns(bench, {name: partial(_convolutional, *chosen) for chosen, name in variants.items()})
    for (mode, timed), name in variants.items():
        plain = [row["ms a step"] for row in found[variants[mode, False]]]
        ratio = median(row["ms a step"] / other for row, other in zip(found[name], plain))
        middle = sorted(found[name], key=lambda row: row["ms a step"])[ROUNDS // 2]
        result.rows.append({"cudnn_benchmark": timed, **middle, "times that without": ratio})
    _expect_counted(result)
    bench.require_gpu("a comparison of speeds")


def _convolutional(mode: str, timed: bool, bench: Bench) -> Callable[[], dict[str, Any]]:
    """Measures a row of `convolutions` once."""
    sizes = bench.sizes
    settings = bench.settings(
        student=sizes.encoder.name,
        hard_label_weight=1.0,
        global_batch_size=sizes.large_batch,
        num_workers=2,
        cudnn_benchmark=timed,
        **MODES[mode],
    )
    with bench.compiling():
        engine = bench.engine(settings, bench.noise(EPOCH * sizes.large_batch), bench.model(sizes.encoder), None)
        engine.run.arithmetic.count(_image(bench), [engine.state.counted])
        engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
        steps = engine.steps()
        first = _first_step(bench, steps)

    def measure() -> dict[str, Any]:
        with bench.compiling():
            return _measured(bench, engine, steps, sizes.large_batch, mode, "labels alone", first)

    return measure


def numa_binding(bench: Bench, result: Result) -> None:
    """A student on labels alone, whose process and data workers may use all cores, or those next to the GPU: with one batch over and over,
    where the host launches kernels, and with JPEGs, which its workers decode."""
    sizes, classes = bench.sizes, min(bench.sizes.classes, 4)
    pictures.labelled(bench.folder / "train", sizes.photographs, classes, sizes.photograph)
    root = bench.folder / "train"
    found = in_turns(bench, {str(bound): partial(_bound, bound, root) for bound in (True, False)})
    for bound in (False, True):
        rounds = found[str(bound)]
        for what, (cores, images, _) in rounds[0].items():
            took = [turn[what][2] for turn in rounds]
            ratio = median(own / turn[what][2] for own, turn in zip(took, found["False"]))
            seconds = median(took)
            row = {"numa_binding": bound, "cores": cores, "input": what, "images/s": images / seconds}
            result.rows.append({**row, "ms a step": seconds * 1000, "times that without": ratio})
    bench.require_gpu("a comparison of speeds")


def _bound(bound: bool, root: Path, bench: Bench) -> Callable[[], dict[str, tuple[int, int, float]]]:
    """Measures cores, images per step and seconds per step once, by what the images are."""
    sizes, sharing = bench.sizes, None
    if bound:  # before anything that inherits it
        sharing, about = numa.bind(bench.device, 1)
        if sharing is None and bench.is_gpu:
            raise NotChecked(f"there is nothing to bind to ({about})")
    world, cores = replace(bench.world(), sharing_cores=sharing), len(os.sched_getaffinity(0))
    running = dict[str, tuple[int, int, Iterator[None]]]()
    for what, images in {"one batch over and over": sizes.batch, "JPEGs": sizes.large_batch}.items():
        settings = bench.settings(
            student=sizes.student.name,
            hard_label_weight=1.0,
            global_batch_size=images,
            image_size=sizes.image_size,
            min_crop_area=0.25,
            num_workers="auto" if what == "JPEGs" else 2,
            worker_type="processes",
        )
        engine = bench.engine(
            settings, open_data(root, root, settings, 3), bench.model(sizes.student), None, world=world
        )
        crowd = engine.loaders.crowd
        if what != "JPEGs":
            engine.loaders, crowd = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train)), 0
        running[what] = images, crowd, engine.steps()

    def measure() -> dict[str, tuple[int, int, float]]:
        return {
            what: (cores, images, seconds_per_step(bench, steps, 5, 10, crowd))
            for what, (images, crowd, steps) in running.items()
        }

    return measure


def late_metrics(bench: Bench, result: Result, *, batch: int) -> None:
    """A student on labels alone, with a metric line after every step or every tenth, read at once or while the next step runs. Seconds are
    those of the metric lines themselves, by the GPU's events."""
    sizes, counted = bench.sizes, 2 * bench.sizes.steps
    size = sizes.throughput_batch or batch
    took: dict[tuple[int, bool], list[float]] = {(every, late): [] for every in (1, 10) for late in (False, True)}
    losses: dict[tuple[int, bool], dict[int, float]] = {}
    for _ in range(ROUNDS):
        for every, late in took:
            settings = bench.settings(
                student=sizes.student.name,
                hard_label_weight=1.0,
                global_batch_size=size,
                num_workers=2,
                log_every=every,
                late_metrics=late,
            )
            engine = bench.engine(settings, bench.noise(size * (WARM_UP + counted)), bench.model(sizes.student), None)
            engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
            engine.train(WARM_UP + counted)
            lines = [line for line in engine.timeline("steps") if line["step"] > WARM_UP]
            steps = sum(line["extra"]["steps"] for line in lines)
            took[every, late].append(sum(line["extra"]["steps"] * line["seconds"]["step"] for line in lines) / steps)
            result.expect(steps == counted, "every step is in a metric line")
            losses[every, late] = engine.losses()
    for (every, late), seconds in took.items():
        ratio = median(own / plain for own, plain in zip(seconds, took[every, False]))
        row = {"log_every": every, "late_metrics": late, "ms a step": median(seconds) * 1000}
        result.rows.append({"batch": size, **row, "times that without": ratio})
    for every in (1, 10):
        off = max(abs(losses[every, True][step] / loss - 1) for step, loss in losses[every, False].items())
        result.figures[f"log_every {every}: losses off, at most"] = off
        result.expect(off < ALIKE, "late lines have the losses of the others")
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
            engine.run.arithmetic.count(_image(bench, bench.sizes.masked_size), [engine.state.counted])
            engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
            steps = engine.steps()
            first = _first_step(bench, steps)
            result.rows.append(_measured(bench, engine, steps, size, mode, "masks alone", first))
    _expect_counted(result)
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
                engine.run.arithmetic.count(_image(bench), [engine.state.counted], teacher.counted)
                engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
                steps = engine.steps()
                first = _first_step(bench, steps)
                for _ in range(LEARNING - 1):
                    next(steps)
                bench.synchronize()
                learned[mode] = torch.cat([value.detach().flatten() for value in engine.state.model.parameters()]).cpu()
                result.rows.append(_measured(bench, engine, steps, sizes.batch, mode, "online, DDP", first))
    _expect_counted(result)
    start = torch.cat([value.detach().flatten() for value in bench.model(sizes.student).parameters()])
    change = (learned["eager"] - start).norm()
    graphs = float((learned["reduce-overhead"] - learned["compiled"]).norm() / change)
    result.figures["CUDA graphs and compiled models differ by, as a share of what they changed"] = graphs
    for mode in [*MODES][1:]:
        off = float((learned[mode] - learned["eager"]).norm() / change)
        result.figures[f"{mode}: off after {LEARNING} steps, as a share of what they changed"] = off
        result.expect(off < SAME, f"{mode} learns what the models learn as they are")


def fp8_teacher(bench: Bench, result: Result, *, batch: int) -> None:
    """The teacher's forward pass alone, with its linear layers in fp8 beside all in bf16."""
    sizes, size = bench.sizes, bench.sizes.throughput_batch or batch
    if (lacking := fp8.unsupported(bench.device)) is not None:
        raise NotChecked(lacking)
    shape, generator = (size, 3, sizes.image_size, sizes.image_size), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(bench.device)
    teachers = {precision: bench.teacher(sizes.teacher, precision) for precision in ("bf16", "fp8")}
    logits = {precision: teacher(images) for precision, teacher in teachers.items()}
    off = float((logits["fp8"] - logits["bf16"]).norm() / logits["bf16"].norm())
    result.figures[f"{batch}: logits apart, as a share of their size"] = off
    result.expect(off < FP8_OFF, "fp8 gives about the logits that bf16 gives")
    arithmetic = {precision: Arithmetic(bench.device) for precision in teachers}
    for precision, teacher in teachers.items():
        arithmetic[precision].count(_image(bench), [], teacher.counted)
    for mode in MODES:
        for precision, teacher in teachers.items():
            row = {"teacher": precision, "models": mode, "batch": batch}
            print("measuring", row, flush=True)  # the log's last line if one takes too long
            with bench.compiling():
                speed = _forward_speed(_called(teacher, mode), images)
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


def _image(bench: Bench, side: int | None = None) -> torch.Tensor:
    """What operations are counted for, of the sizes' height and width or another."""
    side = side or bench.sizes.image_size
    return torch.zeros(1, 3, side, side, dtype=torch.uint8)


def _expect_counted(result: Result) -> None:
    result.expect(all(row["GFLOP an image"] for row in result.rows), "operations are counted")


def _first_step(bench: Bench, steps: Iterator[None]) -> float:
    """Seconds of a model's first step, which includes compiling it."""
    return host_milliseconds(lambda: (next(steps), bench.synchronize())) / 1000


def _measured(
    bench: Bench,
    engine: Engine,
    steps: Iterator[None],
    batch: int,
    mode: str,
    logits: str,
    first: float | None = None,
) -> dict[str, Any]:
    """A row of the table.

    Args:
        steps: of the engine, the first of which was taken already.
        first: its seconds. None: the models had run before.
    """
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = seconds_per_step(bench, steps, 5, 10)
    run = engine.run
    images = run.settings.global_batch_size // run.world.size  # of this process: that of a group of one counts two
    done = run.arithmetic.window(images, images if logits.startswith("online") else 0, seconds, 1)
    return {
        "batch": batch,
        "models": mode,
        "logits": logits,
        "images/s": images / seconds,
        "ms a step": seconds * 1000,
        "MFU": done.get("mfu"),
        "GFLOP an image": done["tflops"] * 1000 * seconds / images if done else None,
        # the allocator's count here does not include the memory of CUDA graphs
        "peak memory, GiB": torch.cuda.max_memory_allocated(bench.device) / 2**30
        if bench.is_gpu and mode != "reduce-overhead"
        else None,
        "first step, s": first,
    }
