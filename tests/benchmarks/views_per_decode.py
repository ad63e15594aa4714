"""What do several views per decode gain and cost? `make bench-views`: the input alone, a training loop, and accuracy over five seeds.

Speed: photographs as on the web (400 x 300) and from a camera (1600 x 1200), random crops resized to SIDE pixels. First the input alone,
then the kit's own loop with a light student: on labels, and with a filled label bank at 1, 2 and 4 views per decode, an epoch of each in
turn, round after round. Target: with the bank at least 1.10 times the images/s of the student without a teacher, at the same batch.

Accuracy: Fashion-MNIST, 500 images of each class, one teacher, a bank of 4 views of each image, the same steps and settings for 1, 2 and
4 views per decode; seeds pair the runs. A batch shows fewer images, so it may be lower. Needs Debian's package dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from distillation import DATA, INPUTS, SEEDS, STUDENT, TEACHER, show_gain, show_table, train
from engine import ALONE, STEPS, Samples, alternate, machine, ratio, settings, table
from photographs import LARGE, SMALL, write_images
from training.data.loaders import Data, open_loaders
from training.data.views import open_data
from training.engine import loop
from training.engine.run import open_run
from training.models import timm_models
from training.runtime.environment import Environment
from training.settings.distillation import DistillationSettings
from training.settings.entries import variants
from training.tasks.distillation import Distillation
from training.tasks.students import Students
from training.teacher.cache import TeacherCache
from training.teacher.frozen import FrozenModel, Teacher
from training.teacher.logit_records import record_layout

from launcher.prepare import prepare

SIDE, BATCH, IMAGES = 112, 32, 512
TOGETHER = (1, 2, 4)
VIEWS = 4
WORKERS = 2
"""Threads that make the images: one per core."""
LIGHT = {
    "student": "vit_tiny_patch16_224",
    "student_options": {"img_size": SIDE, "embed_dim": 96, "num_heads": 3, "depth": 4},
}
"""So light that making its images takes most of a step on a core, as beside a GPU."""
LEARNS = {
    "images_per_class": 500,
    "hard_label_weight": 0.1,
    "max_steps": 400,
    "ema_decay": 0.98,
    "global_batch_size": 48,
}


def chosen(together: int, **values: Any) -> DistillationSettings:
    return settings(
        **LIGHT, image_size=SIDE, global_batch_size=BATCH, min_crop_area=0.35, horizontal_flip=True, precision="fp32",
        num_workers=WORKERS, worker_type="threads", views_per_decode=together, **values,
    )  # fmt: skip


def opened(channel: Path, asked: DistillationSettings) -> Data:
    return open_data(channel, channel, asked, 3)


def inputs(channel: Path) -> dict[str, Callable[[int], None]]:
    """For each number of views per decode, a function that makes N batches, epoch after epoch."""

    def making(together: int) -> Callable[[int], None]:
        asked = chosen(together)
        loaders = open_loaders(opened(channel, asked), asked, ALONE, batch_size_per_device=BATCH)

        def batches():
            for epoch in itertools.count(1):
                loaders.train_batches.start(epoch)
                yield from loaders.train

        stream = batches()
        return lambda count: [next(stream) for _ in range(count)] and None

    return {f"{together} a decode": making(together) for together in TOGETHER}


def learning(folder: Path, channel: Path, asked: DistillationSettings, frozen: Teacher | None) -> Callable[[int], None]:
    """The kit's loop, which continues for N steps whenever called; its bank is filled."""
    data, environment = (
        opened(channel, asked),
        Environment("algo-1", folder / "model", folder / "data", folder / "failure", {}, None),
    )
    with redirect_stdout(io.StringIO()):
        _, run = open_run(asked, environment, ALONE)
        students = Students(variants(asked), frozen, data.classes, environment, torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8), STEPS, ALONE, run.report.log)  # fmt: skip
        loaders = open_loaders(data, asked, ALONE, batch_size_per_device=BATCH, views=VIEWS)
    cache = None
    if frozen is not None:
        parts = {
            "teacher weights": "benchmark",
            "transform": str(asked.views_per_decode),
            "data": "photographs",
            "dtype": "fp32",
        }
        cache = TeacherCache.open(
            folder / "cache", parts=parts, images=IMAGES, layout=record_layout(len(data.classes), None, "fp16"), views=VIEWS, world=ALONE,
        )  # fmt: skip
    task = Distillation(students.trained, frozen, cache, timeline=run.timeline)

    def steps(count: int) -> None:
        with redirect_stdout(io.StringIO()):
            loop.train(task, lambda _model: {}, students.states, loaders, students.states[0].step + count, run)

    if cache is not None:
        steps(VIEWS * (IMAGES // BATCH))
        assert cache.misses == VIEWS * IMAGES, "the bank is filled"
    return steps


def speed(channel: Path, folder: Path, rounds: int, steps: int) -> None:
    print(show(alternate(inputs(channel), rounds, steps), "the input alone"))
    options = {"img_size": SIDE}
    model = timm_models.build("vit_tiny_patch16_224", options, 1)
    frozen = Teacher([FrozenModel(model, "vit_tiny_patch16_224", options)])
    works = {"on labels": learning(folder / "labels", channel, chosen(1, hard_label_weight=1.0), None)}
    for together in TOGETHER:
        name = f"filled bank, {together} a decode"
        works[name] = learning(folder / str(together), channel, chosen(together), frozen)
    samples = alternate(works, rounds, steps)
    print(show(samples, "training"))
    alone, *banks = samples
    for name in banks:
        print(
            f"images/s, {name} over {alone}: {{:.2f}} ({{:.2f}} to {{:.2f}})".format(
                *ratio(samples[alone].wall, samples[name].wall)
            )
        )


def show(samples: Mapping[str, Samples], what: str) -> str:
    rows = [(what, "images/s", "CPU, ms an image")]
    for name, sample in samples.items():
        wall, cpu = (statistics.median(values) for values in (sample.wall, sample.cpu))
        rows.append((name, f"{BATCH / wall:.0f}", f"{1000 * cpu / BATCH:.2f}"))
    return table(rows)


def accuracy() -> None:
    print(prepare("fashion-mnist", DATA))
    train("views-teacher", "train_classifier.py", {**TEACHER, "epochs": 1, "seed": 0}, INPUTS)
    found: dict[str, list[dict]] = {f"{together} a decode": [] for together in TOGETHER}
    for seed in SEEDS:
        for together, results in zip(TOGETHER, found.values(), strict=True):
            asked = {"teacher_cache": {"views": VIEWS}, "views_per_decode": together, "seed": seed}
            results.append(train(f"views-{together}", "train_kd.py", {**STUDENT, **LEARNS, **asked}, {**INPUTS, "teacher": {"run": "views-teacher"}}))  # fmt: skip
    show_table(found, f"test accuracy, mean ± sd over {len(SEEDS)} seeds")
    first, *others = found
    for name in others:
        show_gain(found, name, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=1, help=f"of {IMAGES // BATCH} steps, of each in a round")
    parser.add_argument("--only", choices=["speed", "accuracy"])
    asked = parser.parse_args()
    print(
        f"{machine(torch.get_num_threads())}\n{asked.rounds} rounds of {asked.epochs * IMAGES // BATCH} batches of {BATCH}, {SIDE} pixels, {WORKERS} data workers"
    )
    for size in (SMALL, LARGE) if asked.only != "accuracy" else ():
        with tempfile.TemporaryDirectory() as place:
            channel = Path(place) / "images"
            write_images(channel, size, 64, IMAGES)
            print("\nphotographs of {} x {} pixels\n".format(*size))
            speed(channel, Path(place), asked.rounds, asked.epochs * IMAGES // BATCH)
    if asked.only != "speed":
        accuracy()


if __name__ == "__main__":
    main()
