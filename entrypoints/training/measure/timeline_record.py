"""What every rank leaves of its steps: timeline-<rank>.jsonl in its host's output folder, a line for each thing that happened.

    {"kind": "start", …}        once: which process this is, its settings, and what it cannot measure
    {"kind": "first_step", …}   once: seconds from the process's start to the end of its first step, as the host sees it; data workers
    {"kind": "steps", …}        each logged window: mean seconds a step of the whole step and its phases
    {"kind": "checkpoint", …}   each pause, and `evaluate`

Times are Unix seconds. A line is one write, so that a kill cuts at most the last one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from launcher_observer.contract import node_name
from torch import nn

from training.distributed.world import World
from training.runtime import accelerator


class TimelineRecord:
    """Writes one rank's file, anew for each run."""

    def __init__(self, folder: Path, world: World, settings: Any):
        """
        Args:
            folder: the host's output folder.
            settings: a dataclass of training.settings.scripts.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"timeline-{world.rank}.jsonl"
        self._file.write_text("", encoding="utf-8")  # an earlier run's, in a plain shell
        self._waits_for_first = True
        self._write(
            "start",
            rank=world.rank,
            node=node_name(),
            world_size=world.size,
            backend=world.backend,
            device=world.device.type,
            device_name=accelerator.name(world.device),
            instance_type=os.environ.get("SM_CURRENT_INSTANCE_TYPE"),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            process_started=process_started(),
            not_measured={} if world.is_torch_group else {"grad_sync": _why_no_grad_sync(world)},
            settings=asdict(settings),
        )

    def first_step(self, step: int, workers: int) -> None:
        """A step has ended: recorded once, for this process's first.

        Args:
            workers: data workers beside this process, which `num_workers` may leave to the program.
        """
        if self._waits_for_first:
            self._waits_for_first = False
            now = time.time()
            self._write("first_step", step=step, ended=now, seconds=now - process_started(), workers=workers)

    def steps(self, epoch: int, step: int, seconds: Mapping[str, float], extra: Mapping[str, float]) -> None:
        """A logged window has ended now.

        Args:
            epoch, step: of its last step.
            seconds: means a step; `step` is the whole of it.
            extra: other numbers of the window.
        """
        shown = {name: round(value, 7) for name, value in seconds.items()}
        self._write("steps", epoch=epoch, step=step, ended=time.time(), seconds=shown, extra=dict(extra))

    def stall(self, kind: Literal["checkpoint", "evaluate"], step: int, seconds: float) -> None:
        """A pause after this step has ended now."""
        self._write(kind, step=step, began=time.time() - seconds, seconds=seconds)

    def _write(self, kind: str, **values: Any) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def grad_sync_seconds(model: nn.Module) -> float | None:
    """Seconds a step in which a model's backward pass was over on this rank and its gradients were not yet exchanged.

    From DistributedDataParallel's own record, which it takes of the first ten steps and of every hundredth then
    (kDDPRuntimeLoggingSampleRate in torch/csrc/distributed/c10d/reducer.hpp): their mean. So it lags behind, and it costs nothing.

    Returns:
        None where there is no such record (yet).
    """
    logged: Callable[[], Mapping[str, float]] | None = getattr(model, "_get_ddp_logging_data", None)
    if logged is None:
        return None
    record = logged()
    exchange = record.get("avg_backward_comm_time", 0)
    return max(0, exchange - record["avg_backward_compute_comm_overlap_time"]) / 1e9 if exchange else None


def process_started() -> float:
    """Unix seconds at which this process was started, to the kernel's hundredth."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    uptime = float(
        Path("/proc/uptime").read_text(encoding="ascii").split()[0]
    )  # proc(5): field 22 counts from the boot
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _why_no_grad_sync(world: World) -> str:
    return "a single process exchanges nothing" if world.size == 1 else f"{world.backend} keeps no record of it"
