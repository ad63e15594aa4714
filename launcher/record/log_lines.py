"""A growing log, read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def complete_lines(file: Path, position: int, *, last: bool) -> Iterator[tuple[str, int]]:
    """Each complete line after a byte position, with the position after it; with `last`, an unfinished one too."""
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
