"""Two clocks for the phases of a step: the host's own, and a GPU's events, which are read when they have happened and never waited for."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol


class Timer(Protocol):
    """Moments, and the seconds between two of them."""

    def now(self) -> Any:
        """This moment; None where it cannot be taken."""

    def has_passed(self, moment: Any) -> bool:
        """Whether the seconds up to a moment can be asked for by now."""

    def seconds(self, begin: Any, end: Any) -> float: ...

    def release(self, moment: Any) -> None:
        """No moment before this one is asked for again."""


class HostTimer:
    """The host's clock, for steps that run on it."""

    now = staticmethod(time.perf_counter)

    def has_passed(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def release(self, moment: float) -> None:
        """Numbers need no care."""


class GpuTimer:
    """Events in the queue of the current stream. The host's clock would show how far it runs ahead of the GPU."""

    def __init__(self, module: Any):
        """
        Args:
            module: PyTorch's of the device's type, such as torch.cuda.
        """
        self._event = module.Event
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        self._free: list[Any] = []
        self._in_use: deque[Any] = deque()
        """In their order in the queue."""

    def now(self) -> Any:
        if self._is_capturing():  # into a CUDA graph, of which an event would become a part
            return None
        event = self._free.pop() if self._free else self._event(enable_timing=True)
        event.record()
        self._in_use.append(event)
        return event

    def has_passed(self, moment: Any) -> bool:
        return not self._is_capturing() and (moment is None or moment.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """0 where a moment could not be taken."""
        return 0.0 if begin is None or end is None else begin.elapsed_time(end) / 1000  # milliseconds

    def release(self, moment: Any) -> None:
        while moment is not None and self._in_use[0] is not moment:
            self._free.append(self._in_use.popleft())
