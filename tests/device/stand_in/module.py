"""`torch.gpu`: what PyTorch gives each accelerator a module for. Streams run at once; what each would wait for is written down.

Kernels take the device no time, but for `_sleep`: events behind it, and who waits for it, are as late as on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from tests.device.stand_in import pinned, streams
from tests.device.stand_in.kernels import Memory, Random
from tests.device.stand_in.synchronisation import synchronised

NAME = "Stand-in GPU"


class Event:
    """A moment in a stream, by the host's clock: when it is recorded, or later, when the work before it is done."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.enable_timing, self._at = enable_timing, None
        self.clock = streams.Clock()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or torch.gpu.current_stream()
        self._at, self.clock = stream.queue.reached(), stream.queue.now()
        stream.calls.append("record_event")

    def synchronize(self) -> None:
        synchronised("Event.synchronize", self.at)
        streams.host_waits(self.clock)

    def query(self) -> bool:
        return streams.is_over(self.at, self.clock)

    @property
    def at(self) -> float:
        """When it is over; an event that was not recorded is."""
        return 0.0 if self._at is None else self._at

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.gpu.current_stream()).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to a later one.

        Raises:
            ValueError: one of them keeps no time, as CUDA says it.
            RuntimeError: one of them was never recorded.
        """
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end._at - self._at)


class Stream(torch.Stream):
    """A queue of work; `calls` lists what it was asked for beside kernels."""

    def __new__(cls, device: object = None, priority: int = 0) -> Stream:
        made = super().__new__(cls, device=torch.device("gpu", 0), priority=priority)
        made.calls, made.queue = list[str](), streams.Queue()
        return made

    def synchronize(self) -> None:
        synchronised("Stream.synchronize", self.queue.busy_until)
        streams.host_waits(self.queue.now())

    def wait_stream(self, other: Stream) -> None:
        self.calls.append("wait_stream")
        self.queue.wait(other.queue.now(), other.queue.busy_until)

    def wait_event(self, event: Event) -> None:
        self.calls.append("wait_event")
        self.queue.wait(event.clock, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return streams.is_over(self.queue.busy_until, self.queue.now())


class Gpu:
    """The functions of the module, as torch.cuda has them."""

    Event, Stream = Event, Stream
    capability = (8, 0)

    def __init__(self) -> None:
        self._threads = threading.local()

    # -- devices

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        self.set_device(device)
        yield

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        assert torch.device(device).index in (None, 0) if not isinstance(device, int) else device == 0, device

    def get_device_name(self, device: object = None) -> str:
        return NAME

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        number = torch.device(device).index or 0
        return SimpleNamespace(uuid=f"stand-in-{number}", pci_domain_id=0, pci_bus_id=16, pci_device_id=28 + number)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        synchronised("synchronize", streams.all_done())
        streams.host_waits_for_all()

    def _sleep(self, cycles: int) -> None:
        """Keep the current stream busy, for a nanosecond a cycle."""
        streams.current().sleep(cycles / 1e9)

    # -- streams

    def current_stream(self, device: object = None) -> Stream:
        entered = getattr(self._threads, "entered", None)
        return entered[-1] if entered else self.default

    @functools.cached_property
    def default(self) -> Stream:
        return Stream()

    def default_stream(self, device: object = None) -> Stream:
        return self.default

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        entered = self._threads.entered = [*getattr(self._threads, "entered", ()), stream]
        try:
            yield
        finally:
            self._threads.entered = entered[:-1]

    # -- memory

    def memory_allocated(self, device: object = None) -> int:
        return Memory.allocated

    def max_memory_allocated(self, device: object = None) -> int:
        return Memory.peak

    def memory_reserved(self, device: object = None) -> int:
        return Memory.allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return Memory.total - Memory.allocated, Memory.total

    def reset_peak_memory_stats(self, device: object = None) -> None:
        Memory.peak = Memory.allocated

    def empty_cache(self) -> None:
        pass

    def cudart(self) -> type[pinned.Runtime]:
        return pinned.Runtime

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError(f"error {code}: the memory is registered already, or never was")

    # -- random numbers

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        Random.state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return Random.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        Random.state = state.clone()
