"""Order between streams: two of them use the same memory at once unless one waits for the other, and that is a race.

Vector clocks, by which torch's own sanitizer finds such races on CUDA too (https://docs.pytorch.org/docs/stable/cuda._sanitizer.html).
Here nothing runs at once: what is looked for is the order that CUDA would not keep.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

Clock = dict[int, int]
"""By stream, how many of its kernels are known to be done."""

lock = threading.RLock()  # one for all that the device keeps: memory may be freed at any moment
_numbers = itertools.count()
_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
_host: Clock = {}
"""What the host has waited for, in any of its threads: a race may be missed, but none is invented."""

unsafe: list[str] = []
"""Memory that was freed while a stream may still use it: its own stream may get it again at once."""


class StreamRace(AssertionError):
    """Two streams use the same memory, and neither waits for the other."""


class Queue:
    """A stream's place in this order."""

    def __init__(self) -> None:
        self.number, self.clock = next(_numbers), Clock()
        self.busy_until = 0.0
        """Of the host's clock: the end of work that takes the device time."""
        _queues.add(self)

    def submit(self) -> int:
        """The number of the next kernel, which begins after all that the host has waited for."""
        _merge(self.clock, _host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def wait(self, clock: Clock, until: float) -> None:
        """What comes next begins after what that clock knows to be done, and not before that time."""
        with lock:
            _merge(self.clock, clock)
            self.busy_until = max(self.busy_until, until)

    def sleep(self, seconds: float) -> None:
        """Work that takes the device that long."""
        with lock:
            self.busy_until = self.reached() + seconds

    def reached(self) -> float:
        """When a moment that is submitted now comes, by the host's clock."""
        return max(time.perf_counter(), self.busy_until)

    def now(self) -> Clock:
        with lock:
            return {**self.clock}


class Uses:
    """Of one storage: which stream took it, which wrote it last, and which have read it since."""

    def __init__(self) -> None:
        self.owner = current()
        self.written: tuple[int, int] | None = None
        self.read: Clock = {}
        self.recorded: set[int] = set()
        """Streams for which `record_stream` keeps the memory."""

    def later(self, known: Clock) -> list[int]:
        """Streams with uses that a clock does not know to be done."""
        uses = [*self.read.items(), *([self.written] if self.written else [])]
        return [stream for stream, number in uses if number > max(known.get(stream, 0), _host.get(stream, 0))]


def current() -> Queue:
    """This thread's current stream."""
    queue: Queue = torch.gpu.current_stream().queue
    return queue


def host_sleeps(until: float) -> None:
    """The host waits until that time."""
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)


def all_done() -> float:
    """When the last stream has done its work."""
    with lock:
        return max((queue.busy_until for queue in _queues), default=0.0)


def forget_work() -> None:
    """The device is idle, whatever the time."""
    with lock:
        for queue in _queues:
            queue.busy_until = 0.0


def host_waits(clock: Clock) -> None:
    """The host has waited for what that clock knows."""
    with lock:
        _merge(_host, clock)


def is_over(until: float, clock: Clock) -> bool:
    """Whether that time has come; if so, the host knows what that clock knows."""
    over = time.perf_counter() >= until
    if over:
        host_waits(clock)
    return over


def host_waits_for_all() -> None:
    """The host has waited for every stream."""
    with lock:
        for queue in _queues:
            _merge(_host, queue.clock)


def submitted(what: str, read: Iterable[Uses], written: Iterable[Uses], queue: Queue | None = None) -> None:
    """A kernel on a stream; without one, on the current stream.

    Raises:
        StreamRace: it does not wait for what it reads, or for who still reads what it writes.
    """
    with lock:
        queue = queue or current()
        number = queue.submit()
        for uses in read:
            if uses.written:
                _require(what, "reads", "writes", dict([uses.written]), queue)
            uses.read[queue.number] = number
        for uses in written:
            _require(what, "writes", "uses", uses.read | (dict([uses.written]) if uses.written else {}), queue)
            uses.written, uses.read = (queue.number, number), {}


def freed(uses: Uses) -> None:
    """Its owner, for whom the allocator keeps it, may get the memory again in its next kernel."""
    with lock:
        for stream in uses.later(uses.owner.clock):
            if stream not in (uses.owner.number, *uses.recorded):
                unsafe.append(f"memory of stream {uses.owner.number} is freed while stream {stream} may still use it")


def register(uses_of: Callable[[torch.Tensor], Uses]) -> None:
    """Have `record_stream` tell these."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        uses_of(tensor).recorded.add(stream.queue.number)

    torch.Tensor.record_stream = record_stream


def _merge(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


def _require(what: str, does: str, did: str, uses: Clock, queue: Queue) -> None:
    for stream, number in uses.items():
        if stream != queue.number and queue.clock.get(stream, 0) < number:
            raise StreamRace(
                f"{what} on stream {queue.number} {does} what stream {stream} {did}, and waits for nothing"
            )
