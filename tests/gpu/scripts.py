"""Item 1: the kit's scripts, from their main() to the exported model, on generated files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from training.models import export, timm_models
from training.settings.distillation import DistillationSettings, TeacherCacheSettings
from training.settings.scripts import ClassifierSettings

from tests.gpu import pictures
from tests.gpu.bench import Bench, Model
from tests.gpu.outcomes import NotChecked, Result

CLASSES = 4
STEPS = 20

EPOCH = 4
"""Steps per epoch."""


def distillation(bench: Bench, result: Result) -> None:
    """Twenty steps in bf16 with a teacher from a channel, at the sizes of the throughput measurements."""
    make_channels(bench, bench.sizes.teacher)
    settings = settings_of(bench, bench.sizes.student, max_steps=STEPS, epochs=STEPS)
    run_script(bench, result, "train_kd", settings, STEPS)


def cached_distillation(bench: Bench, result: Result) -> None:
    """The first epoch fills the cache; the second needs no teacher, which leaves the GPU."""
    import train_kd

    make_channels(bench, bench.sizes.shallow_teacher)
    moments: list[dict[str, Any]] = []

    class Watched(train_kd.Distillation):
        """Notes where the teacher is when an epoch begins."""

        def begin_epoch(self, epoch: int, batches: Any) -> None:
            before = _allocated(bench)
            super().begin_epoch(epoch, batches)
            moments.append(
                {
                    "epoch": epoch,
                    "complete": self.cache.complete,
                    "teacher": self.teacher.members[0].model.mean.device.type,
                    "freed_bytes": before - _allocated(bench),
                    "teacher_bytes": self.teacher.memory_bytes,
                }
            )

    train_kd.Distillation = Watched
    cache = TeacherCacheSettings(views=1, top_k=None)
    settings = settings_of(bench, bench.sizes.shallow_student, epochs=3, teacher_cache=cache)
    run_script(bench, result, "train_kd", settings, 3 * EPOCH)
    result.rows += moments
    result.expect(
        [moment["complete"] for moment in moments] == [False, True, True],
        "the cache is complete from the second epoch on",
    )
    result.expect(
        [moment["teacher"] for moment in moments[1:]] == ["cpu", "cpu"],
        "the teacher left the device with the second epoch",
    )
    bench.require_gpu("the memory that the teacher frees")
    freed, held = moments[1]["freed_bytes"], moments[1]["teacher_bytes"]
    result.figures |= {"teacher, MiB": held / 2**20, "freed by its leaving, MiB": freed / 2**20}
    result.expect(freed > 0.9 * held, "the second epoch freed the teacher's memory")


def graphs(bench: Bench, result: Result) -> None:
    """Both models compiled, as CUDA graphs if there is a GPU: an epoch fills the cache, the next ones read it, and each is evaluated;
    beside the same run without compilation."""
    make_channels(bench, bench.sizes.shallow_teacher)
    values = {"epochs": 3, "teacher_cache": TeacherCacheSettings(views=1, top_k=None), "ema_decay": 0.9}
    losses = {}
    for compiled in (False, True):
        settings = settings_of(
            bench,
            bench.sizes.shallow_student,
            compile=compiled,
            compile_teacher=compiled,
            cuda_graphs=compiled,
            **values,
        )
        shutil.rmtree("output", ignore_errors=True)
        with bench.compiling():
            run_script(bench, result, "train_kd", settings, 3 * EPOCH)
        losses[compiled] = result.figures["last loss"], result.figures["validation_loss"]
    result.figures |= {"last loss, as it is": losses[False][0], "validation_loss, as it is": losses[False][1]}
    for one, other in zip(losses[False], losses[True]):
        result.expect(abs(one - other) <= 0.05 * max(1.0, abs(one)), f"the losses agree: {one:.4g} and {other:.4g}")


def classifier(bench: Bench, result: Result) -> None:
    """Two epochs in bf16, with averaged weights."""
    make_channels(bench)
    settings = ClassifierSettings(
        model=bench.sizes.shallow_student.name,
        model_options=dict(bench.sizes.shallow_student.options),
        ema_decay=0.99,
        epochs=2,
        **_common(bench),
    )
    run_script(bench, result, "train_classifier", settings, 2 * EPOCH)


def segmentation(bench: Bench, result: Result) -> None:
    """Two epochs in bf16 with a teacher of pixels, Dice loss and random crops."""
    sizes, side = bench.sizes, bench.sizes.masked_size
    for name, images in (("train", EPOCH * sizes.batch), ("validation", sizes.batch + 1)):
        _channel(name, pictures.masked(bench.folder / name, images, sizes.masked_classes, (side + side // 4, side)))
    settings = bench.segmentation_settings(
        crop_size=(side // 2, side // 2), max_scale=1.5, dice_weight=1.0, hard_label_weight=0.5, epochs=2, log_every=2
    )
    export.save(
        bench.segmenter(sizes.encoder),
        _channel("teacher", bench.folder / "teacher"),
        name=settings.model,
        options=settings.model_options,
        classes=settings.names,
        image_size=settings.image_size,
        decoder={"channels": settings.decoder_channels, "ignore_index": settings.ignore_index},
    )
    run_script(bench, result, "train_segmentation", settings, 2 * EPOCH)


def dali_distillation(bench: Bench, result: Result) -> None:
    """Two epochs whose images DALI decodes and augments, on the GPU if there is one."""
    if not has_dali():
        raise NotChecked("nvidia.dali is not installed")
    make_channels(bench, bench.sizes.shallow_teacher)
    varied = {"min_crop_area": 0.5, "horizontal_flip": True, "mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.25}
    settings = settings_of(bench, bench.sizes.shallow_student, epochs=2, preprocessing="dali", **varied)
    run_script(bench, result, "train_kd", settings, 2 * EPOCH)


def has_dali() -> bool:
    """Whether DALI is installed."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def _common(bench: Bench) -> dict[str, Any]:
    return {
        "precision": "bf16",
        "global_batch_size": bench.sizes.batch,
        "log_every": 2,
        "num_workers": 2,
        "image_size": bench.sizes.image_size,
    }


def _allocated(bench: Bench) -> int:
    return torch.cuda.memory_allocated(bench.device) if bench.is_gpu else 0


def settings_of(bench: Bench, student: Model, **values: Any) -> DistillationSettings:
    """Settings of train_kd.py in bf16, unless `values` say otherwise."""
    return DistillationSettings(
        student=student.name, student_options=dict(student.options), **{**_common(bench), **values}
    )


def make_channels(bench: Bench, teacher: Model | None = None, images: int | None = None) -> None:
    """Labelled JPEGs, including held-out ones that end in a ragged batch, and a teacher with random weights.

    Args:
        images: to train on. None: an epoch's.
    """
    sizes = bench.sizes
    for name, count in (("train", images or EPOCH * sizes.batch), ("validation", 2 * sizes.batch + CLASSES)):
        _channel(name, pictures.labelled(bench.folder / name, count, CLASSES, sizes.photograph))
    if teacher is not None:
        torch.manual_seed(1)
        export.save(
            timm_models.build(teacher.name, teacher.options, CLASSES),
            _channel("teacher", bench.folder / "teacher"),
            name=teacher.name,
            options=dict(teacher.options),
            classes=[f"class-{number}" for number in range(CLASSES)],
            image_size=sizes.image_size,
        )


def _channel(name: str, folder: Path) -> Path:
    os.environ[f"SM_CHANNEL_{name.upper()}"] = str(folder)
    return folder


def run_script(bench: Bench, result: Result, script: str, settings: Any, steps: int) -> None:
    """Run a script's main() in this process; check what it left, and whether it took `steps` steps."""
    importlib.import_module(script).main(settings)
    [outcome] = Path("output/data").glob("*/result.json")
    summary = json.loads(outcome.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in outcome.with_name("metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    result.figures |= {
        "steps": summary["steps"],
        "device": summary["device"],
        "first loss": losses[0],
        "last loss": losses[-1],
        **{
            name: value
            for name, value in summary.items()
            if name.startswith("validation_") and isinstance(value, float)
        },
        "peak memory, GiB": max(line["memory_gib"] for line in lines if "memory_gib" in line),
    }
    result.expect(summary["steps"] == steps, f"it took {steps} steps")
    result.expect(summary["device"] == bench.device.type, f"it ran on {bench.device.type}")
    result.expect(all(math.isfinite(loss) for loss in losses), "every loss is finite")
    result.expect(Path("output/model/model.safetensors").is_file(), "it left model.safetensors")
