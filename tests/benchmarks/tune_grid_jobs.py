"""The slow jobs that tune_grid.py tunes, each with a planted limit, and the grid of what `launcher tune` may change in it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from planted_cases import BASE
from planted_foreign_cases import FRAMEWORKS, SIMULATED

from launcher.study.tune_study import SHORTEST

Settings = dict[str, Any]
"""Of a cell or a result, without those that equal the job's own: {} is the job as it is."""


@dataclass(frozen=True)
class Planted:
    """One job: a command if it has a `script`, else a job of train_classifier.py."""

    name: str
    given: Mapping[str, Any]
    """The values of the grid's settings in the job as it is."""
    grid: Mapping[str, Sequence[Any]]
    script: str = ""
    """One of FRAMEWORKS."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the command, or hyperparameters; without those of `given`."""
    allow: Sequence[str] = ()
    checkpoints: bool = False
    seconds: float = SHORTEST
    """Of a trial."""

    def cells(self) -> Iterator[Settings]:
        """Every distinct combination: without workers, no other setting of a loader counts."""
        for values in itertools.product(*self.grid.values()):
            cell = self.changes(dict(zip(self.grid, values)))
            if cell.get("num_workers", self.given.get("num_workers")) != 0 or not {*cell} & {*OF_WORKERS}:
                yield cell

    def changes(self, values: Mapping[str, Any]) -> Settings:
        return {name: value for name, value in values.items() if value != self.given.get(name)}

    def command(self, data: Path) -> list[str]:
        """As a user would start it; [] if it is a config."""
        if not self.script:
            return []
        words = [sys.executable, str(FRAMEWORKS[self.script]), *([] if self.script == SIMULATED else [str(data)])]
        for name, value in self.arguments.items():
            words += [f"--{name}", str(value)]
        return words

    def config(self, data: Path) -> str:
        """The YAML of a job of the kit's script."""
        job = {
            "name": self.name,
            "script": "train_classifier.py",
            "inputs": {part: {"folder": str(data / part)} for part in ("train", "validation")},
            **({"checkpoints": "s3://amzn-s3-demo-bucket/tune"} if self.checkpoints else {}),
            "hyperparameters": {**BASE, **self.arguments, **self.given},
        }
        return yaml.safe_dump(job, sort_keys=False)


OF_WORKERS = ("worker_type", "prefetch_factor", "persistent_workers")

LOADER = {
    "num_workers": (0, 1, 2, 4, 8, 16),
    "prefetch_factor": (2, 4),
    "persistent_workers": (False, True),
}
"""Settings of a DataLoader that can be set from outside."""

AS_IT_IS = {"prefetch_factor": 2, "persistent_workers": False}
"""PyTorch's own values."""

DRAWS = ("num_workers", "persistent_workers")
"""Settings that change the random numbers a dataset draws in its workers."""

PHOTOGRAPHS = {"model": "mobilenet_v3_small", "size": 64, "batch-size": 8, "steps": 50}
"""Of scripts that do not use the kit: a light model, in one epoch of the photographs."""

PLANTED = (
    Planted(
        "slow-reads",
        {"num_workers": 1, **AS_IT_IS},
        LOADER,
        "plain",
        {**PHOTOGRAPHS, "workers": 1, "read-seconds": 0.02},
        DRAWS,
    ),
    Planted(
        "noisy-workers",
        {"num_workers": 16, "prefetch_factor": 4, "persistent_workers": False},
        LOADER,
        SIMULATED,
        {"workers": 16},
        seconds=60,  # the workers fill their prefetched batches at first, and only then take the training thread's core
    ),
    Planted(
        "no-workers",
        {"num_workers": 0, **AS_IT_IS},
        LOADER,
        SIMULATED,
        {"workers": 0, "prefetch-factor": 2, "cpu-ms-an-image": 8, "threads-a-worker": 1, "steps": 32},
    ),
    Planted(
        "costly-images",
        {"num_workers": 0, "worker_type": "processes", "compose_augmentation": False},
        {
            "num_workers": (0, 1, 2, 3, 4, 8),
            "worker_type": ("processes", "threads"),
            "compose_augmentation": (False, True),
        },
        arguments={"augmentation_load": 3, "image_size": 64, "max_steps": 30},
        allow=("compose_augmentation",),
    ),
    Planted(
        "epoch-starts",
        {"num_workers": 2, **AS_IT_IS},
        {**LOADER, "num_workers": (0, 1, 2, 3, 4, 8)},
        "plain",
        {**PHOTOGRAPHS, "workers": 2, "images": 80, "open-seconds": 0.6},
        DRAWS,
    ),
    Planted(
        "checkpoints",
        {"checkpoint_every": 1, "num_workers": 1, "worker_type": "processes"},
        {
            "checkpoint_every": (1, 2, 5, 10, 20),
            "num_workers": (0, 1, 2),
            "worker_type": ("processes", "threads"),
        },
        arguments={"model": "resnet18", "image_size": 32, "max_steps": 40},
        allow=("checkpoint_every",),
        checkpoints=True,
    ),
    Planted(
        "healthy",
        {"num_workers": 1, "worker_type": "processes"},
        {"num_workers": (0, 1, 2, 4), "worker_type": ("processes", "threads")},
        arguments={"model": "resnet18", "image_size": 128, "max_steps": 20},
    ),
)
