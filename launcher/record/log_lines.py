"""Read a growing log line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def complete_lines(file: Path, position: int, *, last: bool) -> Iterator[tuple[str, int]]:
    """(line, byte position after it) for each complete line after a position; with `last`, also for an unfinished one."""
    try:
        with open(file, "rb") as log:
            log.seek(position)
            for line in log:
                if not line.endswith(b"\n") and not last:
                    return
                position += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n"), position
    except FileNotFoundError:
        return
