"""Where a step's time goes: seconds of each phase, on the host's clock or by CUDA events that are read later."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from launcher_observer.process import worker_cpu_seconds
from launcher_observer.scheduling import DrivingThreads

from training.measure.annotate import annotate
from training.runtime import accelerator, failure
from training.runtime.metrics import PHASES

WARM_UP_STEPS = 5
"""Steps at the start that do not count for images/s: memory is allocated and libraries choose their kernels there."""

HOST_PHASES = {phase.name for phase in PHASES if phase.on_host}
"""Phases that the host's clock measures, even if the steps run on a GPU. There they overlap with earlier work if the host is ahead."""


@dataclass(frozen=True)
class Window:
    """Consecutive steps, such as those of a metric line; seconds are means per step."""

    steps: int
    step: float
    """Of a whole step; on a GPU by its own clock."""
    phases: dict[str, float]
    cpu: float
    """CPU seconds of this process and its workers, all threads together."""
    worker_cpu: float
    """Those of the workers."""
    slowest_step: float
    """Seconds of the longest step."""
    answered: float
    """Images per step that the teacher answered for."""
    scheduling: dict[str, float]
    """CPU time and run-queue delay per step, as `DrivingThreads.a_step` returns them; empty for the first window."""


@dataclass
class _Steps:
    """Steps since a window began."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each phase that the host's clock measures, of the CPU, and on a CPU of the steps."""
    phases_on_gpu: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Each phase's begin and end."""
    steps_on_gpu: list[tuple[Any, Any, bool]] = field(default_factory=list)
    """Each step's begin and end, and whether it is past the warm-up."""
    count: int = 0
    slowest: float = 0.0
    answered: int = 0
    """Images."""


class Timeline:
    """Seconds of the phases of training steps, summed since the last window ended.

    On a GPU a phase, or a step, is the time between two events in its queue. A step lasts from the end of the one before, or from `start`:
    if the device waits for the host meanwhile, that counts too. Only reading a window waits for the device. The host's own clock would
    show how far the host runs ahead, and miss the work that the device still has to do when the host pauses.
    """

    def __init__(self, device: torch.device):
        self._gpu = accelerator.module(device) if accelerator.is_gpu(device) else None
        self._steps = _Steps()
        self._began: Any = None
        """The event at which the step under way began."""
        self._since, self._cpu_since = time.perf_counter(), time.process_time()
        self._worker_cpu = worker_cpu_seconds()
        self._threads: DrivingThreads | None = None
        self._counted_steps, self._counted_seconds, self._all_steps = 0, 0.0, 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as this phase, and name it to profilers. Phases do not nest."""
        failure.progress.enter(name)
        with annotate(name):
            yield from self._timed(name)

    def _timed(self, name: str) -> Iterator[None]:
        if self._gpu is not None and name not in HOST_PHASES:
            begin = self._mark()
            yield
            self._steps.phases_on_gpu.append((name, begin, self._mark()))
        else:
            started = time.perf_counter()
            yield
            self._steps.seconds[name] += time.perf_counter() - started

    def start(self) -> None:
        """A step begins now; what came before, such as an evaluation or a checkpoint, is not part of it."""
        self._since, self._cpu_since = time.perf_counter(), time.process_time()
        if self._threads is not None:
            self._threads.restart()
        if self._gpu is not None:
            self._began = self._mark()

    def step(self) -> None:
        """A step has ended, and the next begins."""
        now, cpu = time.perf_counter(), time.process_time()
        self._steps.count, self._all_steps = self._steps.count + 1, self._all_steps + 1
        self._steps.seconds["cpu"] += cpu - self._cpu_since
        counts = self._all_steps > WARM_UP_STEPS
        if self._gpu is None:
            self._count(self._steps, now - self._since, counts)
        else:
            assert self._began is not None, "`start` comes first"
            ended = self._mark()
            self._steps.steps_on_gpu.append((self._began, ended, counts))
            self._began = ended
        self._since, self._cpu_since = now, cpu

    def asks(self, images: int) -> None:
        """The teacher answers for N images now."""
        self._steps.answered += images

    def window(self) -> Window:
        """The steps since the last window. Waits for all work submitted to the device so far."""
        return self.end_window()()

    def end_window(self) -> Callable[[], Window]:
        """The steps since the last window are one. Nothing waits for the device.

        Returns:
            A function that reads the window, to be called once, and before the next window is read: it waits until the device has done the
            work submitted until now.
        """
        ended, self._steps = self._steps, _Steps()
        before, self._worker_cpu = self._worker_cpu, worker_cpu_seconds()
        of_workers = max(0.0, self._worker_cpu - before)  # less if one of a fork server has ended
        return partial(self._read, ended, of_workers, None if self._gpu is None else self._mark())

    def _read(self, ended: _Steps, of_workers: float, end: Any) -> Window:
        """
        Args:
            of_workers: their CPU seconds.
            end: an event after the last step; None on a CPU.
        """
        if end is not None:
            end.synchronize()
        for name, begin, phase_end in ended.phases_on_gpu:
            ended.seconds[name] += begin.elapsed_time(phase_end) / 1000  # milliseconds
        for begin, step_end, counts in ended.steps_on_gpu:
            self._count(ended, begin.elapsed_time(step_end) / 1000, counts)
        means = {name: seconds / ended.count for name, seconds in ended.seconds.items()}
        step, cpu = means.pop("step"), means.pop("cpu")
        found = Window(
            steps=ended.count,
            step=step,
            phases=means,
            cpu=cpu + of_workers / ended.count,
            worker_cpu=of_workers / ended.count,
            slowest_step=ended.slowest,
            answered=ended.answered / ended.count,
            scheduling={} if self._threads is None else self._threads.a_step(step),
        )
        self._threads = self._threads or DrivingThreads()
        return found

    def _count(self, steps: _Steps, seconds: float, counts: bool) -> None:
        """Count a step of that duration.

        Args:
            counts: it is past the warm-up.
        """
        steps.seconds["step"] += seconds
        steps.slowest = max(steps.slowest, seconds)
        if counts:
            self._counted_steps, self._counted_seconds = self._counted_steps + 1, self._counted_seconds + seconds

    def _mark(self) -> Any:
        """An event at this place of the GPU's queue."""
        assert self._gpu is not None
        event = self._gpu.Event(enable_timing=True)
        event.record()
        return event

    def seconds_per_step(self) -> float | None:
        """Mean over all steps after the warm-up, up to the last window that was read; None if there were none."""
        return self._counted_seconds / self._counted_steps if self._counted_steps else None
