"""The bottlenecks that planted_bottlenecks.py plants: their code, and runs with a milder and a harsher form of each."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BASE = {
    "model": "mobilenetv3_small_050",
    "image_size": 96,
    "global_batch_size": 32,
    "epochs": 100_000,
    "max_steps": 60,
    "log_every": 2,
    "evaluate_every": 100_000,
    "num_workers": 1,
    "learning_rate": 1e-4,
    "worker_type": "processes",
}
"""A small model on photographs of 500 by 375 pixels."""

HEAVY = {"model": "resnet18", "image_size": 128, "max_steps": 30}
"""So much compute that nothing else shows."""

QUICK_UPDATE = {"optimizer": "sgd", "max_grad_norm": None}
"""With few images a process, clipping and updating the weights take longer than the exchange, and the batch would rightly come first."""

TEACHER = {"model": "resnet34"}

DISTILS = {"image_size": 64, "epochs": 10, "max_steps": 120, "images_per_class": 38}
"""So many epochs that a cache of the teacher's answers is read more often than filled."""

SERVED = {"worker_type": "remote", "without_servers": "fail", "augmentation_load": 1}
"""Images prepared by other hosts, none by the training process."""

# Code plants run before the script. Each patches one place; its numbers set how harsh it is.
PYTHON_IN_THE_LOOP = """
import time
from training.engine import loop
step = loop._step
def slower(*arguments):
    until = time.perf_counter() + {seconds}
    while time.perf_counter() < until:
        sum(range(1000))
    return step(*arguments)
loop._step = slower
"""
SLEEP_SOMETIMES = """
import time
from training.engine import loop
step, calls = loop._step, []
def sometimes(*arguments):
    calls.append(1)
    if len(calls) % {every} == 0:
        time.sleep({seconds})
    return step(*arguments)
loop._step = sometimes
"""
SLOW_READS = """
import time
from training.data.sources import folders
read = folders.LabelledFolder.image
def slow(self, number):
    time.sleep({seconds})
    return read(self, number)
folders.LabelledFolder.image = slow
"""
MEMORY_THAT_IS_KEPT = """
from training.engine import loop
step, kept = loop._step, []
def keeping(*arguments):
    kept.append(b"x" * int({megabytes} * 1e6))
    return step(*arguments)
loop._step = keeping
"""
SLOW_RANK = """
import os, time
from training.tasks import classification
call = classification.Classification.__call__
def slow(self, batch):
    if os.environ["RANK"] == "1":
        with self.timeline.phase("augment"):
            until = time.perf_counter() + {seconds}
            while time.perf_counter() < until:
                sum(range(1000))
    return call(self, batch)
classification.Classification.__call__ = slow
"""
SLOW_EPOCHS = """
import time
from training.data import batches
start = batches.TrainingBatches.start
def slow(self, *arguments):
    time.sleep({seconds})
    return start(self, *arguments)
batches.TrainingBatches.start = slow
"""
SLOW_COPIES = """
import time
from training.data import batches
fields = batches.LabelledBatch._asdict
def slow(self):
    time.sleep({seconds})
    return fields(self)
batches.LabelledBatch._asdict = slow
"""
GROUP = """
import os, pathlib
root = next(place for place in map(pathlib.Path, {roots!r}) if place.is_dir())
run = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"])
group = root / f"planted-{{run.parent.name}}-{{run.name}}-{{os.getpid()}}"
group.mkdir()
(group / "cgroup.procs").write_text(str(os.getpid()))
"""
LIMIT = """
if (group / "cpu.max").exists():
    (group / "cpu.max").write_text("{quota} 100000")
else:
    (group / "cpu.cfs_quota_us").write_text("{quota}")
"""
QUOTA = GROUP + LIMIT
SERVERS_COME_SECONDS = 300
"""From the trainer's first step on; Ray itself gives up earlier on several nodes that start on one core."""
SERVERS_OF_A_PART_OF_A_CORE = f"""
import json, os, pathlib, threading, time
all_serve = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "all-serve")
serves = os.environ["SM_CURRENT_HOST"] != "127.0.0.1"
os.sched_setaffinity(0, [int(serves)])
if serves:
{textwrap.indent(GROUP, "    ")}
    def limit():
        while not all_serve.exists():
            time.sleep(0.1)
{textwrap.indent(LIMIT, "        ")}
    threading.Thread(target=limit, daemon=True).start()
else:
    from training.engine import loop
    from training.servers.pool import Pool
    train, begin_pool, pools = loop.train, Pool.__init__, []
    def kept(self, *arguments, **options):
        begin_pool(self, *arguments, **options)
        pools.append(self)
    def when_all_serve(*arguments):
        until = time.monotonic() + {SERVERS_COME_SECONDS}
        while len(pools[-1].live) < len(json.loads(os.environ["SM_HOSTS"])) - 1:
            if time.monotonic() > until:
                raise TimeoutError("the hosts that serve did not start")
            pools[-1].look()
            pools[-1].receive(0.1)
        all_serve.touch()
        return train(*arguments)
    Pool.__init__, loop.train = kept, when_all_serve
"""
"""The trainer has the first core. The hosts that prepare its images share the second, of which each has a quota once training
begins. It begins when all of them serve, since Ray starts slowly on a part of a core."""
CONTROL_GROUPS = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"]
"""Where CPU quotas are set: version 1, version 2."""


def photographs(folder: Path, train: int = 40, held_out: int = 20) -> None:
    """10 classes of images, about as detailed as photographs."""
    random = np.random.default_rng(0)
    for part, each in (("train", train), ("validation", held_out)):
        for label in range(10):
            place = folder / part / f"class-{label}"
            place.mkdir(parents=True)
            for number in range(each):
                coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(
                    (500, 375), Image.BICUBIC
                )
                pixels = np.asarray(coarse, np.int16) + random.normal(0, 12, (375, 500, 3)).astype(np.int16)
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


@dataclass(frozen=True)
class Case:
    """One run with something planted; `kind` is the right finding, None for a healthy run."""

    kind: str | None
    form: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    plant: str = ""
    """Python that runs before the script."""
    ranks: int = 1
    threads: int | None = None
    """Of each process's compute; None: torch's choice."""
    fixed: Mapping[str, Any] | None = None
    """Settings in place of the finding's fix, if that changes code, the disk or the host. {}: only the plant is removed, which is that
    change."""
    distils: bool = False
    checkpoints: bool = False
    servers: int = 0
    """Hosts that prepare the images, as processes on this machine; the fix is another number of them."""

    @property
    def sets_a_quota(self) -> bool:
        """Whether it needs root."""
        return "cpu.max" in self.plant


CASES = (
    Case("too_many_workers", "8 on 2 cores", {"num_workers": 4 * 2, "augmentation_load": 2}),
    Case("too_many_workers", "16 on 2 cores", {"num_workers": 8 * 2, "augmentation_load": 2}),
    Case(
        "too_few_workers",
        "none, cheap images",
        {**HEAVY, "num_workers": 0, "image_size": 36, "max_steps": 80, "augmentation_load": 1},
        threads=1,
    ),
    Case(
        "too_few_workers",
        "none, costly images",
        {"num_workers": 0, "model": "resnet10t", "augmentation_load": 3},
        threads=1,
    ),
    Case("data_bound", "12 rounds of augmentation", {"num_workers": 2, "augmentation_load": 12}, threads=1),
    Case("data_bound", "20 rounds of augmentation", {"num_workers": 2, "augmentation_load": 20}, threads=1),
    Case("data_bound", "12 rounds by one worker on the model's cores", {"image_size": 160, "augmentation_load": 12}),
    Case("data_bound", "20 rounds by one worker on the model's cores", {"image_size": 224, "augmentation_load": 20}),
    Case("storage_bound", "20 ms an image", {"num_workers": 2}, SLOW_READS.format(seconds=0.02), fixed={}),
    Case("storage_bound", "80 ms an image", {"num_workers": 2}, SLOW_READS.format(seconds=0.08), fixed={}),
    Case("main_thread_bound", "a fifth of the step", HEAVY, PYTHON_IN_THE_LOOP.format(seconds=0.25), fixed={}),
    Case("main_thread_bound", "most of the step", HEAVY, PYTHON_IN_THE_LOOP.format(seconds=1.5), fixed={}),
    Case("teacher_bound", "twice the student", {**DISTILS, "student": "resnet18"}, distils=True, checkpoints=True),
    Case(
        "teacher_bound",
        "far larger than the student",
        {**DISTILS, "student": "mobilenetv3_small_050"},
        distils=True,
        checkpoints=True,
    ),
    Case(
        "checkpoint_stalls",
        "every 8 steps",
        {**HEAVY, "model": "resnet34", "image_size": 64, "checkpoint_every": 8},
        checkpoints=True,
    ),
    Case("checkpoint_stalls", "every step", {**HEAVY, "image_size": 64, "checkpoint_every": 1}, checkpoints=True),
    Case("evaluation_stalls", "every 12 steps", {**HEAVY, "evaluate_every": 1}),
    Case("evaluation_stalls", "every 2 steps", {**HEAVY, "evaluate_every": 1, "images_per_class": 8}),
    Case("small_batch", "4 images", {"model": "resnet18", "image_size": 32, "global_batch_size": 4, "max_steps": 200}),
    Case("small_batch", "2 images", {"model": "resnet18", "image_size": 32, "global_batch_size": 2, "max_steps": 200}),
    Case(
        "slow_rank",
        "by a third",
        {**HEAVY, "num_workers": 0},
        SLOW_RANK.format(seconds=0.5),
        ranks=2,
        threads=1,
        fixed={},
    ),
    Case(
        "slow_rank", "by far", {**HEAVY, "num_workers": 0}, SLOW_RANK.format(seconds=1.5), ranks=2, threads=1, fixed={}
    ),
    Case(
        "communication_bound",
        "86 MB",
        {
            "model": "vit_small_patch16_224",
            "model_options": {"img_size": 32},
            "image_size": 32,
            "global_batch_size": 8,
            **QUICK_UPDATE,
        },
        ranks=2,
        threads=1,
    ),
    Case(
        "communication_bound",
        "343 MB",
        {
            "model": "vit_base_patch16_224",
            "model_options": {"img_size": 32},
            "image_size": 32,
            "global_batch_size": 8,
            **QUICK_UPDATE,
        },
        ranks=2,
        threads=1,
    ),
    Case(
        "step_outliers",
        "4 s in every 25th",
        {**HEAVY, "max_steps": 75},
        SLEEP_SOMETIMES.format(every=25, seconds=4),
        fixed={},
    ),
    Case(
        "step_outliers",
        "10 s in every 20th",
        {**HEAVY, "max_steps": 60},
        SLEEP_SOMETIMES.format(every=20, seconds=10),
        fixed={},
    ),
    Case("memory_growth", "slow", {**HEAVY, "max_steps": 60}, MEMORY_THAT_IS_KEPT.format(megabytes="{slow}"), fixed={}),
    Case("memory_growth", "fast", {**HEAVY, "max_steps": 60}, MEMORY_THAT_IS_KEPT.format(megabytes="{fast}"), fixed={}),
    Case(
        "slow_epoch_starts",
        "1 s",
        {**HEAVY, "images_per_class": 16, "max_steps": 40},
        SLOW_EPOCHS.format(seconds=1.0),
        fixed={},
    ),
    Case(
        "slow_epoch_starts",
        "5 s",
        {**HEAVY, "images_per_class": 16, "max_steps": 40},
        SLOW_EPOCHS.format(seconds=5.0),
        fixed={},
    ),
    Case("host_to_device_bound", "a fifth of the step", HEAVY, SLOW_COPIES.format(seconds=0.25), fixed={}),
    Case("host_to_device_bound", "most of the step", HEAVY, SLOW_COPIES.format(seconds=1.5), fixed={}),
    Case("cpu_throttled", "1.2 cores", HEAVY, QUOTA.format(roots=CONTROL_GROUPS, quota=120_000), fixed={}),
    Case("cpu_throttled", "half a core", HEAVY, QUOTA.format(roots=CONTROL_GROUPS, quota=50_000), fixed={}),
    *(
        Case(
            "too_few_servers",
            f"one of {cores} cores",
            SERVED,
            SERVERS_OF_A_PART_OF_A_CORE.format(roots=CONTROL_GROUPS, quota=round(100_000 * cores)),
            threads=1,
            servers=1,
        )
        for cores in (0.4, 0.3)
    ),
    Case("slow_start", "150 s", HEAVY, "import time; time.sleep(150)", fixed={}),
    Case(None, "a worker", HEAVY),
    Case(None, "threads", {**HEAVY, "worker_type": "threads"}),
    Case(None, "cheap images in the process itself", {**HEAVY, "num_workers": 0, "image_size": 192}),
    Case(None, "two processes", {**HEAVY, "num_workers": 0, "image_size": 160, "max_steps": 20}, ranks=2, threads=1),
    Case(None, "some checkpoints", {**HEAVY, "checkpoint_every": 15}, checkpoints=True),
)
