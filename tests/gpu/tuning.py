"""Item 13, KT's journey: their kind of job as it began, in fp32, not compiled, with 16 workers; `launcher tune` finds the rest."""

from __future__ import annotations

import csv
import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from tests.gpu.bench import Bench
from tests.gpu.outcomes import NotChecked, Result
from tests.gpu.scripts import make_channels

IMAGES = 2048
"""To train on; each trial uses some of them."""

TOOLKIT = ("pydantic", "sagemaker_pytorch_container")
"""What the launcher needs to run a job on this machine."""

ALLOWED = ("precision", "compile", "compile_teacher", "cuda_graphs")

MINUTES, TRIALS = 5.5, 20
"""The part lasts at most eight minutes, including the last trial and making the training files."""


def journey(bench: Bench, result: Result) -> None:
    """A large teacher, a small student and 36 images per step; what tune changed, and what each change gained."""
    if missing := [name for name in TOOLKIT if importlib.util.find_spec(name) is None]:
        raise NotChecked(f"the launcher runs no job here: {', '.join(missing)} is not installed")
    import launcher

    make_channels(bench, bench.sizes.teacher, images=IMAGES)
    os.environ["LAUNCHER_RUNS"] = str(bench.folder / "runs")
    config = bench.folder / "kt.yaml"
    config.write_text(yaml.safe_dump(_job(bench), sort_keys=False), encoding="utf-8")
    table = bench.folder / "trials.csv"
    try:
        found = launcher.tune(
            config,
            allow=ALLOWED,
            minutes=MINUTES if bench.is_gpu else 0.25,
            trials=TRIALS if bench.is_gpu else 1,
            table=table,
        )
    finally:  # even if its time is over
        result.rows += _trials(table)
    print(found)
    result.figures |= {
        "speed-up": found.speedup,
        "kept": ", ".join(found.overrides) or "nothing",
        "ended because": found.search.ended,
        "the limit that is left": found.limit,
    }
    bench.require_gpu("a speed-up")
    result.expect(found.speedup > 1, "a change made the job faster")
    result.expect("precision" in found.changes, "the job left fp32")


def _trials(table: Path) -> list[dict[str, Any]]:
    """The finished trials, in order."""
    if not table.is_file():
        return []
    with open(table, encoding="utf-8", newline="") as file:
        return [
            {
                "trial": row["label"],
                "images/s": float(row["images_per_second"]) if row["images_per_second"] else None,
                "MFU": float(row["mfu"]) if row["mfu"] else None,
                "first finding": row["headline"] or row["failure"],
            }
            for row in csv.DictReader(file)
        ]


def _job(bench: Bench) -> dict[str, Any]:
    """A config of train_kd.py."""
    sizes, folder = bench.sizes, bench.folder
    return {
        "name": "kt-one-gpu",
        "script": "train_kd.py",
        "compute": {"max_hours": 1},
        "inputs": {name: {"folder": str(folder / name)} for name in ("train", "validation", "teacher")},
        "hyperparameters": {
            "student": sizes.student.name,
            "student_options": dict(sizes.student.options),
            "image_size": sizes.image_size,
            "temperature": 4,
            "hard_label_weight": 0.1,
            "min_crop_area": 0.25,
            "horizontal_flip": True,
            "epochs": 200,
            "evaluate_every": 200,
            "checkpoint_every": 1_000_000,
            "global_batch_size": 36,
            "learning_rate": 1e-3,
            "num_workers": 16,
            "worker_type": "processes",
            "precision": "fp32",
            "compile": False,
            "compile_teacher": False,
            "cuda_graphs": False,
        },
    }
