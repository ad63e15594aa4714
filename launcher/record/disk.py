"""A full disk: which one it is, and the space that a run reserves for a stop request and its outcome."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 256 * 1024
"""Size of a run's reserve. An outcome has a few KiB; its text grows with the failure file, which has at most 1 KiB per host."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk and of a used-up quota."""

FIX = "free some space there, or set LAUNCHER_RUNS to a folder on a larger disk"


def hold_reserve(file: Path) -> None:
    """Write a run's reserve: random bytes, so that no file system stores them in less space."""
    file.write_bytes(os.urandom(RESERVE_BYTES))


def full(path: Path, error: BaseException | None = None) -> str:
    """`no space left on DEVICE, at PATH` if the disk of a path has less room than a reserve, or an error says so; else "".

    Args:
        path: of an existing file or folder.
        error: what a write raised.
    """
    says_so = isinstance(error, OSError) and error.errno in NO_SPACE
    if not says_so and shutil.disk_usage(path).free >= RESERVE_BYTES:
        return ""
    return f"no space left on {device(path)}, at {path}"


def existing(folder: Path) -> Path:
    """A folder, or its nearest parent that exists if it is yet to be made."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def device(path: Path) -> str:
    """The device of a path, as `df` names it."""
    import psutil  # here: `launcher plan` does not need it

    there = path.resolve()
    mount = next(str(folder) for folder in (there, *there.parents) if folder.is_mount())
    with contextlib.suppress(OSError):
        for partition in reversed(psutil.disk_partitions(all=True)):  # the last mount hides those below it
            if partition.mountpoint == mount:
                return str(partition.device)
    return f"the disk of {mount}"
