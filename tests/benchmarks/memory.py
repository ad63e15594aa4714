"""The memory that ZeRO, a bf16 teacher and the teacher cache save per process, as measured and as `batch_size.explain` has it.

`make bench-training`. vit_base_patch16_224 teaches vit_small_patch16_224. Each row is its own set of gloo processes that
train two steps. The optimizer's state and the teacher's weights are counted tensor by tensor; resident memory is the
system's count for the largest process, without what it had once the libraries were loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from engine import ALONE, VIEWS, machine, model, noise, open_engine, settings, table, teacher
from torch.distributed.optim import ZeroRedundancyOptimizer
from training.distributed.world import process_group
from training.engine import batch_size, memory
from training.engine.state import prepare
from training.settings.distillation import TeacherCacheSettings
from training.tasks.distillation import with_teacher

TEACHER, STUDENT = "vit_base_patch16_224", "vit_small_patch16_224"

GPU = 40_000_000_000
"""Bytes of an A100, for which the last lines say what fits."""


@dataclass(frozen=True)
class Case:
    """One row."""

    processes: int = 1
    zero: bool = False
    teacher: str | None = None
    """Its number format; None: there is none."""
    cached: bool = False


CASES = {
    "2 processes": Case(2),
    **{f"{count} processes, ZeRO": Case(count, zero=True) for count in (2, 4, 8)},
    "no teacher": Case(),
    "teacher in fp32": Case(teacher="fp32"),
    "teacher in bf16": Case(teacher="bf16"),
    "teacher in fp32, filled cache": Case(teacher="fp32", cached=True),
}


def values_of(case: Case, world_size: int) -> dict:
    """Its settings."""
    values = {"student": STUDENT, "zero": case.zero, "global_batch_size": 2 * world_size}
    if case.teacher is None:
        return values | {"hard_label_weight": 1.0}
    values |= {"teacher_precision": case.teacher}
    return values | ({"teacher_cache": TeacherCacheSettings(views=VIEWS)} if case.cached else {})


def rank(case: Case) -> None:
    """One of the processes: what it holds, as a line of JSON."""
    torch.set_num_threads(1)
    before = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder, process_group() as world:
        frozen = None if case.teacher is None else teacher(TEACHER, case.teacher)
        chosen = settings(**values_of(case, world.size))
        engine = open_engine(
            Path(folder), noise(chosen.global_batch_size), model(STUDENT, seed=0), frozen, chosen, world
        )
        engine.steps(2)
        optimizer = engine.state.optimizer
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        held = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        print(
            json.dumps(
                {
                    "optimizer": sum(value.numel() * value.element_size() for value in held),
                    "said": memory.optimizer_bytes(engine.state.model, chosen, world),
                    "teacher": 0 if frozen is None or case.cached else frozen.memory_bytes,
                    "resident": psutil.Process().memory_info().rss - before,
                }
            ),
            flush=True,
        )


def measured(case: Case) -> list[dict[str, int]]:
    """The output of each of a case's processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    group = {"WORLD_SIZE": str(case.processes)} if case.processes > 1 else {}
    places = [
        {"RANK": str(number), "LOCAL_RANK": str(number), **group} if group else {} for number in range(case.processes)
    ]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, **place}, stdout=subprocess.PIPE, text=True)
        for place in places
    ]
    answers = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit(f"{case} failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def explained(case: Case) -> list[str]:
    """A run's memory report, for a GPU."""
    chosen = settings(**values_of(case, 1), precision="bf16")
    data = noise(2)
    now, without = memory.measure([prepare(model(STUDENT, seed=0), chosen, 1, ALONE)], data)
    frozen, image = teacher(TEACHER, case.teacher), memory.example(data, ALONE.device)
    return batch_size.explain(*with_teacher(now, without, frozen, chosen, image, cached=case.cached), GPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        rank(Case(**json.loads(asked.case)))
        return
    print(f"{TEACHER} -> {STUDENT}, 224 px, 2 images a process, fp32; {machine(1)} a process\n")
    rows = [
        (
            "MB a process",
            "optimizer, most",
            "optimizer, least",
            "batch_size.explain",
            "teacher on the device",
            "resident",
        )
    ]
    for name, case in CASES.items():
        held = measured(case)
        optimizer = [each["optimizer"] for each in held]
        most = {key: max(each[key] for each in held) for key in held[0]}
        numbers = (max(optimizer), min(optimizer), most["said"], most["teacher"], most["resident"])
        rows.append((name, *(f"{number / 1e6:.1f}" for number in numbers)))
    print(table(rows))
    for name in ("teacher in bf16", "teacher in fp32, filled cache"):
        print(f"\n{name}, in a run in bf16 on a GPU of {GPU / 1e9:.0f} GB:", *explained(CASES[name]), sep="\n")


if __name__ == "__main__":
    main()
