"""How many workers decode images beside a training process, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from launcher_observer.system.host import cgroup_quotas, usable_cores

from training.data.batches import Images
from training.distributed.world import World
from training.runtime import accelerator
from training.runtime.environment import processes_on_host
from training.settings.scripts import TrainingSettings, WorkerKind

TINY = 0.3
"""Milliseconds per image below which auto uses no workers: the work is then mostly Python, which threads cannot run beside training, and
handing an image from one process to another takes as long."""

TINY_BESIDE_A_GPU = 0.03
"""The same beside a GPU, whose kernels the training process launches meanwhile: on an H100, a process that decoded digits itself, 0.3 ms
each, kept the GPU waiting half of the time (tests/insight/h100/quickstart-teacher.tar.xz)."""

FEW = 2
"""Workers that auto uses for images that cost less than TINY: enough for 6,000 a second, and quick to start."""

MOST = 16
"""The most workers per process that auto uses: more threads would wait for the GIL, and more readers for a shared disk."""

MEASURED = 6
"""Images whose cost is measured."""

REPEATS = 3
"""Measurements of each of them; the first also loads what the others find loaded."""


@dataclass(frozen=True)
class Workers:
    """What decodes the images of one training process."""

    kind: WorkerKind
    count: int
    """0: the training process itself."""
    about: str = ""
    """How many there are, and why: for the log."""


def choose(
    settings: TrainingSettings,
    world: World,
    images: Images,
    environ: Mapping[str, str] = os.environ,
    *,
    views: int = 1,
    anywhere: bool = True,
) -> Workers:
    """As many workers as the settings ask for or, with auto, as there are cores for, unless images cost too little. The same number in
    every process. A collective.

    Args:
        images: the training images, indexed by a SampleKey.
        views: consecutive views of an image, each of them an image of a batch.
        anywhere: as `milliseconds_per_image` takes it.
    """
    kind, asked = worker_kind(settings, world.device), settings.num_workers
    share, where = cores_per_process(world, environ)
    if asked != "auto":
        return Workers(kind, asked, f"data workers: {_counted(kind, asked)}, {_as_asked(asked, share, where)}")
    cost = milliseconds_per_image(images, views, anywhere)
    gpu = accelerator.is_gpu(world.device)
    if cost < (TINY_BESIDE_A_GPU if gpu else TINY):
        count, why = 0, f"an image costs {cost:.2f} ms, too little to hand over"
    else:
        count = min(MOST if cost >= TINY else FEW, max(int(share) - 1, 1 if gpu else 0))
        why = f"{where}, one of them for training itself; an image costs {cost:.2f} ms"
    agreed = _fewest(count, world)  # each has measured for itself
    if agreed != count:
        count, why = agreed, f"{why}; another process can have {agreed}"
    return Workers(kind, count, f"data workers: {_counted(kind, count)} (auto: {why})")


def worker_kind(settings: TrainingSettings, device: torch.device) -> WorkerKind:
    """The kind of workers that decode images: worker_type or, if that is auto or remote, what suits the preprocessing and the device.

    Threads beside the one that launches kernels slow down a GPU's step: by 50 of 335 ms for one of them
    (https://github.com/pytorch/pytorch/issues/77139).
    """
    if settings.worker_type in ("threads", "processes", "loader"):
        return settings.worker_type
    return "threads" if settings.preprocessing == "cpu" and not accelerator.is_gpu(device) else "processes"


def choose_threads(settings: TrainingSettings, world: World, environ: Mapping[str, str] = os.environ) -> Workers:
    """DALI's threads, at least one: as many as the settings ask for or, with auto, as there are cores for. The same number in every
    process. A collective."""
    asked = settings.num_workers
    share, where = cores_per_process(world, environ)
    if asked != "auto":
        count = max(1, asked)
        return Workers("threads", count, f"{_counted('threads', count)}, {_as_asked(asked, share, where)}")
    own = max(1, int(share) - 1)
    count = _fewest(own, world)
    why = f"{where}{', one of them for training itself' if share >= 2 else ''}"
    why += f"; another process can have {count}" if count != own else ""
    return Workers("threads", count, f"{_counted('threads', count)} (auto: {why})")


def _fewest(count: int, world: World) -> int:
    """The smallest of all processes' counts. A collective."""
    return int(world.gather_rows(torch.tensor([count])).min())


def cores_per_process(world: World, environ: Mapping[str, str]) -> tuple[float, str]:
    """Cores that this training process may use if those that share them get equal parts, and how that was computed, for the log."""
    cores, processes = usable_cores(), processes_on_host(environ)
    if world.sharing_cores is not None:
        bound, quota = len(os.sched_getaffinity(0)), min(cgroup_quotas(), default=float("inf"))
        # a container's quota is for all processes, wherever they are bound
        if bound / world.sharing_cores <= quota / processes:
            cores, processes = bound, world.sharing_cores
        else:
            cores = quota
    where = f"{cores:g} core{'s' if cores != 1 else ''} for {processes} process{'es' if processes > 1 else ''}"
    return cores / processes, where


def _as_asked(asked: int, share: float, where: str) -> str:
    about = f"as num_workers says ({where})"
    if asked <= max(share, 1):
        return about
    return (
        f"{about}. WARNING: more workers than cores: they compete with each other and with the training process, so "
        f"the CPU is at 100 % and the GPU waits for data; set num_workers to auto, or to {max(int(share), 1)} or less"
    )


def milliseconds_per_image(images: Images, views: int = 1, anywhere: bool = True) -> float:
    """Time to read, decode and augment one training image: the mean over a few images, since sizes differ, of the least of each, because
    other programs only add to it.

    Args:
        views: consecutive views of an image, each of them an image of a batch.
        anywhere: measure images from all over the set. False: the first ones, since others might lie in shards that are not here yet.
    """
    begin, count = getattr(images, "begin_batch", lambda _: images.__getitem__), min(MEASURED, len(images))
    step = len(images) // count if anywhere else 1
    costs = []
    for index in range(0, count * step, step):
        draws, times = [(view, index) for view in range(1, 1 + views)], []
        for _ in range(REPEATS):
            started, item = time.perf_counter(), begin(draws)
            for draw in draws:
                item(draw)
            times.append((time.perf_counter() - started) * 1000 / views)
        costs.append(min(times))
    return sum(costs) / len(costs)


def _counted(kind: WorkerKind, count: int) -> str:
    if count == 0:
        return "none, the training process itself"
    if kind == "loader":
        return f"{count} loader process{'es' if count > 1 else ''}"
    return f"{count} {kind}" if count > 1 else f"1 {kind.removesuffix('es') if kind == 'processes' else 'thread'}"
