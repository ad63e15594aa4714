"""Binds a training process to the cores next to its GPU: those of the NUMA node on whose PCI bus it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import torch

from training.runtime import accelerator

PCI = Path("/sys/bus/pci/devices")
"""A folder per device, whose local_cpulist names the cores next to it (Linux, Documentation/ABI/testing/sysfs-bus-pci)."""

TASKS = Path("/proc/self/task")
"""A folder per thread of this process (proc(5))."""


def bind(device: torch.device, processes: int) -> tuple[int | None, str]:
    """Bind all threads of this process to the usable cores next to its GPU. What it starts from now on inherits that.

    Args:
        device: this process's GPU; the i-th process of this host has the i-th one.
        processes: training processes on this host.

    Returns:
        How many of these have their GPU next to the same cores, this one included, or None if it was not bound; and a line for the log.
    """
    if not accelerator.is_gpu(device):
        return None, "numa_binding: not bound, there is no GPU"
    usable = os.sched_getaffinity(0)
    try:
        each = [_next_to(torch.device(device.type, index), usable) for index in range(processes)]
        own = each[device.index or 0]
        if not own or own == usable:
            which = "none" if not own else "all"
            return None, f"numa_binding: not bound, {which} of the {len(usable)} usable cores are next to the GPU"
        for thread in TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), own)
    except (AttributeError, OSError, ValueError) as error:
        return None, f"numa_binding: not bound ({error})"
    sharing = each.count(own)
    return sharing, (
        f"numa_binding: bound to {len(own)} of {len(usable)} cores, those next to its GPU; training processes on them: {sharing}"
    )


def _next_to(gpu: torch.device, usable: Collection[int]) -> set[int]:
    """The usable cores next to a GPU.

    Raises:
        AttributeError: this torch does not tell where the GPU is.
        OSError, ValueError: the system does not tell which cores are next to it.
    """
    ranges = (PCI / accelerator.pci_address(gpu) / "local_cpulist").read_text(encoding="ascii").strip().split(",")
    cores: set[int] = set()
    for item in ranges:
        begin, _, end = item.partition("-")
        cores |= {*range(int(begin), int(end or begin) + 1)}
    return cores.intersection(usable)
