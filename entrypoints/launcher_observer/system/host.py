"""The cores and memory that this host, or its container, gives a process. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MEMORY, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes available without swapping: the machine's, or fewer in a limited container."""
    lines = dict(line.split(":") for line in MEMORY.read_text(encoding="ascii").splitlines())
    left = int(lines["MemAvailable"].split()[0]) * 1024  # proc(5): kB
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and limit.read_text().strip() != "max":
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # file pages that were not read again lately: the kernel drops them before it refuses memory
        left = min(left, int(limit.read_text()) - int(used.read_text()) + int(counts.get("inactive_file", 0)))
    return left


def usable_cores() -> float:
    """Cores that this process may use: those it is bound to, or fewer if a container's quota gives it less time than that."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([bound, *cgroup_quotas()])


def cgroup_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[float]:
    """The cores that each control group above this process allows it, for those that set a limit.

    Version 2: cpu.max (https://docs.kernel.org/admin-guide/cgroup-v2.html), version 1: cpu.cfs_quota_us and cpu.cfs_period_us
    (https://docs.kernel.org/scheduler/sched-bwc.html). In a container the own path may not exist: the mount begins at the own group.
    """
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = root / "cpu" if controllers else root  # a link, where cpu is mounted together with cpuacct
            folder = base / path.lstrip("/")
            for group in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):
                    if controllers:
                        quota, period = (
                            int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
                        )
                    else:
                        quota, period = (int(number) for number in (group / "cpu.max").read_text().split())
                    if quota > 0:
                        yield quota / period
                if group == base:
                    break
