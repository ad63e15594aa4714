"""How the kernel schedules the threads that drive the device: CPU time, and time ready to run without a core. Standard library only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
"""A thread's schedstat has nanoseconds on a core, nanoseconds of waiting for one, and its number of time slices:
https://docs.kernel.org/scheduler/sched-stats.html"""

AUTOGRAD = b"pt_autograd_"
"""Name prefix of the threads that run backward passes on a GPU, while the training thread waits for them; the training thread itself
runs those on a CPU. torch/csrc/autograd/engine.cpp (Engine::thread_init)"""

SHORTEST = 0.01
"""Seconds below which nothing is reported yet: the kernel counts a running thread's time at its ticks."""


class Counters(NamedTuple):
    """Totals of all the threads since they began."""

    now: float
    """Seconds of the host's clock."""
    on_core: float
    """Seconds."""
    delayed: float
    """Seconds in which one was ready to run while other tasks had the core (run-queue delay)."""


class DrivingThreads:
    """The share of time that the calling thread, which trains, and the autograd threads that it waits for had a core, or lacked one.

    Only one of them runs at a time, so their times add up. All calls come from the training thread, the first after a backward pass.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        with contextlib.suppress(OSError):  # too many open files, or a kernel that only looks like Linux
            self._open(str(threading.get_native_id()))
        self._before = self._counters()

    def _open(self, own: str) -> None:
        """
        Args:
            own: the calling thread's id.
        """
        for task in TASKS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if task.name == own or (task / "comm").read_bytes().startswith(AUTOGRAD):
                    self._files.append(os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC))

    def restart(self) -> None:
        """Discard the time until now."""
        self._before = self._counters()

    def a_step(self, step: float) -> dict[str, float]:
        """Seconds of a typical step, by the shares since the last call, or since `restart`.

        Args:
            step: its seconds.

        Returns:
            `thread_cpu_seconds` and `run_delay_seconds` of a step; empty if the kernel does not say, or too little time has passed.
        """
        before, counters = self._before, self._counters()
        if before is None or counters is None or counters.now - before.now < SHORTEST:
            return {}
        self._before, part = counters, step / (counters.now - before.now)
        return {
            "thread_cpu_seconds": part * max(0.0, counters.on_core - before.on_core),
            "run_delay_seconds": part * max(0.0, counters.delayed - before.delayed),
        }

    def _counters(self) -> Counters | None:
        on_core = delayed = slices = 0
        for file in self._files:
            try:
                numbers = map(int, os.pread(file, 64, 0).split())
                on_core, delayed, slices = (a + b for a, b in zip((on_core, delayed, slices), numbers, strict=True))
            except (OSError, ValueError):  # the thread has ended
                continue
        # a kernel that counts nothing says 0
        return Counters(time.perf_counter(), on_core / 1e9, delayed / 1e9) if slices else None
