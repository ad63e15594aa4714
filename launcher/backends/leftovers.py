"""The watcher of a local run: once the supervisor ends, for whatever reason, it ends every process that the hosts left.

    python leftovers.py RUN_FOLDER

The supervisor starts the watcher in its own session and holds the other end of its standard input, which the kernel closes with the
supervisor. Supervisor and shims end their processes themselves, but if all of them are killed at once, a process that called setsid
would survive. The watcher finds it by SAGEMAKER_BASE_DIR, which every process of a host inherits and which lies below the run's folder.

The file runs by its path and imports nothing of this kit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules must not replace the library's

import psutil


def watcher(folder: Path) -> subprocess.Popen[bytes]:
    """Start the watcher of a run. It acts once its standard input is closed."""
    command = [sys.executable, str(Path(__file__)), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")


def end_processes_below(folder: Path) -> None:
    """SIGKILL this user's processes whose /opt/ml is below a folder, until there is none."""
    while found := [process for process in psutil.process_iter() if _is_below(process, folder)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)  # a killed process is no longer found, even before its parent notices


def _is_below(process: psutil.Process, folder: Path) -> bool:
    try:
        base = process.environ().get("SAGEMAKER_BASE_DIR", "") if process.uids().real == os.getuid() else ""
    except psutil.Error:  # it has ended
        return False
    return bool(base) and Path(base).is_relative_to(folder)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_processes_below(Path(sys.argv[1]))
