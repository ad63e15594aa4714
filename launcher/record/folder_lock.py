"""One process at a time that writes a folder of images, weights or labels."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import socket
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from launcher.config.issues import mistake

LOCK = ".launcher.lock"
"""The folder's lock file. It stays there: the lock ends with its process, however that ends."""

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems without locks, such as Lustre mounted without flock."""


@contextlib.contextmanager
def alone(target: Path) -> Iterator[None]:
    """Reserve a folder for this process; make it where there is none.

    Raises:
        UserError: another process writes it; the message says which, where and since when. Or the lock is a link: what it
            points to would be overwritten.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(target / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        found, fix = f"{target / LOCK} is a link", f"remove it: rm {shlex.quote(str(target / LOCK))}"
        raise mistake("TARGET", found, fix, valid="a file of the launcher") from None
    with open(descriptor, "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read() or "another process"
            fix = "wait for its end, or name another folder"
            raise mistake("TARGET", f"{target} is being written by {holder}", fix) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        lock.truncate(0)
        since = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        lock.flush()
        yield
