"""The supervisor of a run: what outlives whom, and the record of a run whose processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.backends import local_hosts, supervisor
from launcher.record.records import RunFolder
from launcher.runner.start_record import STARTING
from tests.conftest import SLEEPER, assert_nothing_left, processes_of, wait_for_ready, wait_until

TWO_HOSTS = {"compute": {"instance_count": 2}}
TORCHRUN = {"distribution": "torchrun", **TWO_HOSTS}


def output(run: launcher.Run, host: str = "algo-1") -> Path:
    return run.folder.host(host) / "output/data"


START = """
import launcher, sys, time
run = launcher.run(launcher.plan(launcher.load(sys.argv[1])), detach=sys.argv[2] == "detached")
print(run.folder.path, flush=True)
time.sleep(100)
"""


def start_elsewhere(job, tmp_path, how: str) -> tuple[subprocess.Popen, launcher.Run]:
    """A run started by another process, and a handle on it here."""
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(job.model_dump(exclude_none=True)))
    starter = subprocess.Popen([sys.executable, "-c", START, str(config), how], text=True, stdout=subprocess.PIPE)
    return starter, launcher.attach(Path(starter.stdout.readline().strip()).name)


def test_a_run_ends_in_order_when_its_starter_is_killed(script_job, tmp_path):
    starter, run = start_elsewhere(script_job(SLEEPER, **TWO_HOSTS), tmp_path, "attached")
    wait_for_ready(run, 2)
    starter.kill()
    starter.wait()
    assert run.wait(60) == "Stopped"
    assert len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/told-*"))) == 2
    assert_nothing_left(run)


def test_a_detached_run_outlives_its_starter(script_job, tmp_path):
    starter, run = start_elsewhere(script_job(SLEEPER), tmp_path, "detached")
    wait_for_ready(run, 1)
    starter.kill()
    starter.wait()
    time.sleep(0.5)  # some rounds of the supervisor
    assert run.state == "InProgress"
    run.stop()
    assert run.wait(60) == "Stopped"


def test_detaching_later_works_too(script_job):
    run = launcher.run(launcher.plan(script_job("import time; time.sleep(1)")))
    run.detach()
    assert run.wait(60) == "Completed"


def commands_of(run: launcher.Run | Path) -> list[tuple[psutil.Process, str]]:
    """The processes of a run that have not ended meanwhile, with their command lines."""
    found = []
    for process in processes_of(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((process, " ".join(process.cmdline())))
    return found


def by_role(run: launcher.Run | Path) -> dict[str, list[psutil.Process]]:
    """The processes of a run, or of one host's folder: supervisor, shims, agents (torchrun), workers and monitors."""
    names = ("supervisor", "shim", "agent", "worker", "watcher", "monitor")
    roles: dict[str, list[psutil.Process]] = {name: [] for name in names}
    for process, command in commands_of(run):
        role = (
            "supervisor" if "launcher.backends.supervisor" in command
            else "shim" if "toolkit.py" in command
            else "watcher" if "leftovers.py" in command
            else "agent" if "torchrun" in command
            else "monitor" if "launcher_observer.system.monitor" in command
            else "worker"
        )  # fmt: skip
        roles[role].append(process)
    return roles


@pytest.mark.parametrize(
    "victim",
    ["supervisor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("worker", "shim", "agent"))],
)
def test_whoever_is_killed_no_process_stays_and_the_record_tells_the_truth(script_job, victim):
    run = launcher.run(launcher.plan(script_job(SLEEPER, **TORCHRUN)))
    wait_for_ready(run, 2)
    random.choice(by_role(run)[victim]).kill()
    assert run.wait(60) == "Failed"
    assert_nothing_left(run)
    failure = run.outcome()["failure"]
    assert (
        "killed" in failure
        if victim in ("supervisor", "shim")
        else ("-9" in failure or "SIGKILL" in failure or "ExitCode" in failure)
    ), failure


@pytest.mark.slow
def test_killed_at_a_random_moment_leaves_no_process_and_a_truthful_record(script_job):
    for moment in (random.uniform(0, 1), random.uniform(1, 8)):
        run = launcher.run(launcher.plan(script_job(SLEEPER, **TORCHRUN)))
        time.sleep(moment)
        supervisor = min(by_role(run)["supervisor"], key=lambda process: process.pid)  # a host begins as a fork of it
        supervisor.kill()
        assert run.wait(60) == "Failed", f"killed after {moment} s"
        assert_nothing_left(run)
        assert launcher.attach(run.name).state == "Failed"


def test_sigterm_to_the_supervisor_stops_the_run_in_order(script_job):
    run = launcher.run(launcher.plan(script_job(SLEEPER)))
    wait_for_ready(run, 1)
    os.kill(run.folder.read(run.folder.supervisor)["pid"], signal.SIGTERM)
    assert run.wait(60) == "Stopped"
    assert (output(run) / "told-0").exists()


def test_a_run_is_never_seen_as_failed_before_it_is(script_job):
    """Another process looks all the time, from before the run can be found until it is over."""
    watch = "import launcher\nprint(launcher.runs(), flush=True)\nseen = set()\nwhile 'Completed' not in seen:\n    seen |= {run.state for run in launcher.runs()}\nprint(sorted(seen))"
    watcher = subprocess.Popen([sys.executable, "-c", watch], stdout=subprocess.PIPE, text=True)
    try:
        assert watcher.stdout.readline() == "[]\n"
        run = launcher.run(launcher.plan(script_job("print(1)")))
        assert run.wait(60) == "Completed"
        assert watcher.communicate(timeout=60)[0].strip() == "['Completed', 'InProgress']"
    finally:
        watcher.kill()


def test_a_failure_before_the_stop_stays_a_failure(script_job):
    text = """
    import os, pathlib, time
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
    (output / "ready-0").touch()
    while not (output / "fail").exists():
        time.sleep(0.1)
    raise SystemExit(42)
    """
    run = launcher.run(launcher.plan(script_job(text, **TWO_HOSTS)))
    wait_for_ready(run, 2)
    host = run.folder.host("algo-2")
    [shim] = by_role(host)["shim"]
    (host / "output/data/fail").touch()
    shim.wait(60)  # it is gone when the supervisor has asked how it ended
    run.stop()
    assert run.wait(60) == "Failed" and run.outcome()["exit_code"] == 42


LEAVES_CHILDREN = """
    import os, pathlib, subprocess, sys, time
    sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"]
    subprocess.Popen(sleep)
    subprocess.Popen(["setsid", "--fork", *sleep], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "ready-0").touch()
    time.sleep(1000)
"""
"""A script with a child, and one that left its session and its parent."""


def test_starter_supervisor_and_shims_killed_together_leave_no_process(script_job, tmp_path):
    starter, run = start_elsewhere(script_job(LEAVES_CHILDREN, **TWO_HOSTS), tmp_path, "attached")
    wait_for_ready(run, 2)
    wait_until(lambda: len(asleep(run)) == 4, what="two children of each host")
    roles = by_role(run)
    victims = [psutil.Process(starter.pid), *roles["supervisor"], *roles["shim"]]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another die
        for process in victims:
            process.send_signal(number)
    starter.wait()
    assert_nothing_left(run)
    assert run.state == "Failed"


def asleep(run: launcher.Run) -> list[psutil.Process]:
    """The children of LEAVES_CHILDREN."""
    return [
        process for process, command in commands_of(run) if "time.sleep(1000)" in command and "setsid" not in command
    ]


STARTS_AND_STOPS = """
import json, os, signal, sys
import launcher
from launcher.runner import start_record
before = start_record.copy_files
def stop_here(*arguments):
    before(*arguments)
    print(len(arguments[0]), flush=True)
    signal.pause()
start_record.copy_files = stop_here
launcher.run(launcher.plan(launcher.load(sys.argv[1])))
"""


def test_a_starter_that_is_killed_early_leaves_no_unlisted_folder(script_job, tmp_path, store):
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(script_job("print(1)").model_dump(exclude_none=True)))
    starter = subprocess.Popen([sys.executable, "-c", STARTS_AND_STOPS, str(config)], text=True, stdout=subprocess.PIPE)
    assert int(starter.stdout.readline()) > 0
    [half] = (store / STARTING).iterdir()
    assert (half / "code/script.py").exists() and launcher.runs() == []
    an_hour_ago = time.time() - 3600
    os.utime(half, (an_hour_ago, an_hour_ago))
    assert launcher.run(launcher.plan(script_job("print(1)"))).wait(60) == "Completed"
    assert half.exists(), "its starter lives"
    starter.kill()
    starter.wait()
    os.utime(half, (an_hour_ago, an_hour_ago))
    run = launcher.run(launcher.plan(script_job("print(1)")))
    assert run.wait(60) == "Completed"
    assert not half.exists() and len(launcher.runs()) == 2


def test_a_run_whose_starter_is_killed_before_the_supervisor_is_up_is_listed_as_not_started(script_job, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(script_job("print(1)").model_dump(exclude_none=True)))
    text = STARTS_AND_STOPS.replace(
        "launcher.runner import start_record", "launcher.backends import host_folders as start_record"
    )
    starter = subprocess.Popen([sys.executable, "-c", text, str(config)], text=True, stdout=subprocess.PIPE)
    starter.stdout.readline()
    [run] = launcher.runs()
    assert run.state == "InProgress"
    starter.kill()
    starter.wait()
    assert run.state == "Failed"
    assert run.outcome()["failure"] == "not started: the process that started it was killed"


def test_a_port_is_reserved_without_a_file_as_long_as_its_holder_lives():
    before = set(Path(tempfile.gettempdir()).glob("launcher-port-*"))
    port, reservation = local_hosts.reserve_port()
    mine = socket.socket(type=socket.SOCK_DGRAM)
    with pytest.raises(OSError, match="in use"):
        mine.bind(("127.0.0.1", port))
    reservation.close()
    mine.bind(("127.0.0.1", port))
    mine.close()
    assert set(Path(tempfile.gettempdir()).glob("launcher-port-*")) == before


@pytest.mark.parametrize(("code", "said"), [(-9, "killed by SIGKILL"), (-127, "exit code -127"), (2, "exit code 2")])
def test_any_exit_code_has_words(tmp_path, code, said):
    host, text = supervisor.first_failure(RunFolder(tmp_path), {"algo-1": 0, "algo-2": code})
    assert (host, text) == ("algo-2", f"the toolkit on algo-2 left no failure file ({said})")
