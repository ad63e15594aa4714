"""One system monitor per host, for as long as a process of the run lives there.

Two locked files in the monitor's folder say so: PRESENT, which all these processes share, and MONITOR, which the monitor has
to itself. The kernel unlocks a file when its holder ends, however that ends: https://man7.org/linux/man-pages/man2/flock.2.html

Every Python process of a run imports it at its start, so it imports next to nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

FOLDER = "profiler-output"
"""In the host's output folder: what SageMaker's profiler readers take as the root."""

PRESENT, MONITOR = ".present", ".monitor"
"""Locked files in FOLDER. The second holds the monitor's process id."""

PAUSE = 0.002
"""Seconds between attempts to be present while the last monitor ends, or checks that it has."""

BUSY_SECONDS = 2.0
"""Timeout to be present while the last monitor ends, which may take its only sample then, on busy cores."""

END_SECONDS = 5.0
"""Timeout for a monitor's end, which may still be starting."""

RUN = "import sys; sys.path.append(sys.argv.pop(1)); from launcher_observer.system.monitor import main; main()"
"""The package's folder comes last, after Python's own: no module of a script shadows one of those."""


class Presence:
    """A process's presence on its host, during which a monitor samples it."""

    present = False
    """Whether this process, or the one it was forked from, is already present: a host has one monitor."""

    def __init__(self, output: str, *, quiet: bool):
        """Be present until `leave`, or until this process and its forks have ended. The first to be present starts the monitor.

        Args:
            output: the host's output folder.
            quiet: report what cannot be sampled in a file beside the samples, not on this process's standard error.

        Raises:
            OSError: the folder cannot be written, or its file system has no locks.
        """
        self._folder = os.path.join(os.path.abspath(output), FOLDER)
        os.makedirs(self._folder, exist_ok=True)
        self._present = self._open(PRESENT)
        end = time.monotonic() + BUSY_SECONDS
        while not locked(self._present, fcntl.LOCK_SH) and time.monotonic() < end:
            time.sleep(PAUSE)  # the last monitor holds it for as long as it takes to end
        monitor = self._open(MONITOR)
        if locked(monitor, fcntl.LOCK_EX):
            _start(os.path.dirname(self._folder), monitor, quiet)
        os.close(monitor)
        Presence.present = True

    def leave(self) -> None:
        """Be absent. If no other process is present, wait for the monitor's end: it first samples a run that was too short for it."""
        Presence.present = False
        fcntl.flock(self._present, fcntl.LOCK_UN)
        monitor = self._open(MONITOR)
        end = time.monotonic() + END_SECONDS
        while not locked(monitor, fcntl.LOCK_SH) and time.monotonic() < end:
            others = not locked(self._present, fcntl.LOCK_EX) and locked(self._present, fcntl.LOCK_SH)
            fcntl.flock(self._present, fcntl.LOCK_UN)
            if others:
                break
            time.sleep(PAUSE)
        os.close(monitor)
        os.close(self._present)

    def _open(self, name: str) -> int:
        return os.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT, 0o644)


def locked(file: int, how: int) -> bool:
    """Whether a file could be locked at once, shared or exclusively."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(output: str, lock: int, quiet: bool) -> None:
    """Start the monitor with the locked file as its standard input, so that the lock lasts as long as the monitor.

    It is not a child of this process: a script that waits for its children must not wait for it.
    """
    command = [sys.executable, "-I", "-S", "-B", "-c", RUN, os.path.dirname(os.path.dirname(os.path.dirname(__file__)))]
    command += [output, f"--starter={os.getpid()}", *(["--quiet"] if quiet else [])]
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # Ctrl-C is not for it
            if os.fork() == 0:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(lock, 0)
                os.dup2(nowhere, 1)
                if quiet:
                    os.dup2(nowhere, 2)
                os.execv(command[0], command)
        finally:
            os._exit(0)
    try:
        os.waitpid(child, 0)
    except ChildProcessError:  # this process ignores SIGCHLD, so the kernel has removed the child: waitpid(2)
        return
