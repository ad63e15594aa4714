"""A GPU for machines that have none: it runs kernels one after another by its own clock, and every launch costs the host CPU time.

    import simulated_accelerator

    device = simulated_accelerator.install()       # torch now knows the device type `sim`, and the module torch.sim
    model = nn.Sequential(nn.Linear(16, 10), simulated_accelerator.Kernels(200, 400)).to(device)

It shows what a GPU's host does wrong: a launching thread without a core, too few kernels in the queue, reads that wait, slow copies.
As with CUDA, launches return at once, the queue has a length, autograd launches the backward pass from a thread of its own, events tell
the device's time, and reading a number waits. It computes nothing: tensors stay in main memory, so they are to be small. All copies are
asynchronous, as from pinned memory.

Where the launcher observes the process, samples of utilisation and memory go where its system monitor writes, as a GPU's would.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = "sim"
"""The type of the torch.device."""

QUEUE = 1024
"""Kernels that wait at most; the next launch then blocks, as CUDA's does at about as many."""

MEMORY = 16 * 2**30
"""Bytes of the device."""

SLOWER_IN_FP32 = 2.0
"""Times that kernels take without autocast."""

SAMPLE_SECONDS = 0.5
"""Between two samples of utilisation: SageMaker's own rate."""

OF_TORCH = str(Path(torch.__file__).with_name(f"{NAME}.py"))


def of_torch(made: Any) -> Any:
    """A function, or a class, whose code passes for torch's: a wait for the device is then at the script's own line that asked for it."""
    for one in (made, *vars(made).values()):
        function = getattr(one, "__func__", one)
        if hasattr(function, "__code__"):
            function.__code__ = function.__code__.replace(co_filename=OF_TORCH)
    return made


@of_torch
class Accelerator:
    """The module torch.sim, with the functions that torch.cuda has, of one device."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        """
        Args:
            clock, sleep: the host's, in seconds.
        """
        self.clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._idle_from = clock()
        """When everything that was launched is done."""
        self._ends: deque[float] = deque(maxlen=QUEUE)
        """When each of the latest kernels is done."""
        self._launched = 0.0
        """Seconds of all kernels."""
        self._allocated = 0
        self.copied_bytes_a_second = 12e9
        """From the host: PCIe 3.0 x16."""

    # Work

    def launch(self, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Queue a kernel.

        Args:
            seconds: that the device takes for it.
            cpu_seconds: that the launch takes of the calling thread's time on a core; without one it lasts longer, as a real one does.
        """
        until = time.thread_time() + cpu_seconds
        while time.thread_time() < until:
            pass
        if len(self._ends) == QUEUE:
            self.wait_until(self._ends[0])
        with self._lock:
            self._idle_from = max(self.clock(), self._idle_from) + seconds
            self._ends.append(self._idle_from)
            self._launched += seconds

    def idle_from(self) -> float:
        """When the device has done everything that was launched so far, by the host's clock: now, or later."""
        return max(self.clock(), self._idle_from)

    def busy_seconds(self) -> float:
        """Seconds of work that the device has done by now."""
        with self._lock:
            return self._launched - max(0.0, self._idle_from - self.clock())

    def wait_until(self, moment: float) -> None:
        """Sleep until a moment of the host's clock."""
        while (left := moment - self.clock()) > 0:
            self._sleep(left)

    def synchronize(self, device: object = None) -> None:
        """Sleep until everything is done that was launched so far."""
        self.wait_until(self._idle_from)

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    @functools.cached_property
    def autograd(self) -> ThreadPoolExecutor:
        """The thread that launches backward passes: PyTorch has one for each device, of this name.
        https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd"""
        named = functools.partial(torch.multiprocessing._set_thread_name, f"pt_autograd_{self.current_device()}")
        return ThreadPoolExecutor(1, initializer=named)

    # Memory

    def allocate(self, size: int) -> None:
        """Take bytes of the device's memory, for good.

        Raises:
            torch.OutOfMemoryError: it has no room for them.
        """
        if self._allocated + size > MEMORY:
            raise torch.OutOfMemoryError(f"{NAME} out of memory: {size / 2**20:.0f} MiB more than there are")
        self._allocated += size

    def memory_allocated(self, device: object = None) -> int:
        return self._allocated

    def max_memory_allocated(self, device: object = None) -> int:
        return self._allocated

    # What PyTorch asks of every device

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "Simulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It draws no random numbers."""


@of_torch
class Event:
    """A moment in the device's queue, as torch.cuda.Event."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._moment = 0.0

    def record(self) -> None:
        self._moment = self._accelerator.idle_from()

    def query(self) -> bool:
        """Whether the device has come so far."""
        return self._accelerator.clock() >= self._moment

    def synchronize(self) -> None:
        self._accelerator.wait_until(self._moment)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the device's time until a later event."""
        return 1000 * (end._moment - self._moment)


@of_torch
class DeviceTensor(torch.Tensor):
    """A tensor on the device. What is computed of it is there too, and reading it waits for the device."""

    device = property(lambda self: torch.device(NAME, 0))
    is_cpu = property(lambda self: False)

    def item(self) -> Any:
        accelerator().synchronize()
        return super().item()

    def tolist(self) -> Any:
        accelerator().synchronize()
        return super().tolist()

    def cpu(self) -> torch.Tensor:
        accelerator().synchronize()
        return self.as_subclass(torch.Tensor)


@of_torch
class Kernels(nn.Module):
    """Stands for layers of a network: it launches their kernels, and the values pass through as they are."""

    def __init__(
        self,
        forward: int,
        backward: int,
        *,
        launch_seconds: float,
        seconds_a_sample: float,
        bytes_a_sample: int = 0,
    ):
        """
        Args:
            forward, backward: kernels of each pass.
            launch_seconds: of a core, for each kernel.
            seconds_a_sample: of the device, for each kernel and sample, in 16 bits.
            bytes_a_sample: of the device's memory, for what the backward pass needs.
        """
        super().__init__()
        self.kernels, self.launch_seconds = (forward, backward), launch_seconds
        self.seconds_a_sample, self.bytes_a_sample = seconds_a_sample, bytes_a_sample
        self._held = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        needed = len(inputs) * self.bytes_a_sample
        if needed > self._held:  # what was freed is used again
            accelerator().allocate(needed - self._held)
            self._held = needed
        slower = 1.0 if torch.is_autocast_enabled(NAME) else SLOWER_IN_FP32
        return _Work.apply(inputs, self, slower * self.seconds_a_sample * len(inputs))

    def launch(self, kernels: int, seconds: float) -> None:
        for _ in range(kernels):
            accelerator().launch(seconds, self.launch_seconds)


@of_torch
class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layers: Kernels, seconds: float) -> torch.Tensor:
        ctx.layers, ctx.seconds = layers, seconds
        layers.launch(layers.kernels[0], seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        accelerator().autograd.submit(ctx.layers.launch, ctx.layers.kernels[1], ctx.seconds).result()
        return gradient, None, None


def accelerator() -> Accelerator:
    """The module torch.sim."""
    return getattr(torch, NAME)


def install() -> torch.device:
    """Make PyTorch know the device in this process, for good."""
    made = Accelerator()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, made)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.Tensor.to = _to(torch.Tensor.to)
    if "launcher_observer.start" in sys.modules:
        threading.Thread(target=_sample, args=(made,), daemon=True).start()
    return torch.device(NAME, 0)


def _to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to` that knows the device."""

    @of_torch
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = torch._C._nn._parse_to(*args, **{name: value for name, value in kwargs.items() if name != "copy"})[0]
        is_there = isinstance(tensor, DeviceTensor)
        if device is not None and device.type == NAME and not is_there:
            accelerator().launch(tensor.nbytes / accelerator().copied_bytes_a_second)
            return tensor.as_subclass(DeviceTensor)
        if device is not None and device.type != NAME and is_there:
            tensor = tensor.cpu()
        return original(tensor, *args, **kwargs)

    return to


def _sample(made: Accelerator) -> None:
    """Write what the device did as the system monitor writes what a GPU did, for as long as the process lives."""
    from launcher_observer.contract import node_name
    from launcher_observer.start import recording_folder
    from launcher_observer.system.background import FOLDER
    from launcher_observer.system.monitor import Writer

    folder = recording_folder()
    if folder is None:
        return
    writer, gpu = Writer(Path(folder) / FOLDER, node_name()), f"gpu{os.environ.get('LOCAL_RANK', 0)}"
    since, done = made.clock(), made.busy_seconds()
    while True:
        time.sleep(SAMPLE_SECONDS)
        before, since = since, made.clock()
        done_before, done = done, made.busy_seconds()
        used = {
            "GPUUtilization": min(1.0, (done - done_before) / (since - before)),
            "GPUMemoryUtilization": made.memory_allocated() / MEMORY,
        }
        with contextlib.suppress(OSError):  # the disk is full, or the run's folder is gone
            writer.write(time.time(), {("gpu", gpu, name): 100 * share for name, share in used.items()})
