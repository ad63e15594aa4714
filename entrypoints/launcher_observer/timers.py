"""Two clocks for the phases of a step: the host's own, and a GPU's events, which are read once they have happened and never waited for."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol


class Timer(Protocol):
    """Moments, and the seconds between two of them."""

    def now(self) -> Any:
        """This moment; None if it cannot be taken."""

    def has_completed(self, moment: Any) -> bool:
        """Whether the seconds up to a moment can be read by now."""

    def seconds(self, begin: Any, end: Any) -> float: ...

    def stream_of(self, moment: Any) -> Any:
        """The stream that a moment was taken in; None if that is not known, or there is only one."""

    def release(self, moment: Any) -> None:
        """No moment before this one is read again."""


class HostTimer:
    """The host's clock, for steps that run on it."""

    now = staticmethod(time.perf_counter)

    def has_completed(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def stream_of(self, moment: float) -> None:
        """The host has only one."""

    def release(self, moment: float) -> None:
        """Nothing to release."""


class Moment:
    """An event, and the stream that it was recorded in."""

    __slots__ = ("event", "stream")

    def __init__(self, event: Any):
        self.event, self.stream = event, None


class GpuTimer:
    """Events in one GPU's current stream. The host's clock would show how far the host runs ahead of the GPU."""

    def __init__(self, module: Any, device: Any):
        """
        Args:
            module: PyTorch's for the device's type, such as torch.cuda.
            device: a torch.device with its index. It need not be the current one: a script may name it in every call.
        """
        self._module, self._device = module, device
        self._current_stream = getattr(module, "current_stream", None)
        """None: the device has only one stream."""
        self._captures = getattr(module, "is_current_stream_capturing", None)
        """None: it has no graphs."""
        self._free: list[Moment] = []
        self._in_use: deque[Moment] = deque()
        """In order of recording."""

    def now(self) -> Moment | None:
        if self._is_capturing():  # into a CUDA graph, which an event would become part of
            return None
        moment = self._free.pop() if self._free else Moment(self._module.Event(enable_timing=True))
        if self._current_stream is None:
            moment.event.record()
        else:
            moment.stream = self._current_stream(self._device)
            moment.event.record(moment.stream)
        self._in_use.append(moment)
        return moment

    def has_completed(self, moment: Moment | None) -> bool:
        return not self._is_capturing() and (moment is None or moment.event.query())

    def seconds(self, begin: Moment | None, end: Moment | None) -> float:
        """0 if a moment could not be taken."""
        return 0.0 if begin is None or end is None else begin.event.elapsed_time(end.event) / 1000  # milliseconds

    def stream_of(self, moment: Moment | None) -> Any:
        return None if moment is None else moment.stream

    def _is_capturing(self) -> bool:
        """Whether the thread's work is captured into a graph: on the current device, which then cannot be queried, or on ours."""
        if self._captures is None:
            return False
        if self._captures():
            return True
        if self._module.current_device() == self._device.index:
            return False
        with self._module.device(self._device):
            return bool(self._captures())

    def release(self, moment: Moment | None) -> None:
        while moment is not None and self._in_use[0] is not moment:
            self._free.append(self._in_use.popleft())
