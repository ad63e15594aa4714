"""Shared by the training benchmarks: images of noise, the engine set up as in train_kd.py, and tables."""

from __future__ import annotations

import copy
import io
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "entrypoints"))  # as the toolkit puts the code folder there

import timm  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import Dataset, default_collate  # noqa: E402
from training.data.batches import LabelledBatch, TrainingBatches  # noqa: E402
from training.data.loaders import Data, Loaders, open_loaders  # noqa: E402
from training.distributed.world import World  # noqa: E402
from training.engine.loop import Task, train  # noqa: E402
from training.engine.run import Run, open_run  # noqa: E402
from training.engine.state import TrainingState, prepare  # noqa: E402
from training.models import timm_models  # noqa: E402
from training.runtime.environment import Environment  # noqa: E402
from training.settings.distillation import DistillationSettings  # noqa: E402
from training.tasks.distillation import Distillation  # noqa: E402
from training.tasks.students import Student  # noqa: E402
from training.teacher.cache import TeacherCache  # noqa: E402
from training.teacher.frozen import FrozenModel, Teacher  # noqa: E402
from training.teacher.logit_records import record_layout  # noqa: E402

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")

TEACHER, STUDENT, SIZE, CLASSES = "vit_small_patch16_224", "vit_tiny_patch16_224", 224, 1000

TEMPERATURE, HARD_LABEL_WEIGHT, LEARNING_RATE, TOP_K = 4.0, 0.5, 1e-4, 10

VIEWS = 1
"""Of each image: every epoch sees the same ones, with a cache and without."""

STEPS = 1_000_000
"""Steps of the schedule: enough for the learning rate to stay constant in the measured steps."""


class Noise(Dataset):
    """Images of noise as a loader returns them, uint8; an item is a SampleKey."""

    def __init__(self, images: int, size: int = SIZE):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(0, CLASSES, (images,), generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, draw: tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        view, number = draw
        return self.pixels[number], number, view


def noise(images: int, size: int = SIZE) -> Data:
    """N images, in batches like the kit's own data."""
    dataset = Noise(images, size)

    def collate(items: list[tuple[torch.Tensor, int, int]]) -> LabelledBatch:
        pixels, numbers, views = default_collate(items)
        labels = dataset.labels[numbers]
        return LabelledBatch(pixels, labels, labels, torch.ones(len(labels)), numbers, views)

    return Data([str(number) for number in range(CLASSES)], dataset, dataset, collate)


def model(name: str, seed: int, **options: Any) -> timm_models.Normalized:
    """A model with random weights, the same per seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return timm_models.build(name, options, CLASSES)


def teacher(name: str, precision: str, **options: Any) -> Teacher:
    """The frozen teacher of all benchmarks. Its logits are spread like a trained model's, not like those of random weights."""
    made = model(name, seed=1, **options)
    with torch.no_grad():
        made.model.get_classifier().weight.mul_(2.5)
    return Teacher([FrozenModel(made, name, options, precision=precision)])


def settings(**values: Any) -> DistillationSettings:
    """Settings of all runs: nothing but the step, so that every implementation computes the same numbers."""
    common = {
        "student": STUDENT,
        "temperature": TEMPERATURE,
        "hard_label_weight": HARD_LABEL_WEIGHT,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
        "warmup_fraction": 0.0,
        "max_grad_norm": None,
        "epochs": STEPS,
        "evaluate_every": STEPS,
        "checkpoint_every": STEPS,
    }
    return DistillationSettings(**{**common, **values})


class Recorded:
    """A task whose losses are kept, so that two implementations can be compared."""

    def __init__(self, task: Task):
        self.task, self.losses = task, []

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        self.task.begin_epoch(epoch, batches)

    def __call__(self, batch: LabelledBatch) -> Iterator[dict[str, torch.Tensor]]:
        for losses in self.task(batch):
            self.losses.append(losses["loss"].detach())
            yield losses


@dataclass
class Engine:
    """A run of the kit's own loop that continues for N steps whenever asked."""

    task: Recorded
    state: TrainingState
    loaders: Loaders
    run: Run

    @property
    def losses(self) -> list[torch.Tensor]:
        """Of each step."""
        return self.task.losses

    def steps(self, count: int) -> None:
        """`training.engine.loop.train`, from where it stopped, with its step lines discarded."""
        with redirect_stdout(io.StringIO()):
            train(self.task, lambda _model: {}, [self.state], self.loaders, self.state.step + count, self.run)


def open_engine(
    folder: Path,
    data: Data,
    student: timm_models.Normalized,
    frozen: Teacher | None,
    chosen: DistillationSettings,
    world: World = ALONE,
) -> Engine:
    """The engine as train_kd.py assembles it, with our models and images."""
    environment = Environment("algo-1", folder / "model", folder / "data", folder / "failure", {}, None)
    with redirect_stdout(io.StringIO()):
        _, run = open_run(chosen, environment, world)
    state = prepare(copy.deepcopy(student), chosen, STEPS, world)
    kept = chosen.teacher_cache
    size = chosen.batch_size_per_device or chosen.global_batch_size // world.size
    loaders = open_loaders(data, chosen, world, batch_size_per_device=size, views=VIEWS)
    cache = None
    if kept is not None:
        parts = {"teacher weights": "benchmark", "transform": "none", "data": "noise", "dtype": chosen.precision}
        cache = TeacherCache.open(
            folder / "cache",
            parts=parts,
            images=len(data.training),
            layout=record_layout(CLASSES, kept.top_k, kept.precision),
            views=kept.views,
            world=world,
        )
    task = Distillation([Student(state.trained, chosen)], frozen, cache, timeline=run.timeline)
    return Engine(Recorded(task), state, loaders, run)


@dataclass
class Samples:
    """One contestant's seconds per step, round by round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def add(self, work: Callable[[int], None], steps: int) -> None:
        """Measure N steps of it; CPU time is that of all threads."""
        cpu, wall = time.process_time(), time.perf_counter()
        work(steps)
        self.wall.append((time.perf_counter() - wall) / steps)
        self.cpu.append((time.process_time() - cpu) / steps)


def alternate(works: Mapping[str, Callable[[int], None]], rounds: int, steps: int) -> dict[str, Samples]:
    """N steps of each in turn, round after round, each round starting with another."""
    samples, names = {name: Samples() for name in works}, [*works]
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].add(works[name], steps)
        progress(f"round {number + 1} of {rounds}")
    return samples


def ratio(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the first to the second: the median of the rounds' ratios, and their quartiles."""
    ratios = sorted(one / other for one, other in zip(first, second, strict=True))
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, low, high


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first being the header, as a Markdown table: first column left-aligned, numbers right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


def machine(threads: int) -> str:
    """A line for humans: where and with what this was measured, and how busy the machine was."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{name}, {os.cpu_count()} CPUs, {threads} thread{'s' if threads > 1 else ''}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, timm {timm.__version__}; load average {load}"
    )


def progress(text: str) -> None:
    """Show progress on a terminal's last line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\033[K")
        sys.stderr.flush()
