"""Seconds per distillation step in four implementations: this kit, a plain PyTorch loop, torchdistill and timm. `make bench-training`.

vit_small_patch16_224 teaches vit_tiny_patch16_224 on the CPU: AdamW, temperature 4, half of the loss from the labels. All see
the same uint8 pixels in the same order from the same loader and normalise them; all start with the same weights and compute
the same loss, which is checked. They take turns, step by step, in one process; a ratio is the median of the rounds' ratios.

The peers follow their own examples: the plain loop as in KT's post, torchdistill's `DistillationBox` (it does not support
autocast: in bf16 it gets one around its forward pass), timm's `LogitDistillationTask` in the loop of timm's train.py. Ours is
`training.engine.loop.train` with the task of train_kd.py. Needs the `frameworks` extra.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import timm.optim
import torch
import torch.nn.functional as F
from engine import (
    ALONE,
    HARD_LABEL_WEIGHT,
    LEARNING_RATE,
    SIZE,
    STUDENT,
    TEACHER,
    TEMPERATURE,
    TOP_K,
    VIEWS,
    Engine,
    Samples,
    alternate,
    machine,
    model,
    noise,
    open_engine,
    ratio,
    settings,
    table,
    teacher,
)
from timm.task import LogitDistillationTask
from torch import nn
from training.data.batches import LabelledBatch
from training.data.loaders import Data, open_loaders
from training.settings.distillation import TeacherCacheSettings
from training.teacher.frozen import Teacher

Step = Callable[[LabelledBatch], torch.Tensor]
"""One step of a peer; its loss."""

PEERS = ("plain PyTorch", "torchdistill 1.1.5", "timm task")
ONLINE, BF16_TEACHER, CACHED, NO_TEACHER = "ours", "ours, bf16 teacher", "ours, filled cache", "ours, no teacher"

WARM_UP = 2
"""Steps before the first that counts. They are one epoch, so that they fill the cache."""

SAME = {"fp32": 1e-4, "bf16": 5e-3}
"""Maximum relative difference of the first step's losses, by what computes: float32, or anything in bf16."""


class Peer:
    """Steps of a peer over the same batches as ours."""

    def __init__(self, data: Data, batch: int, step: Step):
        self._step, self.losses = step, []
        self._batches = self._endless(data, batch)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.losses.append(self._step(next(self._batches)))

    @staticmethod
    def _endless(data: Data, batch: int) -> Iterator[LabelledBatch]:
        chosen = settings(global_batch_size=batch)
        loaders = open_loaders(data, chosen, ALONE, batch_size_per_device=batch, views=VIEWS)
        for epoch in range(1, chosen.epochs):
            loaders.train_batches.start(epoch)
            yield from loaders.train


def pixels(batch: LabelledBatch) -> torch.Tensor:
    """Both models were published for a mean and standard deviation of 0.5."""
    return (batch.images.float() / 255 - 0.5) / 0.5


def plain(student: nn.Module, frozen: nn.Module, autocast: Callable[[], AbstractContextManager]) -> Step:
    """The loop of KT's post: two forward passes, one loss, one backward pass."""
    student, frozen = copy.deepcopy(student).train(), copy.deepcopy(frozen).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step(batch: LabelledBatch) -> torch.Tensor:
        images = pixels(batch)
        optimizer.zero_grad()
        with autocast():
            with torch.no_grad():
                target = frozen(images)
            logits = student(images)
            soft = F.kl_div(
                F.log_softmax(logits / TEMPERATURE, dim=1),
                F.softmax(target / TEMPERATURE, dim=1),
                reduction="batchmean",
            )
            labels = F.cross_entropy(logits, batch.labels)
            loss = HARD_LABEL_WEIGHT * labels + (1 - HARD_LABEL_WEIGHT) * TEMPERATURE**2 * soft
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def torchdistill(student: nn.Module, frozen: nn.Module, autocast: Callable[[], AbstractContextManager]) -> Step:
    """The loop of its examples/torchvision/image_classification.py around its DistillationBox."""
    from torchdistill.common.constant import def_logger
    from torchdistill.core.distillation import get_distillation_box

    def_logger.setLevel(logging.ERROR)
    kd = {
        "key": "KDLoss",
        "kwargs": {
            "student_module_path": ".",
            "student_module_io": "output",
            "teacher_module_path": ".",
            "teacher_module_io": "output",
            "temperature": TEMPERATURE,
            "alpha": HARD_LABEL_WEIGHT,
            "reduction": "batchmean",
        },
    }
    config = {
        "num_epochs": 1,
        "teacher": {"forward_proc": "forward_batch_only", "requires_grad": False, "sequential": [], "wrapper": None},
        "student": {"forward_proc": "forward_batch_only", "requires_grad": True, "sequential": [], "wrapper": None},
        "optimizer": {"key": "AdamW", "kwargs": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "criterion": {"key": "WeightedSumLoss", "kwargs": {"sub_terms": {"kd": {"criterion": kd, "weight": 1.0}}}},
    }
    box = get_distillation_box(
        copy.deepcopy(frozen), copy.deepcopy(student), {}, config, torch.device("cpu"), None, False, 1
    )
    box.student_model.train()
    box.teacher_model.eval()  # it does not do so itself

    def step(batch: LabelledBatch) -> torch.Tensor:
        box.pre_forward_process()
        images = pixels(batch)
        with autocast():
            loss = box.forward_process(images, batch.labels, None)
        box.post_forward_process(loss)
        loss.item()  # its metric logger does so
        return loss.detach()

    return step


def timm_task(student: nn.Module, frozen: nn.Module, autocast: Callable[[], AbstractContextManager]) -> Step:
    """The loop of timm's train.py around its task."""
    task = LogitDistillationTask(
        copy.deepcopy(student),
        copy.deepcopy(frozen),
        criterion=nn.CrossEntropyLoss(),
        task_loss_weight=HARD_LABEL_WEIGHT,
        temperature=TEMPERATURE,
        device=torch.device("cpu"),
        verbose=False,
    )
    task.train()
    optimizer = timm.optim.create_optimizer_v2(task.trainable_module, "adamw", lr=LEARNING_RATE, weight_decay=0.0)

    def step(batch: LabelledBatch) -> torch.Tensor:
        images = pixels(batch)
        with autocast():
            loss = task(images, batch.labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def contestants(folder: Path, data: Data, precision: str, batch: int) -> dict[str, Peer | Engine]:
    """Every contestant by name, each with its own models."""
    student, frozen = model(STUDENT, seed=0), model(TEACHER, seed=1)
    frozen_fp32, frozen_bf16 = (teacher(TEACHER, number_format) for number_format in ("fp32", "bf16"))
    frozen.load_state_dict(frozen_fp32.members[0].model.state_dict())

    def autocast() -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()

    def ours(name: str, frozen: Teacher | None, **values: Any) -> Engine:
        chosen = settings(precision=precision, global_batch_size=batch, **values)
        return open_engine(folder / name, data, student, frozen, chosen)

    cache = TeacherCacheSettings(views=VIEWS, top_k=TOP_K)
    makers = (plain, torchdistill, timm_task)
    found = {name: Peer(data, batch, make(student.model, frozen.model, autocast)) for name, make in zip(PEERS, makers)}
    usual = frozen_bf16 if precision == "bf16" else frozen_fp32
    found[ONLINE] = ours(ONLINE, usual)
    if precision == "fp32":
        found[BF16_TEACHER] = ours(BF16_TEACHER, frozen_bf16, teacher_precision="bf16")
    found[CACHED] = ours(CACHED, usual, teacher_cache=cache)
    found[NO_TEACHER] = ours(NO_TEACHER, None, hard_label_weight=1.0)
    return found


def require_the_same(found: dict[str, Peer | Engine], precision: str) -> None:
    """Check that all that asked the teacher had the same first loss. The cache knows ten logits of a thousand."""
    losses = {name: float(one.losses[0]) for name, one in found.items() if name not in (CACHED, NO_TEACHER)}
    first = losses[PEERS[0]]
    for name, loss in losses.items():
        most = SAME["bf16" if name == BF16_TEACHER else precision] * first
        assert abs(loss - first) <= most, f"{name} has the loss {loss} in its first step, {PEERS[0]} has {first}"


def report(found: dict[str, Peer | Engine], samples: dict[str, Samples], batch: int) -> str:
    """The table: medians, and ratios to the best peer for each kind of time."""
    best = {
        kind: min(PEERS, key=lambda name: statistics.median(getattr(samples[name], kind))) for kind in ("cpu", "wall")
    }
    rows = [
        ("", "CPU s", "wall s", "images/s", "× best peer, CPU", "× best peer, wall", "first loss", "last loss"),
    ]
    for name, one in found.items():
        sample = samples[name]
        times = [
            "{:.2f} ({:.2f}…{:.2f})".format(*ratio(getattr(samples[best[kind]], kind), getattr(sample, kind)))
            for kind in ("cpu", "wall")
        ]
        cpu, wall = statistics.median(sample.cpu), statistics.median(sample.wall)
        losses = [f"{float(one.losses[place]):.5f}" for place in (0, -1)]
        rows.append((name, f"{cpu:.3f}", f"{wall:.3f}", f"{batch / wall:.1f}", *times, *losses))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="of each in a round")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", nargs="*", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    data = noise(WARM_UP * asked.batch)
    print(f"{TEACHER} -> {STUDENT}, {SIZE} px, batch {asked.batch}, AdamW; {machine(asked.threads)}")
    print(f"{asked.rounds} rounds of {asked.steps} step(s) of each in turn; medians, in brackets the quartiles")
    for precision in asked.precision:
        with tempfile.TemporaryDirectory() as folder:
            found = contestants(Path(folder), data, precision, asked.batch)
            for one in found.values():
                one.steps(WARM_UP)
            require_the_same(found, precision)
            samples = alternate({name: one.steps for name, one in found.items()}, asked.rounds, asked.steps)
        print(f"\n{precision}\n\n{report(found, samples, asked.batch)}\n")
        for kind in ("cpu", "wall"):
            taken = {name: getattr(sample, kind) for name, sample in samples.items()}
            print(
                f"with the cache / no teacher, {kind}: {{:.3f}} ({{:.3f}}…{{:.3f}})".format(
                    *ratio(taken[CACHED], taken[NO_TEACHER])
                )
            )


if __name__ == "__main__":
    main()
