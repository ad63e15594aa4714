"""Work spread over processes, which end with this one, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Task = TypeVar("Task")
Result = TypeVar("Result")

Advance = Callable[[int], object]
"""Called with the number of images that were done since the last call."""

_done: Synchronized[int]
"""In a worker process: the shared count of images done."""


def available_cores() -> int:
    """Cores that this process may use, by its affinity and its quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(int(quota) / int(period)))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def spread(
    work: Callable[[Task, Advance], Result], tasks: Sequence[Task], jobs: int, advance: Advance
) -> Iterator[Result]:
    """The results of the tasks, in the order of completion.

    Args:
        work: a function of a module, so that it can be pickled.
        jobs: processes. With one job or one task, this process does the work.
        advance: called in this process with the progress of all.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from (work(task, advance) for task in tasks)
        return
    context = multiprocessing.get_context("fork")  # the calling script need not be importable
    done, reported = context.Value("q", 0), 0
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(done,))
    try:
        waiting = {pool.submit(_work, work, task) for task in tasks}
        while waiting:
            finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            advance(done.value - reported)
            reported = done.value
            yield from (future.result() for future in finished)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.kill()  # its unfinished file has a temporary name
        raise
    pool.shutdown()


def _begin(done: Synchronized[int]) -> None:
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(work: Callable[[Task, Advance], Result], task: Task) -> Result:
    def advance(count: int) -> None:
        with _done.get_lock():
            _done.value += count

    return work(task, advance)
