"""Work of known length for a GPU, and how long the host takes beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

_TRIAL = 20_000_000
"""Clock cycles: about ten milliseconds."""


def queue_sleep(milliseconds: float) -> None:
    """Keep the current GPU's current stream busy for about that long; returns at once."""
    torch.cuda._sleep(int(milliseconds * _cycles_per_millisecond()))


@cache
def _cycles_per_millisecond() -> float:
    torch.cuda._sleep(_TRIAL)  # the first one loads the kernel
    return _TRIAL / device_milliseconds(lambda: torch.cuda._sleep(_TRIAL))


def device_milliseconds(work: Callable[[], object]) -> float:
    """GPU time of what a function queues."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def host_milliseconds(work: Callable[[], object]) -> float:
    """Host time of a function."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000
