"""Whom the shim sends a SIGTERM to: ranks that mpirun starts, and no process that is not the script yet."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch

from launcher.backends import toolkit
from tests.conftest import wait_until

SLEEPS = f"exec {sys.executable} -c 'import time; time.sleep(60)'"
RANK = f"#!/bin/sh\nexport {toolkit.RANK}=$1\n"


@pytest.fixture
def stand_in(tmp_path):
    """Starts a process tree whose top has a launcher's name: `stand_in("mpirun", text_of_shell_script)`; afterwards it is gone."""
    started = []

    def start(name: str, text: str) -> psutil.Process:
        (tmp_path / "rank").write_text(f"{RANK}exec {tmp_path}/smddprun\n")
        (tmp_path / "smddprun").write_text(f'#!/bin/sh\nsh -c "{SLEEPS}" rank\n:\n')
        for tool in ("rank", "smddprun"):
            (tmp_path / tool).chmod(0o755)
        (tmp_path / name).symlink_to("/bin/bash")
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        started.append(subprocess.Popen([str(tmp_path / name), "-c", text], env=environment, start_new_session=True))
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mpirun", f"(exec -a ssh {SLEEPS[5:]}) & rank 0 & rank 1 & wait"),  # ssh: to the other hosts
        ("sshd", "bash -c 'bash -c \"rank 2 & rank 3 & wait\"; :'; :"),
    ],
)
def test_under_mpirun_it_reaches_the_ranks_and_neither_mpirun_nor_the_way_to_other_hosts(stand_in, name, text):
    top = stand_in(name, text)
    script = [["-c", "import time; time.sleep(60)"]] * 2
    wait_until(lambda: [process.cmdline()[1:] for process in toolkit.ranks_below(top)] == script, 20, "two ranks")
    below = top.children(recursive=True)
    found = [process for process in toolkit.training_processes(psutil.Process()) if process in (top, *below)]
    assert found == toolkit.ranks_below(top)


def test_a_fork_gets_no_signal_before_it_is_the_script():
    """It has the parent's handler, which would swallow the signal; and no process gets it twice."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os.execvp("sleep", ["sleep", "60"])
    try:
        script, here = psutil.Process(pid), psutil.Process()
        assert script in here.children() and script not in toolkit.training_processes(here)
        os.write(writing, b".")
        wait_until(lambda: script in toolkit.training_processes(here), 20, "the script")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


PROGRAMS = {
    "shim": "from launcher.backends import toolkit as program",
    "image": "import runpy, types; program = types.SimpleNamespace(**runpy.run_path('docker/start.py'))",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_sigterm_is_heard_while_the_main_thread_waits_in_a_system_call(program):
    """The kernel may give it to another thread, and it may come just before the call: no Python handler runs then."""
    text = f"""
        import ctypes, os, signal, subprocess, threading
        {PROGRAMS[program]}
        signals = program.caught_signals()
        def hear():
            assert os.read(signals, 1) == bytes([signal.SIGTERM])
            os._exit(7)
        threading.Thread(target=hear, daemon=True).start()
        waiting = threading.Event()
        def get_it():
            waiting.wait()
            ctypes.CDLL(None).tgkill(os.getpid(), threading.get_native_id(), signal.SIGTERM)
        threading.Thread(target=get_it, daemon=True).start()
        child = subprocess.Popen(["sleep", "20"])
        waiting.set()
        os.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)])
    assert done.returncode == 7


def test_the_toolkit_is_given_torchs_version_and_need_not_import_it():
    """Its import takes every host of a run two seconds."""
    code = (
        "import os, sys; from launcher.backends import toolkit; import sagemaker_pytorch_container.training as training;"
        "toolkit.name_the_torch_version(training); training._set_torch_version_environment();"
        "print(os.environ['SM_DLC_TORCH_VERSION'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{torch.__version__} False\n", done.stderr
