"""Read logs and JSON lines that may still grow or end in a truncated line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.record import trust


def complete_lines(file: Path, position: int, *, last: bool) -> Iterator[tuple[bytes, int]]:
    """(line with its end, byte position after it) for each complete line after a position; with `last`, also for an unfinished one."""
    try:
        with trust.opened(file) as log:
            log.seek(position)
            for line in log:
                if not line.endswith(b"\n") and not last:
                    return
                position += len(line)
                yield line, position
    except FileNotFoundError:
        return


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, its object) for each line of a file that is a JSON object; truncated and other lines are skipped."""
    with trust.opened(file) as lines:
        for read in lines:
            line = read.decode("utf-8", "replace")
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                yield line.rstrip("\n"), values


def last_lines(file: Path, max_bytes: int = 2**22) -> list[str]:
    """The lines at the end of a log."""
    with trust.opened(file) as log:
        log.seek(-min(max_bytes, log.seek(0, 2)), 2)
        return log.read().decode("utf-8", "replace").splitlines()
