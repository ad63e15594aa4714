"""Runs a function in its own process, forked before CUDA starts: it may crash, hang or poison its CUDA context."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

TIMED_OUT = -signal.SIGKILL


def run_isolated(function: Callable[[], None], log: Path, seconds: float) -> int:
    """Run a function in a fork, with its output in a file; whatever it leaves running ends with it.

    Returns:
        0 if it returned, 1 if it raised, -N if signal N ended it; TIMED_OUT also if its time was over.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = start(function, log)
    try:
        return wait(pid, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def start(function: Callable[[], None], log: Path, *, own_group: bool = True) -> int:
    """Fork a process that runs a function; returns its process id.

    Args:
        own_group: it gets its own process group. Otherwise it ends with its parent's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if own_group:
            os.setsid()
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int:
    """Wait for a process from `start`, and kill it once its time is over; returns its exit code as `run_isolated` does."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return TIMED_OUT
        time.sleep(0.02)


def tail(log: Path, characters: int = 1500) -> str:
    """The end of a log."""
    if not log.is_file():
        return ""
    return log.read_text(encoding="utf-8", errors="replace")[-characters:].strip()
