"""What another user of the machine may have planted: folders whose code would run as this one, and endless files."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from launcher.config.issues import Issue, UserError

MAX_BYTES = 64 * 2**20
"""Limit for a record's file that is read whole. The largest, a minute of system metrics, have some MB."""


def require_trusted_owner(folders: Iterable[Path], key: str, fix: str, *, shared: bool) -> None:
    """Check that only this user and those it trusts can change what is in the folders. Missing folders are skipped.

    Args:
        key: of the message.
        fix: of the message.
        shared: a team may share them: root may own a folder, a group may write, and so may everyone if nobody can rename
            or remove another's files (the sticky bit).

    Raises:
        UserError: a folder is a link, another user's, or open to changes by others.
    """
    issues = []
    for folder in folders:
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            why = "is a link"
        elif found.st_uid not in ((os.getuid(), 0) if shared else (os.getuid(),)):
            why = f"belongs to {_user(found.st_uid)}"
        elif found.st_mode & 0o022 if not shared else found.st_mode & 0o1002 == 0o002:
            why = "is open to changes"
        else:
            continue
        issues.append(
            Issue(key=key, found=f"{folder} {why}: other users can change the code in it, which runs as you", fix=fix)
        )
    if issues:
        raise UserError(issues)


@contextlib.contextmanager
def closed_umask() -> Iterator[int]:
    """Create files and folders that other users cannot change, whatever the umask is; child processes started within it do
    so too. Yields the umask that was set.
    """
    before = os.umask(0o077)  # the only way to read it
    os.umask(before | 0o002)
    try:
        yield before
    finally:
        os.umask(before)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def opened(file: Path) -> BinaryIO:
    """A file for reading, if it is a regular one or a link to one: a pipe or a device may have no end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # a pipe may have no writer
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "not a regular file", str(file))


def content(file: Path) -> bytes:
    """A record's whole file. Raises OSError as `opened`, or if it has more than MAX_BYTES."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= MAX_BYTES:
            return stream.read(size)
    raise OSError(errno.EFBIG, f"over {MAX_BYTES // 2**20} MiB", str(file))
