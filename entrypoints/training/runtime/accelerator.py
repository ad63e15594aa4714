"""Everything that is asked of a GPU besides arithmetic: events, streams, memory, generator, name and NVTX.

PyTorch has a module with the same functions for each accelerator type, named after it: `torch.cuda` for `cuda:0`. Training
code goes through this file, so that a device of another type runs the very same lines. Other files name CUDA only for what is CUDA's
alone: its TF32 switches, its version in a model's card, its memory in a failure's text.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch

OUT_OF_MEMORY: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""Raised by an allocation that does not fit on a GPU; torch.cuda's own class before torch 2.5."""

Result = TypeVar("Result")

COPIES, TEACHER = "copies", "teacher"
"""Purposes of side streams that wait for one another."""

NO_GPU = ("cpu", "meta")
"""Device types without events, streams and memory of their own."""


def find(local_rank: int) -> torch.device:
    """This process's GPU, made the current one; the CPU if the machine has no GPU.

    Args:
        local_rank: of this process on its host.

    Raises:
        ValueError: there are GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible. "
            "Start one process per GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    make_current(device)
    return device


def in_turn(index: int) -> torch.device:
    """The GPU for one of several processes that share a machine's GPUs, by the process's index in turn; the CPU if there is none."""
    count = torch.cuda.device_count()
    return find(index % count) if count else torch.device("cpu")


def is_gpu(device: torch.device) -> bool:
    """Whether a device runs its kernels asynchronously to the host."""
    return device.type not in NO_GPU


def module(device: torch.device) -> Any:
    """PyTorch's module for a GPU's type, such as torch.cuda."""
    return getattr(torch, device.type)


def make_current(device: torch.device) -> None:
    """Make a GPU this thread's default; does nothing on the CPU."""
    if is_gpu(device):
        module(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all submitted work; does nothing on the CPU."""
    if is_gpu(device):
        module(device).synchronize(device)


def name(device: torch.device) -> str | None:
    """A GPU's name, such as "NVIDIA A100-SXM4-40GB"; None for the CPU."""
    return str(module(device).get_device_name(device)) if is_gpu(device) else None


def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, such as (8, 0) (NVIDIA, CUDA C++ programming guide, appendix "Compute Capabilities")."""
    major, minor = module(device).get_device_capability(device)
    return int(major), int(minor)


def pci_address(device: torch.device) -> str:
    """Where a GPU is on the PCI bus, as Linux writes it: 0000:10:1c.0 (domain, bus, device, function).

    Raises:
        AttributeError: this torch does not tell it.
    """
    found = module(device).get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU; this process's cache does not count as free."""
    free, total = module(device).mem_get_info(device)
    return int(free), int(total)


def reserved_memory(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch's allocator holds for this process, in use or cached."""
    return int(module(device).memory_reserved(device))


def peak_memory(device: torch.device) -> int:
    """The most bytes of a GPU that this process's tensors took at once."""
    return int(module(device).max_memory_allocated(device))


def measured_memory(device: torch.device, function: Callable[[], object]) -> int:
    """The most bytes of a GPU that tensors took at once during a call, beyond those before it. Resets the peak."""
    gpu = module(device)
    gpu.reset_peak_memory_stats(device)
    before = int(gpu.memory_allocated(device))
    try:
        function()
        return peak_memory(device) - before
    finally:
        gpu.reset_peak_memory_stats(device)


@functools.cache
def side_stream(device: torch.device, purpose: str) -> Any:
    """A GPU's one stream for a purpose that need not wait for the model's work. Purposes do not share a stream: one that waits for
    the model would hold up the other.
    """
    return module(device).Stream(device)


class SideStream:
    """Runs work on a GPU's stream of its own, while the current stream still runs earlier work.

    It is at most one step ahead: each call's work waits for what the current stream was given before the previous call. The last two
    results are kept until then, so the stream reuses their memory in its own order. With `record_stream`, memory would be free only once
    the host sees that its use is over, and a host that runs ahead would allocate more and more
    (https://github.com/pytorch/pytorch/issues/147168).

    Args:
        purpose: as `side_stream` takes it. What was submitted before, such as a model's weights, is there.
    """

    def __init__(self, device: torch.device, purpose: str):
        self._gpu, self._device = module(device), device
        self._stream = side_stream(device, purpose)
        self._stream.wait_stream(self._gpu.current_stream(device))
        self._kept: deque[tuple[Any, object]] = deque()
        """The last two results, each with the event on the current stream that came before its use."""

    def run(self, work: Callable[[], Result], *, after: str | None = None) -> Result:
        """The result of `work`, for which the current stream's later work waits. Use it before the next call only.

        Args:
            after: the purpose of the stream that makes what it reads. None: it reads nothing that was made lately.
        """
        current = self._gpu.current_stream(self._device)
        before = current.record_event()
        if self._kept:
            self._stream.wait_event(self._kept[-1][0])
        if len(self._kept) > 1:
            self._kept.popleft()
        if after is not None:
            self._stream.wait_stream(side_stream(self._device, after))
        with self._gpu.stream(self._stream):
            made = work()
        current.wait_stream(self._stream)
        self._kept.append((before, made))
        return made

    def finish(self) -> None:
        """Keep no result any longer."""
        self._stream.wait_stream(self._gpu.current_stream(self._device))
        self._kept.clear()


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor in pinned memory: a copy from other memory makes the host wait for earlier work.

    Args:
        device: the one that it is meant for; for the CPU it stays where it is.
    """
    if not is_gpu(device) or values.device.type != "cpu" or values.is_pinned():
        return values
    return values.pin_memory()


def pin_in_place(values: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Pin memory that was allocated elsewhere, such as memory that processes share: cudaHostRegister
    (CUDA runtime API, "Memory Management").

    Returns:
        A function that undoes it, to be called before the memory is unmapped.

    Raises:
        RuntimeError: the driver refuses it; the message says why.
    """
    gpu = module(device)
    runtime, begin = gpu.cudart(), values.data_ptr()
    gpu.check_error(int(runtime.cudaHostRegister(begin, values.numel() * values.element_size(), 0)))

    def undo() -> None:
        synchronize(device)  # it may still fetch
        runtime.cudaHostUnregister(begin)

    return undo


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random state of the CPU and a device after the body, so that what it drew is drawn again."""
    host = torch.get_rng_state()
    own = module(device).get_rng_state(device) if is_gpu(device) else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if own is not None:
            module(device).set_rng_state(own, device)


def nvtx() -> ModuleType | None:
    """NVIDIA's ranges for Nsight; None if no GPU is in use."""
    begun = torch.cuda.is_initialized()
    return torch.cuda.nvtx if begun else None
