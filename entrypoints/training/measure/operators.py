"""Which operators and kernels take the time: torch.profiler over a window of steps, a table of them, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from training.distributed.world import World
from training.measure.annotate import NAMES
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

KEPT = 100
"""Operators that operators.json lists, longest first; `others` sums up the rest."""

ANNOTATIONS = (
    "Optimizer.",
    "DistributedDataParallel.",
    "ProfilerStep",
    "nccl:",
    "Torch-Compiled Region",
    "## Call CompiledFxGraph",
)
"""Prefixes of PyTorch's own ranges; NCCL's kernels are ncclDevKernel_… ."""

TRACE = "trace.json.gz"
"""A Chrome trace: open it in https://ui.perfetto.dev."""


class OperatorWindow:
    """Records some steps of rank 0: operators.json and trace.json.gz in its host's output folder. The others record nothing.

    Args:
        folder: where both go.
        log: logs what is recorded and what took longest.
    """

    def __init__(self, settings: TrainingSettings, world: World, folder: Path, log: Callable[[str], None]):
        self._settings, self._world, self._folder, self._log = settings, world, folder, log
        self._steps = settings.profile_steps
        self._first, self._seen = settings.profile_after, 0
        self._recording = False
        """Whether the steps under way are recorded, by rank 0."""
        self._profile: profile | None = None
        self._slowed = False

    def step(self) -> None:
        """A step begins now."""
        if not self._steps:
            return
        if self._recording and self._seen == self._first + self._steps:
            self.close()
        elif not self._recording and self._seen == self._first:
            self._recording = True
            if self._world.is_first:
                self._open()
        self._seen += 1

    def slowed(self) -> bool:
        """Whether steps since the last call were recorded, and therefore took longer."""
        slowed, self._slowed = self._slowed, self._profile is not None
        return slowed

    def close(self) -> None:
        """Write what was recorded so far, if anything. A collective: many events take rank 0 minutes, and the others wait."""
        if not self._recording:
            return
        steps, self._steps, self._recording = min(self._steps, self._seen - self._first), 0, False
        self._world.on_rank_zero(lambda: self._write(steps))

    def _write(self, steps: int) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None, "rank 0 records"
        accelerator.synchronize(self._world.device)
        recorded.stop()
        found = summarise(recorded, steps)
        try:
            (self._folder / "operators.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            recorded.export_chrome_trace(str(self._folder / TRACE))
        except (OSError, RuntimeError) as error:  # a trace may fill a disk; the training goes on
            self._log(f"torch.profiler's files are incomplete: {error}")
            return
        top = ", ".join(f"{one['name'][:60]} {one['share']:.0%}" for one in found["operators"][:5])
        self._log(
            f"torch.profiler recorded {steps} steps; of the {found['device']}'s time: {top} ({TRACE} has them all)"
        )

    def _open(self) -> None:
        activities = [ProfilerActivity.CPU]
        if accelerator.is_gpu(self._world.device):
            activities.append(ProfilerActivity.CUDA)
        last = self._first + self._steps
        self._log(f"torch.profiler records steps {self._first + 1} to {last} of this process; they run slower")
        self._slowed, self._profile = True, profile(activities=activities)
        self._profile.start()


def summarise(recorded: profile, steps: int) -> dict[str, Any]:
    """The operators by self time, without what they call: kernels on a GPU, else operators of the CPU.

    Returns:
        device ("GPU" or "CPU"), steps, seconds of all operators together in one step, operators (each with name, calls and
        seconds a step and share of all of them, longest first), others (how many more there are, and their share).
    """
    events = [event for event in recorded.key_averages() if not _is_annotation(event)]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    own = _kernel_time if kernels else _cpu_time
    rows = sorted(((own(event), event) for event in kernels or events), key=lambda row: -row[0])
    total = sum(microseconds for microseconds, _ in rows)
    listed = [
        {
            "name": event.key,
            "calls": event.count / steps,
            "seconds": microseconds / 1e6 / steps,
            "share": microseconds / total if total else 0.0,
        }
        for microseconds, event in rows[:KEPT]
        if microseconds > 0
    ]
    return {
        "device": "GPU" if kernels else "CPU",
        "steps": steps,
        "seconds": total / 1e6 / steps,
        "operators": listed,
        "others": {"count": len(rows) - len(listed), "share": 1 - sum(one["share"] for one in listed)},
    }


def _is_annotation(event: Any) -> bool:
    """Whether an event is a range over operators and kernels that have rows of their own: on a GPU it counts all of their time again
    (https://github.com/pytorch/pytorch/issues/130730)."""
    return event.key in NAMES or getattr(event, "is_user_annotation", False) or event.key.startswith(ANNOTATIONS)


def _cpu_time(event: Any) -> float:
    return float(event.self_cpu_time_total)


def _kernel_time(event: Any) -> float:
    """Microseconds; torch renamed it in 2.4."""
    renamed = hasattr(event, "self_device_time_total")
    return float(event.self_device_time_total if renamed else event.self_cuda_time_total)
