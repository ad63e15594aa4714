"""Whole runs of train_kd.py in forked processes, one after the other: several students together, and each alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.entrypoints.ranks import free_port, run_ranks
from tests.entrypoints.teachers import exported

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "in_chans": 1}
RESNET = {"channels": (8, 8, 16, 16), "stem_width": 8, "in_chans": 1}

SHARED: dict[str, Any] = {
    **{"student": "vit_tiny_patch16_224", "student_options": {**VIT, "drop_rate": 0.2, "drop_path_rate": 0.2}},
    **{
        "image_size": 16,
        "global_batch_size": 8,
        "epochs": 2,
        "log_every": 1,
        "num_workers": 1,
        "worker_type": "threads",
    },
    **{"horizontal_flip": True, "min_crop_area": 0.5, "learning_rate": 0.01, "precision": "fp32", "seed": 3},
    **{"system_monitor": False, "checkpoint_every": 3, "evaluate_every": 2},
}
"""Five steps an epoch: the checkpoint of the third lies in the middle of one."""

STUDENTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "other": {
        **{"student": "resnet10t", "student_options": RESNET, "seed": 7, "method": "dkd", "temperature": 2.0},
        **{"optimizer": "sgd", "learning_rate": 0.02, "warmup_fraction": 0.5, "ema_decay": 0.9, "max_grad_norm": None},
    },
    "labels": {"hard_label_weight": 1.0, "label_smoothing": 0.1},
}

KILLED_AT = 5
"""The step before whose end a run is killed: two steps after its checkpoint."""


def channels(folder: Path) -> Path:
    """Forty training and nine held-out images in three classes, and a teacher with random weights."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 40), ("validation", 9)):
        for number in range(count):
            place = folder / part / "abc"[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 256, (20, 20), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(place / f"{number:02}.png")
    exported(folder / "teacher")
    return folder


def run_all(
    tmp_path: Path, data: Path, runs: Mapping[str, dict[str, Any]], *, size: int = 1, killed: bool = False
) -> list[Any]:
    """Runs of these settings in folders of their names below tmp_path, by one process or several.

    Args:
        killed: every process ends itself in step KILLED_AT.
    """
    ports = [free_port() for _ in runs]
    text = f"""
        sys.path.insert(0, {str(ROOT)!r})
        from tests.entrypoints.student_runs import runs_of_a_rank
        runs_of_a_rank(pathlib.Path({str(data)!r}), out, {dict(runs)!r}, {ports}, killed={killed})
    """
    environments = None if size > 1 else [{}]
    return run_ranks(tmp_path, text, size=size, environments=environments)


def runs_of_a_rank(
    data: Path, out: Path, runs: Mapping[str, dict[str, Any]], ports: list[int], *, killed: bool
) -> None:
    """What a forked process does."""
    import train_kd
    from training.engine import loop
    from training.settings import check
    from training.settings.distillation import DistillationSettings

    optimize, done = loop._optimize, 0

    def dying(*arguments: Any) -> None:
        nonlocal done
        done += 1
        if killed and done > (KILLED_AT - 1) * len(STUDENTS):
            os.kill(os.getpid(), signal.SIGKILL)
        optimize(*arguments)

    loop._optimize = dying
    for (name, values), port in zip(runs.items(), ports):
        folder = out / name
        os.environ |= {
            "MASTER_PORT": str(port),
            "SM_OUTPUT_DIR": str(folder),
            "SM_CHANNEL_TEACHER": str(data / "teacher"),
        }
        os.environ |= {f"SM_CHANNEL_{part.upper()}": str(data / part) for part in ("train", "validation")}
        folder.mkdir(exist_ok=True)
        os.chdir(folder)  # checkpoints lie below it in a plain shell
        settings, problems = check(DistillationSettings, {**SHARED, **values})
        assert settings is not None, problems
        train_kd.main(settings)


def alone(students: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of each student's own run: without `students`, but for a seed of its own, which does not order the images."""
    return {name: {"students": {name: own}} if "seed" in own else own for name, own in students.items()}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data/algo-1/metrics.jsonl").read_text().splitlines()]


def curve(folder: Path, student: str = "") -> dict[int, dict[str, float]]:
    """By step, what a run says of a student's losses and learning rate, at full precision."""
    prefix, found = f"{student}/" if student else "", dict[int, dict[str, float]]()
    for line in lines(folder):
        of_student = {
            name.removeprefix(prefix): value
            for name, value in line.items()
            if name.startswith(prefix) and ("loss" in name or "learning_rate" in name)
        }
        own = {name: value for name, value in of_student.items() if "/" not in name and not name.endswith("_s")}
        if own:
            found.setdefault(line["step"], {}).update(own)
    return found


def weights(folder: Path, student: str = "") -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / student / "model.safetensors")
