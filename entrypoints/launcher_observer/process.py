"""Facts about a training process: its rank, age, memory, and data workers' CPU time. Standard library only."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_GPUS = ("cpu", "meta")
"""Types of a torch.device."""

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def process_started() -> float:
    """When this process was started, in Unix seconds, to the kernel's hundredth."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    # proc(5): field 22 counts from the boot of the machine; in a container of LXC, /proc/uptime counts from the container's
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / TICKS_PER_SECOND


def worker_cpu_seconds() -> float:
    """User and system CPU seconds of this process's worker processes so far, including those that ended with their epoch. The kernel
    reports processes that were waited for only as a sum: any other child of the script counts too, once it has ended."""
    ticks = 0
    for worker in multiprocessing.active_children():
        try:
            text = Path(f"/proc/{worker.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # it has just ended
            continue
        ticks += sum(int(field) for field in text.rpartition(")")[2].split()[11:13])  # proc(5): utime and stime
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # after active_children, which waits for those that have ended
    return ticks / TICKS_PER_SECOND + ended.ru_utime + ended.ru_stime


def peak_host_memory() -> int:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # getrusage(2): kB


def rank_and_size(torch: Any, environ: Mapping[str, str] = os.environ) -> tuple[int, int, str | None]:
    """This process's rank, the number of processes, and the backend of torch.distributed; None if that is not in use.

    Args:
        torch: the module.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size()), str(distributed.get_backend())
    rank, size = (
        environ.get(f"{name}") or environ.get(f"OMPI_COMM_WORLD_{name.removeprefix('WORLD_')}") or default
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    return int(rank), int(size), None


def described(torch: Any, device: Any) -> dict[str, Any]:
    """What a record's `start` says about a training process and its device.

    Args:
        torch: the module.
        device: the torch.device it trains on; None: not known.
    """
    is_gpu = device is not None and device.type not in NOT_GPUS
    module = getattr(torch, device.type, None) if is_gpu else None
    named, able = getattr(module, "get_device_name", None), getattr(module, "get_device_capability", None)
    properties = getattr(module, "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", None) if properties else None  # older versions of torch do not have it
    found = able(device) if able else None  # torch.xpu's is a dict of something else
    return {
        "device": device.type if device is not None else None,
        "device_name": named(device) if named else None,
        "device_uuid": str(uuid) if uuid else None,
        "compute_capability": float("{}.{}".format(*found)) if isinstance(found, tuple) else None,
        "instance_type": os.environ.get("SM_CURRENT_INSTANCE_TYPE"),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "process_started": process_started(),
    }


def is_of_a_signal_handler(error: Exception) -> bool:
    """Whether a signal's handler of the script raised it, while other code ran: it is the script's to catch."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
