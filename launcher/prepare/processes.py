"""Spread work over processes, which end with this one, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from launcher.backends.local_hosts import core_count
from launcher.config.issues import UserError, mistake

Task = TypeVar("Task")
Result = TypeVar("Result")

Advance = Callable[[int], object]
"""Called with the number of images done since the last call."""

START = (
    "import sys; number, *sys.path = sys.argv[1:]; "
    "from launcher.prepare.processes import work_until_closed; work_until_closed(int(number))"
)
"""What a worker runs, with the number of its connection and this process's `sys.path` as arguments."""


def available_cores() -> int:
    """Cores that this process may use, by its affinity and its quota (cgroup v2)."""
    cores = core_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(int(quota) / int(period)))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def spread(
    work: Callable[[Task, Advance], Result], tasks: Sequence[Task], jobs: int, advance: Advance
) -> Iterator[Result]:
    """The results of the tasks, in the order of completion.

    The workers are new processes: a fork would copy locks that this process's threads hold, and multiprocessing's other ways of
    starting one would run the calling script again.

    Args:
        work: a module-level function, so that it can be pickled.
        jobs: processes. With one job or one task, this process does the work.
        advance: called in this process with the progress of all.

    Raises:
        UserError: a worker was killed.
        Exception: what `work` raised.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from (work(task, advance) for task in tasks)
        return
    waiting = iter(tasks)
    workers = dict(_start() for _ in range(jobs))
    try:
        for connection, task in zip(list(workers), islice(waiting, jobs)):
            _give(connection, workers[connection], (work, task))
        while workers:
            ready = wait(list(workers))
            for connection in [one for one in workers if one in ready]:
                kind, value, *origin = _received(connection, workers[connection])
                if kind == "advance":
                    advance(value)
                elif kind == "error":
                    raise value from RuntimeError(f"in a worker process:\n{origin[0]}")
                else:
                    following = list(islice(waiting, 1))
                    if following:
                        _give(connection, workers[connection], (work, following[0]))
                    else:
                        connection.close()
                        workers.pop(connection).communicate()
                    yield value
    finally:
        for process in workers.values():
            process.kill()  # its unfinished file has a temporary name
            process.communicate()


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A new worker, and the connection to it. The worker ends when its standard input, which is never written to, closes."""
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-c", START, str(theirs.fileno()), *sys.path]
        return ours, subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])


def _give(connection: Connection, worker: subprocess.Popen[bytes], task: tuple[Any, Any]) -> None:
    """Send a worker its task."""
    try:
        connection.send(task)
    except OSError:
        raise _ended(worker) from None


def _received(connection: Connection, worker: subprocess.Popen[bytes]) -> tuple[Any, ...]:
    """A worker's next message: its kind and value."""
    try:
        message: tuple[Any, ...] = connection.recv()
    except (EOFError, OSError):
        raise _ended(worker) from None
    return message


def _ended(worker: subprocess.Popen[bytes]) -> UserError:
    """The error that a worker was killed."""
    code = worker.wait()
    how = signal.Signals(-code).name if code < 0 else f"status {code}"
    fix = "use fewer processes (--jobs 2) where memory is short; the same command again continues"
    return mistake("--jobs", f"a worker process ended with {how}", fix)


def work_until_closed(number: int) -> None:
    """In a worker: do the tasks that arrive until the connection closes.

    Args:
        number: the connection's file descriptor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(number)
    while True:
        try:
            work, task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("result", work(task, lambda count: connection.send(("advance", count)))))
        except Exception as error:
            connection.send(("error", error, traceback.format_exc()))


def _end_with_parent() -> None:
    while os.read(0, 1):
        continue
    os._exit(1)
