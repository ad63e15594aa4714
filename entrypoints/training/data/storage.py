"""Storage that fails for a moment: a read is tried again for a while, and a failure that lasts ends the run by its own name.

S3 behind a FastFile channel throttles, and FSx evicts a silent client: each read then fails until the mount has recovered. No image is
damaged by that, so none is left out: else workers would skip different ones, and an evaluation would be of fewer images for good.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from training.runtime.back_off import doubling
from training.runtime.reporting import write_line

OF_THE_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Errors about one path, which no waiting changes. All others are storage's."""

TRIES = 8
"""Attempts at a read, the first included."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 16.0
"""Seconds between tries: 47.5 in all. An evicted FSx client learns of it by its next ping, 25 seconds later at most (a quarter of
Lustre's timeout, https://doc.lustre.org/lustre_manual.xhtml); and a client of an image server gives up after 60 without an answer."""

SAID_AGAIN = 600.0
"""Seconds for which a process says nothing more after it has said that it waits."""

Read = TypeVar("Read")

_given_up: ContextVar[threading.Event] = ContextVar("given_up")
"""Per thread: set when nobody wants what it reads any more."""

_NEVER = threading.Event()
"""For a thread whose loader waits for all that it reads."""

_said = -math.inf
"""When this process last said that it waits."""


class StorageError(OSError):
    """Storage keeps failing. The message names the host, the path and the error, and says what to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a plain OSError it reaches any process: that of `launcher prepare` cannot import this module."""
        return OSError, self.args


def wait_until(given_up: threading.Event) -> None:
    """Let this thread wait for storage only until `given_up` is set: whoever ends its loader waits for the thread."""
    _given_up.set(given_up)


def read_with_retries(read: Callable[[], Read], file: str | os.PathLike[str]) -> Read:
    """The result of `read`, which is called again while storage fails.

    Args:
        read: reads from the beginning each time, from a newly opened file: a mount that was lost does not know the old one any more.
        file: what it reads, for messages.

    Raises:
        StorageError: it failed TRIES times, or nobody wants it any more.
        OSError: at once, one of OF_THE_FILE or one without an errno.
    """
    started = time.monotonic()
    for failures in itertools.count(1):
        try:
            return read()
        except OSError as error:
            if error.errno is None or error.errno in OF_THE_FILE:
                raise
            if failures == TRIES or _given_up.get(_NEVER).is_set():
                raise StorageError(_about(error, file, failures, time.monotonic() - started)) from error
            _say_that_it_waits(error, file)
        _given_up.get(_NEVER).wait(doubling(failures, FIRST_PAUSE, LONGEST_PAUSE))
    raise AssertionError("a count has no end")


def _about(error: OSError, file: str | os.PathLike[str], tries: int, seconds: float) -> str:
    return (
        f"storage fails on {_host()}: {_what(error, file)}, in {tries} tries over {seconds:.0f} s. No image is counted as broken. "
        "Restore the file system or channel (FSx: was its client evicted? FastFile: does S3 throttle?), then start again: a run "
        "resumes from its last checkpoint"
    )


def _say_that_it_waits(error: OSError, file: str | os.PathLike[str]) -> None:
    """Log one line for everything that a process waits for. Without a lock, which a fork could find held."""
    global _said
    now = time.monotonic()
    if now - _said < SAID_AGAIN:
        return
    _said = now
    most = sum(doubling(failures, FIRST_PAUSE, LONGEST_PAUSE) for failures in range(1, TRIES))
    write_line(f"waiting for storage on {_host()}, up to {most:.0f} s per read: {_what(error, file)}")


def _what(error: OSError, file: str | os.PathLike[str]) -> str:
    return f"{os.fspath(file)}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def _host() -> str:
    return os.environ.get("SM_CURRENT_HOST") or socket.gethostname()
