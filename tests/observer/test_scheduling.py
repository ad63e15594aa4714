"""What the kernel tells of the threads that drive a device, and of the programs beside a run: on real threads and processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from launcher_observer import scheduling
from launcher_observer.scheduling import DrivingThreads
from launcher_observer.system.neighbours import TOTAL, Neighbours

from tests.observer.scripted import ENTRYPOINTS


def burn(seconds: float) -> None:
    """Use a core for so long, by the thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def ran(script: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ENTRYPOINTS), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_thread_that_shares_its_core_waits_for_it():
    """Another process on the only core: a half of the time each, if nobody else wants it too."""
    cpu, delay = map(
        float,
        ran("""
        import os, signal, time
        from launcher_observer.scheduling import DrivingThreads
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        other = os.fork()
        if other == 0:
            while True:
                pass
        threads = DrivingThreads()
        end = time.perf_counter() + 1
        while time.perf_counter() < end:
            pass
        found = threads.a_step(1.0)
        os.kill(other, signal.SIGKILL)
        print(found["thread_cpu_seconds"], found["run_delay_seconds"])
        """).split(),
    )
    assert delay > 0.25 and 0 < cpu < 0.75 and cpu + delay == pytest.approx(1, abs=0.2)


def test_the_threads_of_backward_passes_count_with_the_one_that_waits_for_them():
    go, done, end = threading.Event(), threading.Event(), threading.Event()

    def backward(name: bytes) -> None:
        assert ctypes.CDLL(None).prctl(15, name) == 0  # PR_SET_NAME
        named.release()
        go.wait()
        burn(0.2)
        done.set()
        end.wait()  # an autograd thread stays

    for name, counts in ((b"pt_autograd_0", True), (b"something else", False)):
        go.clear(), done.clear(), end.clear()
        named = threading.Semaphore(0)
        thread = threading.Thread(target=backward, args=[name])
        thread.start()
        named.acquire()
        threads = DrivingThreads()
        began = time.perf_counter()
        go.set()
        done.wait()
        used = threads.a_step(1.0)["thread_cpu_seconds"] * (time.perf_counter() - began)
        end.set()
        thread.join()
        assert (used > 0.15) == counts, used


def test_a_time_that_does_not_count_is_left_out(monkeypatch):
    threads = DrivingThreads()
    burn(0.2)
    threads.restart()
    monkeypatch.setattr(scheduling, "SHORTEST", 60)
    assert threads.a_step(1.0) == {}, "too little time has passed"
    monkeypatch.undo()
    time.sleep(0.2)
    assert threads.a_step(1.0)["thread_cpu_seconds"] < 0.5


@pytest.mark.parametrize("text", ["0 0 0\n", "", "nothing\n", None])
def test_a_kernel_that_counts_nothing_tells_nothing(tmp_path, monkeypatch, text):
    task = tmp_path / str(threading.get_native_id())
    task.mkdir()
    if text is not None:
        (task / "schedstat").write_text(text)
    monkeypatch.setattr(scheduling, "TASKS", tmp_path)
    threads = DrivingThreads()
    threads.restart()
    time.sleep(0.02)
    assert threads.a_step(1.0) == {}


def test_programs_outside_the_run_are_named_and_those_of_the_run_are_not(tmp_path):
    for name in ("outside-it", "inside-it", "of-its-child"):
        (tmp_path / name).symlink_to("/bin/sh")
    found = ran(
        f"""
        import os, subprocess, time
        from launcher_observer.system import neighbours
        neighbours.NOTICED, neighbours.MOST = 0.0001, 10000  # many others may want the cores too
        of_nothing = {{name: value for name, value in os.environ.items() if name != "TRAINING_JOB_NAME"}}
        loop = ["-c", "while :; do :; done"]
        start = {str(tmp_path)!r} + "/outside-it -c 'while :; do :; done' >/dev/null 2>&1 & echo $!"
        outside = subprocess.run(["sh", "-c", start], env=of_nothing, capture_output=True, check=True).stdout  # nobody's child
        inside = [subprocess.Popen([{str(tmp_path)!r} + "/inside-it", *loop]),
                  subprocess.Popen([{str(tmp_path)!r} + "/of-its-child", *loop], env=of_nothing)]
        try:
            looking, now = neighbours.Neighbours("0"), time.monotonic()
            assert looking.look(now) == {{}}
            assert looking.look(now) == {{}}, "no look is due"
            time.sleep(1.1)
            print(looking.look(time.monotonic()))
        finally:
            os.kill(int(outside), 9)
            for process in inside:
                process.kill()
        """,
        TRAINING_JOB_NAME="a-run-of-this-test",
    )
    assert "outside-it" in found and "inside-it" not in found and "of-its-child" not in found


def test_names_are_safe_to_write_and_each_look_has_a_total(tmp_path):
    def process(number: int, name: str, ticks: int, environ: bytes, parent: int = 1) -> None:
        place = tmp_path / str(number)
        place.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, "77"]
        (place / "stat").write_text(f"{number} ({name}) {' '.join(fields)}\n")
        (place / "environ").write_bytes(environ)

    (tmp_path / "self").mkdir()
    (tmp_path / "self/environ").write_bytes(b"A=1\0TRAINING_JOB_NAME=mine\0")
    (tmp_path / "meminfo").write_text("")
    second = os.sysconf("SC_CLK_TCK")
    for ticks in (0, 2 * second):
        process(10, 'a "b" (c', ticks, b"TRAINING_JOB_NAME=another\0")
        process(11, "mine", ticks, b"B=2\0TRAINING_JOB_NAME=mine\0")
        process(12, "idle", ticks // 100, b"")
        process(13, "with a title", ticks, b"title\0\0\0", parent=14)
        process(14, "its parent", 0, b"\0", parent=11)
        process(15, "a notebook", ticks, b"C=3\0")
        process(16, "of its cell", ticks, b"C=3\0", parent=15)
        if not ticks:
            neighbours = Neighbours("15", tmp_path)
            assert neighbours.look(100.0) == {}
    assert neighbours.look(102.0) == {TOTAL: 1.0, ("neighbour", "a _b_ _c", "CPUCores"): 1.0}
    assert neighbours.look(103.0) == {}, "the next look is due later"
    assert neighbours.look(107.0) == {TOTAL: 0}


def test_a_process_that_is_of_no_run_looks_at_nobody(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/environ").write_bytes(b"A=1\0")
    assert Neighbours("0", tmp_path).look(1.0) == {}


def test_a_process_that_has_the_starters_number_later_is_none_of_the_run(tmp_path):
    place = tmp_path / "15"
    place.mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "self/environ").write_bytes(b"TRAINING_JOB_NAME=mine\0")
    second, cores = os.sysconf("SC_CLK_TCK"), []
    for started, ticks in (("77", 0), ("77", second), ("99", second), ("99", 2 * second)):
        fields = ["S", "1", *["0"] * 9, str(ticks), "0", *["0"] * 6, started]
        (place / "stat").write_text(f"15 (reused) {' '.join(fields)}\n")
        (place / "environ").write_bytes(b"")
        if not cores:
            neighbours = Neighbours("15", tmp_path)
        cores.append(neighbours.look(100.0 + 10 * len(cores)).get(TOTAL))
    assert cores == [None, 0, 0, 0.1]
