"""Groups steps into windows, and writes each window as one line of the rank's timeline."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from launcher_observer.process import worker_cpu_seconds
from launcher_observer.scheduling import DrivingThreads
from launcher_observer.step import Step
from launcher_observer.timers import Timer

WARM_UP_STEPS = 5
"""First steps, which have a window of their own: memory is allocated and libraries choose their kernels there."""

SHORTEST, GROWTH = 0.5, 1 / 600
"""Seconds of a window at first, and their growth per second of training: a month of training has some 6,000 windows."""


class Windows:
    """Finished steps, until their seconds can be read, and the current window."""

    def __init__(self, write: Callable[[int, int, float, dict[str, float], dict[str, float]], None]):
        """
        Args:
            write: called with a window's epoch, last step, that step's end in Unix seconds, mean seconds per step, other metrics.
        """
        self._write = write
        self._waiting: deque[tuple[Timer, Step]] = deque()
        self._began: float | None = None
        self.since = time.perf_counter()
        """When counting began, by the host's clock."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps, self._samples, self._cpu, self._slowest = 0, 0, 0.0, 0.0
        self._last: Step | None = None
        self._epoch, self._epoch_steps, self._epoch_began = 1, 0, 0.0
        self._batches = 0
        """Of all steps so far."""
        self._loader: Any = None
        """Of the latest batch."""
        self._new_epoch = False
        self._worker_cpu = 0.0
        self._mixed = False
        """Whether the window includes an evaluation's workers."""
        self._threads: DrivingThreads | None = None
        """From the end of the first window on."""
        self.extra: Callable[[], dict[str, float]] = dict
        """Returns additional metrics, such as `memory_gib`; called once per window."""
        self.world_size = 1

    def add(self, timer: Timer, step: Step) -> None:
        """A step is over."""
        self._waiting.append((timer, step))
        self.fold()

    def resume(self, evaluated: bool) -> None:
        """Training resumes after a pause.

        Args:
            evaluated: workers made an evaluation's batches meanwhile; their CPU time is not training's.
        """
        if self._threads is not None:
            self._threads.restart()
        if evaluated and (self._steps or self._waiting):
            self._mixed = True
        elif evaluated:
            self._worker_cpu = worker_cpu_seconds()

    def fold(self, evaluates: bool = False) -> None:
        """Count the steps whose seconds are known by now.

        Args:
            evaluates: workers already make an evaluation's batches.
        """
        self._mixed |= evaluates and bool(self._waiting)
        while self._waiting:
            timer, step = self._waiting[0]
            # if a batch is requested in a stream of its own, its moments pass before those of the model's
            if not all(map(timer.has_completed, [step.end, *(end for _, _, end in step.phases)])):
                return
            self._waiting.popleft()
            self._count(timer, step)

    def holds_a_moment(self) -> bool:
        """Whether steps wait to be counted."""
        return bool(self._waiting)

    def close(self) -> None:
        """No further step follows. Steps whose seconds are not known yet are left out, not waited for."""
        self.fold()
        if self._steps:
            self._flush()

    def _count(self, timer: Timer, step: Step) -> None:
        whole = max(0.0, timer.seconds(step.begin, step.end) - step.paused)
        long = max(SHORTEST, (step.ended - self.since) * GROWTH)
        if whole >= long:  # a rare, slow step stands alone: a mean with others would hide how few are slow
            self._flush(before_slow=True)
        epoch = self._epoch if step.epoch is None else step.epoch
        if epoch != self._epoch and self._last is not None:
            if step.ended - self._epoch_began > SHORTEST:  # the first step of an epoch may have waited for workers
                self._flush()
                self._new_epoch = True
            self._epoch_steps = 0
            self._epoch_began = step.began
        self._epoch = epoch
        if self._began is None:
            self._began = step.began
        for name, begin, end in step.phases:
            self._seconds[name] += timer.seconds(begin, end)
        timer.release(step.end)
        if step.batches:
            self._seconds["data_wait"] += step.data_wait
        self._seconds["step"] += whole
        self._slowest = max(self._slowest, whole)
        self._steps += 1
        self._samples += step.samples
        self._cpu += step.cpu
        self._epoch_steps += 1
        self._batches += step.batches
        self._loader = step.loader.loader if step.loader is not None else self._loader
        self._last = step
        if step.number == WARM_UP_STEPS or step.ended - self._began >= long or self._new_epoch:
            self._new_epoch = False
            self._flush()

    def _flush(self, *, before_slow: bool = False) -> None:
        """
        Args:
            before_slow: a slow step outside the window has just ended. The thread's share of the time until now is mostly that step's.
        """
        step, steps = self._last, self._steps
        if step is None or not steps:
            return
        before, self._worker_cpu = self._worker_cpu, worker_cpu_seconds()
        means = {name: value / steps for name, value in self._seconds.items()}
        extra: dict[str, Any] = {
            "steps": steps,
            "slowest_step": self._slowest,
            "cpu_seconds": self._cpu / steps,
            "epoch_step": self._epoch_steps,
            **({} if self._threads is None or before_slow else self._threads.a_step(means["step"])),
            **self.extra(),
        }
        self._threads = self._threads or DrivingThreads()
        if not self._mixed:  # too low if a worker that a fork server started has ended
            extra["worker_cpu_seconds"] = max(0.0, self._worker_cpu - before) / steps
        self._mixed = False
        if self._samples and self._seconds["step"]:
            extra["images_per_second"] = self.world_size * self._samples / self._seconds["step"]
        batches = self._loader.batches if self._loader is not None else None
        if batches:
            each = max(1, round(self._batches / step.number))  # a loop may read one batch ahead
            extra["epoch_steps"] = max(self._epoch_steps, -(-batches // each))
        if means["step"]:
            if "grad_sync" in extra:
                means["grad_sync"] = extra.pop("grad_sync")
            self._write(self._epoch, step.number, time.time() - (time.perf_counter() - step.ended), means, extra)
        self._seconds.clear()
        self._steps, self._samples, self._cpu, self._slowest, self._began = 0, 0, 0.0, 0.0, None
