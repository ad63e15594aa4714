"""The tables of trials that studies and tunings keep: where they lie, which runs they name, and whether one is in use."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
from pathlib import Path

from launcher.record import records, trust

ELSEWHERE = ".elsewhere-"
"""Begins the name of a file that holds the path of a table outside `folder`."""


def folder() -> Path:
    """Where a table lies unless `--table` names another place."""
    return records.store() / "studies"


def lock(table: Path) -> Path:
    """The file that a study locks while it uses a table."""
    return table.with_name(f".{table.name}.lock")


def code_list(table: Path) -> Path:
    """The file that holds the paths of a tuned command's code, as they were when the table's first trial began."""
    return table.with_name(f".{table.name}.code.json")


def remember(table: Path) -> None:
    """Record in the store where a table outside `folder` lies, so that its trials are known there.

    Raises:
        OSError: the store cannot be written to.
    """
    path = os.path.abspath(table)
    if Path(path).parent == folder():
        return
    note = folder() / f"{ELSEWHERE}{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    if not note.exists():
        folder().mkdir(parents=True, exist_ok=True)
        records.write_atomically(note, os.fsencode(path))


def known() -> list[Path]:
    """Every table in `folder`, and those elsewhere that were remembered; each once. Some may have been removed since."""
    found = sorted(folder().glob("*.csv"))
    for note in sorted(folder().glob(f"{ELSEWHERE}*")):
        with contextlib.suppress(OSError):
            found.append(Path(os.fsdecode(trust.content(note))))
    once: dict[str, Path] = {}
    for table in found:
        once.setdefault(os.path.realpath(table), table)
    return list(once.values())


def runs_of(table: Path) -> set[str]:
    """The names of the runs that a table's trials are; empty if it was removed, or is no such table."""
    with contextlib.suppress(OSError, csv.Error):
        text = trust.content(table).decode("utf-8", "replace")
        return {name for row in csv.DictReader(io.StringIO(text, newline="")) if (name := row.get("run"))}
    return set()


def is_in_use(table: Path) -> bool:
    """Whether a study holds a table's lock."""
    return records.is_locked(lock(table))
