"""Work spread over processes: new ones, which know nothing of this process's threads, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.prepare import processes
from launcher.prepare.processes import spread
from tests.conftest import wait_until

LOCK = threading.Lock()


def square(number: int, advance) -> int:
    with LOCK:
        advance(1)
        return number * number


def refuse(number: int, advance) -> int:
    raise ValueError(f"not {number}")


def end_all(number: int, advance) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_lock_that_a_thread_holds_here_is_free_in_the_workers():
    done = []
    with LOCK:
        assert sorted(spread(square, range(7), 2, done.append)) == [0, 1, 4, 9, 16, 25, 36]
    assert sum(done) == 7


def test_an_error_comes_back_with_its_origin_and_the_other_workers_end():
    before = psutil.Process().children()
    with pytest.raises(ValueError, match="not 0|not 1") as error:
        list(spread(refuse, range(4), 2, lambda _: None))
    assert "in refuse" in str(error.value.__cause__)
    assert set(psutil.Process().children()) <= set(before)


def test_a_worker_that_is_killed_is_a_mistake_with_a_fix():
    with pytest.raises(launcher.UserError, match="a worker process ended with SIGKILL\n.*--jobs"):
        list(spread(end_all, range(4), 2, lambda _: None))


def test_so_is_one_that_is_killed_before_it_gets_work(monkeypatch):
    start = processes._start

    def killed():
        connection, worker = start()
        worker.kill()
        worker.wait()
        return connection, worker

    monkeypatch.setattr(processes, "_start", killed)
    with pytest.raises(launcher.UserError, match="a worker process ended with SIGKILL\n.*--jobs"):
        list(spread(square, range(4), 2, lambda _: None))


SCRIPT = """
import sys, time
from launcher.prepare.processes import spread
from tests.launcher.test_prepare_processes import square, wait_for_ever
print("began", flush=True)
print(sum(spread({work}, range(3), 2, lambda _: None)), flush=True)
"""


def wait_for_ever(number: int, advance) -> int:
    threading.Event().wait()
    return number


def test_the_calling_script_does_not_run_again_in_a_worker(tmp_path):
    script = Path(tmp_path, "script.py")
    script.write_text(SCRIPT.format(work="square"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert done.stdout == "began\n5\n", done.stderr


def test_workers_end_with_the_process_that_started_them(tmp_path):
    script = Path(tmp_path, "script.py")
    script.write_text(SCRIPT.format(work="wait_for_ever"))
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    wait_until(lambda: len(psutil.Process(parent.pid).children()) == 2, what="two workers")
    workers = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
