"""Five students that share a teacher's pass, beside five single-student runs without a teacher plus that pass. `make bench-students`.

Each is the kit's own loop on real JPEGs (`launcher prepare photos`), decoded, cropped and flipped by threads, and takes its turn of a few
optimizer steps, round after round, each round starting with another. The job of five decodes and asks the teacher once; a run of one
student learns from labels alone and decodes for itself; the teacher's pass is its forward pass alone, on ready batches. So the comparison
is with the least that five separate students could cost. Target: at most 1.15 times that.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from engine import ALONE, ROOT, STEPS, Recorded, alternate, machine, ratio, settings, table
from training.data.loaders import Data, open_loaders
from training.data.views import open_data
from training.engine.loop import train
from training.engine.run import open_run
from training.models import timm_models
from training.runtime.environment import Environment
from training.settings.distillation import DistillationSettings
from training.settings.entries import variants
from training.tasks.distillation import Distillation
from training.tasks.students import Students
from training.teacher.frozen import FrozenModel, Teacher

from launcher.prepare import prepare

SIDE, BATCH = 64, 16
PHOTOS = ROOT / "data/photos"

TEACHER = ("vit_small_patch16_224", {"img_size": SIDE})
TINY, WIDTH = {"img_size": SIDE}, {"img_size": SIDE, "embed_dim": 128, "num_heads": 4}
STUDENTS = {
    "vit": {"student": "vit_tiny_patch16_224", "student_options": TINY},
    "vit_decoupled": {"student": "vit_tiny_patch16_224", "student_options": TINY, "method": "dkd", "seed": 1},
    "narrow": {"student": "vit_tiny_patch16_224", "student_options": WIDTH, "learning_rate": 3e-4},
    "resnet": {"student": "resnet10t"},
    "mobile": {"student": "mobilenetv3_small_100", "optimizer": "sgd", "ema_decay": 0.99},
}


def learning(folder: Path, data: Data, chosen: DistillationSettings, frozen: Teacher | None) -> Callable[[int], None]:
    """The loop with all that these settings name, which continues for N steps whenever called."""
    environment = Environment("algo-1", folder / "model", folder / "data", folder / "failure", {}, None)
    with redirect_stdout(io.StringIO()):
        _, run = open_run(chosen, environment, ALONE)
        image = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
        students = Students(variants(chosen), frozen, data.classes, environment, image, STEPS, ALONE, run.report.log)
        loaders = open_loaders(data, chosen, ALONE, batch_size_per_device=BATCH)
    task = Recorded(Distillation(students.trained, frozen, timeline=run.timeline))

    def steps(count: int) -> None:
        with redirect_stdout(io.StringIO()):
            train(task, lambda _model: {}, students.states, loaders, students.states[0].step + count, run)

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of each in a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    prepare("photos", PHOTOS)
    shared = {
        **{"image_size": SIDE, "global_batch_size": BATCH, "min_crop_area": 0.5, "horizontal_flip": True},
        **{"precision": "fp32", "max_grad_norm": 1.0, "num_workers": 1, "worker_type": "threads"},
    }
    several = settings(**shared, students=STUDENTS)
    data = open_data(PHOTOS / "train", PHOTOS / "validation", several, 3)
    name, options = TEACHER
    torch.manual_seed(1)
    frozen = Teacher([FrozenModel(timm_models.build(name, options, len(data.classes)), name, options)])
    images = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8)

    def teach(count: int) -> None:
        for _ in range(count):
            frozen(images)

    print(
        f"{machine(asked.threads)}\n{asked.rounds} rounds of {asked.steps} steps of each in turn, batch {BATCH}, {SIDE} px\n"
    )
    with tempfile.TemporaryDirectory() as place:
        works = {"five students, one job": learning(Path(place) / "all", data, several, frozen)}
        for student, own in STUDENTS.items():
            alone = settings(**{**shared, **own, "hard_label_weight": 1.0})
            works[f"{student} alone"] = learning(Path(place) / student, data, alone, None)
        works["the teacher's pass"] = teach
        for work in works.values():  # memory, kernels, threads
            work(asked.steps)
        samples = alternate(works, asked.rounds, asked.steps)
    together, *apart = samples.values()
    rows = [("", "wall, ms a step", "CPU, ms a step")]
    for work, sample in samples.items():
        rows.append((work, *(f"{1000 * statistics.median(values):.0f}" for values in (sample.wall, sample.cpu))))
    print(table(rows))
    for clock in ("wall", "cpu"):
        sums = [sum(one) for one in zip(*(getattr(sample, clock) for sample in apart), strict=True)]
        median, low, high = ratio(getattr(together, clock), sums)
        print(f"\none job over the five alone and the teacher's pass, {clock}: {median:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
