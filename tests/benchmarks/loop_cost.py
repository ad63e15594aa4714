"""What the kit's own loop costs per step: metrics, timers, checks, the stop signal, the report. `make bench-training`.

The loop trains a model of one number on a ready batch, with the phases and losses of distillation, beside a bare loop
that does the same (forward, backward, optimizer step). The difference is the cost of the loop; the last column divides it by a
real step, vit_small_patch16_224 -> vit_tiny_patch16_224 with the cache filled, the shortest one there is.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from engine import (
    SIZE,
    STUDENT,
    TEACHER,
    VIEWS,
    Engine,
    Samples,
    alternate,
    machine,
    model,
    noise,
    open_engine,
    settings,
    table,
    teacher,
)
from torch import nn
from training.data.batches import LabelledBatch, TrainingBatches
from training.measure.timeline import Timeline
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import Distillation

EPOCH = 1000
"""Steps of the loop per epoch."""


class One(nn.Module):
    """A model of one number, which is its only logit."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, _images: torch.Tensor) -> torch.Tensor:
        return self.weight * 1.0


class Nothing(Distillation):
    """Distillation's phases and loss names around one multiplication."""

    def __init__(self, student: nn.Module, timeline: Timeline):
        self.student, self.timeline = student, timeline

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """There is no cache."""

    def __call__(self, batch: LabelledBatch) -> Iterator[dict[str, torch.Tensor]]:
        yield self.nothing(batch)

    def nothing(self, batch: LabelledBatch) -> dict[str, torch.Tensor]:
        phase = self.timeline.phase
        with phase("teacher_forward"):
            target = batch.lam
        with phase("student_forward"):
            logits = self.student(batch.images)
        with phase("loss"):
            return {"loss": logits, "label_loss": logits, "teacher_loss": target}


class Ready:
    """A loader whose batch is always the same, so that it costs nothing."""

    def __init__(self):
        number = torch.zeros(())
        self.batch = LabelledBatch(*[number] * len(LabelledBatch._fields))

    def __iter__(self) -> Iterator[LabelledBatch]:
        return itertools.repeat(self.batch)


def bare(steps: int) -> None:
    """The same without the kit."""
    number, batch = One(), Ready().batch
    optimizer = torch.optim.AdamW(number.parameters(), fused=True)
    for _ in range(steps):
        number(batch.images).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def looped(folder: Path, log_every: int) -> Engine:
    """The engine around nothing."""
    chosen = settings(global_batch_size=1, log_every=log_every, hard_label_weight=1.0)
    engine = open_engine(folder, noise(EPOCH, 1), One(), None, chosen)
    task = Nothing(engine.state.trained, engine.run.timeline)
    return replace(engine, task=task, loaders=replace(engine.loaders, train=Ready()))


def real(folder: Path, precision: str, batch: int) -> Engine:
    """A step with the cache filled."""
    cache = TeacherCacheSettings(views=VIEWS)
    chosen = settings(precision=precision, global_batch_size=batch, teacher_cache=cache)
    frozen = teacher(TEACHER, chosen.teacher_number_format)
    engine = open_engine(folder, noise(2 * batch), model(STUDENT, seed=0), frozen, chosen)
    engine.steps(2)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of each loop in a round")
    parser.add_argument("--batch", type=int, default=16, help="of the real step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(
        f"{machine(asked.threads)}\n{asked.rounds} rounds of {asked.steps} steps of each loop in turn; medians of CPU time\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = {"bf16": real(folder / "bf16", "bf16", asked.batch), "fp32": real(folder / "fp32", "fp32", asked.batch)}
        loops = {f"log_every {every}": looped(folder / str(every), every).steps for every in (10, 1)}
        samples = alternate({"a bare loop": bare, **loops}, asked.rounds, asked.steps)
        whole = alternate({name: engine.steps for name, engine in steps.items()}, max(3, asked.rounds // 4), 1)
    seconds = {name: statistics.median(sample.cpu) for name, sample in whole.items()}
    print(
        *(f"a step of {SIZE} px, batch {asked.batch}, {name}: {value:.3f} s" for name, value in seconds.items()),
        "",
        sep="\n",
    )
    floor = samples.pop("a bare loop").cpu
    rows = [("loop", "µs a step", "more than a bare loop", *(f"% of a {name} step" for name in seconds))]
    for name, sample in {"bare": Samples(floor), **samples}.items():
        more = statistics.median(ours - other for ours, other in zip(sample.cpu, floor, strict=True))
        shares = [f"{100 * more / value:.3f}" for value in seconds.values()]
        rows.append((name, f"{1e6 * statistics.median(sample.cpu):.0f}", f"{1e6 * more:.0f}", *shares))
    print(table(rows))


if __name__ == "__main__":
    main()
