"""Runs of label_images.py and of train_kd.py in forked processes: images of three classes, one of them broken, and a teacher of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

import launcher
from launcher.commands.show import print_run
from launcher.runner import labelling
from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.teachers import CLASSES, OPTIONS, exported

IMAGES, VIEWS = 31, 3

HEAD = f"""
    from training.settings.distillation import DistillationSettings, LabellingSettings, TeacherCacheSettings
    from training.teacher.cache import TeacherCache
    os.chdir(out)
    common = dict(
        student="vit_tiny_patch16_224", student_options={ {**OPTIONS, "drop_rate": 0.0}!r}, image_size=16, num_workers=0, log_every=1,
        system_monitor=False, max_shift_pixels=2, mixup=0.5, learning_rate=0.01, epochs={VIEWS}, evaluate_every=9,
    )
    kept = TeacherCacheSettings(views={VIEWS}, top_k=2, where=str(out / "bank"), precision="int8")
"""

LABEL = (
    HEAD
    + """
    import label_images
    label_images.main(LabellingSettings(**common, global_batch_size=12, batch_size_per_device=2, teacher_cache=kept))
"""
)


def channels_in(folder: Path) -> dict[str, str]:
    """Images of three classes, one of them broken, and a teacher of them; the variables that name them."""
    rng = np.random.RandomState(0)
    for split, count in (("train", IMAGES), ("validation", 6)):
        for number in range(count):
            file = folder / f"data/{split}/{CLASSES[number % 3]}/{number:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.randint(0, 256, (18, 18), np.uint8)).save(file)
    (folder / "data/train/b/04.png").write_bytes(b"no image")
    exported(folder / "teacher")
    places = {"TRAIN": "data/train", "VALIDATION": "data/validation", "TEACHER": "teacher"}
    return {f"SM_CHANNEL_{name}": str(folder / place) for name, place in places.items()}


def labelled(folder: Path, size: int = 1, text: str = LABEL) -> dict:
    """A bank in folder/bank, filled by N processes; result.json of the run."""
    folder.mkdir(exist_ok=True)
    for rank in run_ranks(folder, text, size=size):
        assert rank.returncode == 0, rank.stderr
    return json.loads((folder / "output/data/algo-1/result.json").read_text())


def config_in(
    folder: Path, hosts: int = 1, *, compute: Mapping[str, Any] = MappingProxyType({}), **values: Any
) -> Path:
    """The config of a job that learns from the bank that `launcher label` makes of it, with small images and a teacher in that folder."""
    channels_in(folder)
    places = {"train": "data/train", "validation": "data/validation", "teacher": "teacher"}
    inputs = {name: {"folder": str(folder / place)} for name, place in places.items()}
    small = {"student": "vit_tiny_patch16_224", "student_options": {**OPTIONS, "drop_rate": 0.0}, "image_size": 16}
    settings = {"global_batch_size": 10, "epochs": 2, "log_every": 1, "max_shift_pixels": 2, "precision": "fp32"}
    cache = {"views": 2, "top_k": 2, "where": "channel:cache"}
    job = {
        "name": "student",
        "script": "train_kd.py",
        "inputs": {**inputs, "cache": {"run": "student-labels"}},
        "hyperparameters": {**small, **settings, "teacher_cache": cache},
        "checkpoints": f"s3://amzn-s3-demo-bucket/checkpoints/{folder.name}",
        "compute": {**compute, "instance_count": hosts},
        "distribution": "torchrun",
        **values,
    }
    (config := folder / "student.yaml").write_text(json.dumps(job))
    return config


def assert_a_bank_is_filled_and_learned_from(config: Path, on: str) -> None:
    """`launcher label` on a backend, then two students there: one beside its teacher, and one with the bank alone."""
    labels = _ran(labelling.planned(config, on=on)).result()
    taught = _ran(launcher.plan(launcher.load(config), on=on))
    elsewhere = f"checkpoints=s3://amzn-s3-demo-bucket/alone/{config.parent.name}"  # where no student has left its own
    job = launcher.load(config, ["hyperparameters.teacher_cache.complete=true", elsewhere])
    inputs = {name: given for name, given in job.inputs.items() if name != "teacher"}
    alone = _ran(launcher.plan(job.model_copy(update={"inputs": inputs}), on=on))
    answers = 2 * (IMAGES - 1)  # a broken image has none
    assert labels["labels_computed"] >= answers and labels["labels_found"] == 0 and len(labels["digest"]) == 64
    losses = [[line["loss"] for line in run.metrics() if "loss" in line] for run in (taught, alone)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    teacher = alone.result()["teacher"]
    assert teacher["label_bank_digest"] == labels["digest"] and "no teacher was loaded" in teacher["answers"]
    assert "validation_accuracy" in taught.result()["teacher"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_run(alone)
    assert teacher["digest"] in shown.getvalue() and teacher["answers"] in shown.getvalue()


def _ran(plan: launcher.Plan) -> launcher.Run:
    run = launcher.run(plan)
    assert run.wait(300) == "Completed", f"{run.outcome()}\n" + "\n".join(line for _, line in run.logs())[-3000:]
    return run
