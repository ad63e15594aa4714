"""Where a step's time goes: seconds of each phase, on the host's clock or by CUDA events that are read later."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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


class Timeline:
    """Seconds of the phases of training steps, summed since the last `window`.

    On a GPU a phase, or a step, is the time between two events in its queue. A step lasts from the end of the one before, or from `start`:
    if the device waits for the host meanwhile, that counts too. Nothing waits for the device but `window`, which is called when the host
    has just read a loss anyway. The host's own clock would show how far the host runs ahead, and miss the work that the device still has
    to do when the host pauses.
    """

    def __init__(self, device: torch.device):
        self._gpu = accelerator.module(device) if accelerator.is_gpu(device) else None
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []
        self._steps_on_gpu: list[tuple[Any, Any, bool]] = []
        """Each step's begin and end, and whether it is past the warm-up."""
        self._began: Any = None
        """The event at which the step under way began."""
        self._steps, self._since, self._cpu_since = 0, time.perf_counter(), time.process_time()
        self._worker_cpu = worker_cpu_seconds()
        self._threads: DrivingThreads | None = None
        self._counted_steps, self._counted_seconds, self._all_steps = 0, 0.0, 0
        self._slowest, self._answered = 0.0, 0

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
            self._events.append((name, begin, self._mark()))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

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
        self._steps, self._all_steps = self._steps + 1, self._all_steps + 1
        self._seconds["cpu"] += cpu - self._cpu_since
        counts = self._all_steps > WARM_UP_STEPS
        if self._gpu is None:
            self._count(now - self._since, counts)
        else:
            assert self._began is not None, "`start` comes first"
            ended = self._mark()
            self._steps_on_gpu.append((self._began, ended, counts))
            self._began = ended
        self._since, self._cpu_since = now, cpu

    def asks(self, images: int) -> None:
        """The teacher answers for N images now."""
        self._answered += images

    def window(self) -> Window:
        """The steps since the last call. Waits for all work submitted to the device so far."""
        if self._gpu is not None:
            self._mark().synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000  # milliseconds
        for begin, end, counts in self._steps_on_gpu:
            self._count(begin.elapsed_time(end) / 1000, counts)
        before, self._worker_cpu = self._worker_cpu, worker_cpu_seconds()
        steps, of_workers = self._steps, max(0.0, self._worker_cpu - before)  # less if one of a fork server has ended
        means = {name: seconds / steps for name, seconds in self._seconds.items()}
        step, cpu = means.pop("step"), means.pop("cpu")
        found = Window(
            steps=steps,
            step=step,
            phases=means,
            cpu=cpu + of_workers / steps,
            worker_cpu=of_workers / steps,
            slowest_step=self._slowest,
            answered=self._answered / steps,
            scheduling={} if self._threads is None else self._threads.a_step(step),
        )
        self._threads = self._threads or DrivingThreads()
        self._seconds.clear()
        self._events.clear()
        self._steps_on_gpu.clear()
        self._steps, self._slowest, self._answered = 0, 0.0, 0
        return found

    def _count(self, seconds: float, counts: bool) -> None:
        """Count a step of that duration.

        Args:
            counts: it is past the warm-up.
        """
        self._seconds["step"] += seconds
        self._slowest = max(self._slowest, seconds)
        if counts:
            self._counted_steps, self._counted_seconds = self._counted_steps + 1, self._counted_seconds + seconds

    def _mark(self) -> Any:
        """An event at this place of the GPU's queue."""
        assert self._gpu is not None
        event = self._gpu.Event(enable_timing=True)
        event.record()
        return event

    def seconds_per_step(self) -> float | None:
        """Mean over all steps after the warm-up, up to the last `window`; None if there were none."""
        return self._counted_seconds / self._counted_steps if self._counted_steps else None
