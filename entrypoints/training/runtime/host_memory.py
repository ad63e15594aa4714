"""The memory that this process's host, or its container, has left."""

from __future__ import annotations

from pathlib import Path

MEMORY, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be had without swapping: the machine's, or fewer where a container is limited."""
    lines = dict(line.split(":") for line in MEMORY.read_text(encoding="ascii").splitlines())
    left = int(lines["MemAvailable"].split()[0]) * 1024  # proc(5): kB
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and limit.read_text().strip() != "max":
        left = min(left, int(limit.read_text()) - int(used.read_text()))
    return left
