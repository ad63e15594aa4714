"""How a drill ends runs: SIGKILL to a script, a host, a whole run or a server, at a moment that is likely to hurt."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.backends import toolkit
from launcher.runner.run import Run

WORKERS, STOP, HOST, MACHINE = "SIGKILL to the script", "SIGTERM", "SIGKILL to a host", "SIGKILL to all of the run"
ORDER = (WORKERS, STOP, HOST, MACHINE)
"""How runs are ended, in turn: one host's training processes die; the run is stopped; a host is lost; the machine fails."""

SERVER, SERVER_TITLE = "SIGKILL to a server", "ray::ImageServer"
"""How a drill of servers kills, and how the title of a server's process begins, as Ray gives it."""

WRITING_SECONDS = 20
"""Seconds that a kill waits for a checkpoint to begin."""


@dataclass(frozen=True)
class Kill:
    """One kill, and how the next run continued."""

    how: str
    at_step: int
    """The last step that the killed run reported."""
    resumed_from: int = 0
    """The step from which the next run resumed; 0: it started over. Of a server: the same step, since the run goes on."""
    seconds: float = 0.0
    """Seconds from the kill to the next run's first metric line; of a server, to the run's next step."""


def wait_for_a_checkpoint_under_way(run: Run) -> None:
    """Wait until a hidden file, a checkpoint that is not complete, appears or changes in the first host's folder."""
    folder = run.folder.host(run.hosts[0]) / "checkpoints"
    before, end = _hidden(folder), time.monotonic() + WRITING_SECONDS  # an earlier kill may have left one
    while time.monotonic() < end and not run.folder.outcome.exists() and _hidden(folder) <= before:
        time.sleep(0.001)


def _hidden(folder: Path) -> set[tuple[str, int]]:
    found = set()
    for path in folder.iterdir():
        if path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # it is complete now
                found.add((path.name, path.stat().st_mtime_ns))
    return found


def kill(run: Run, how: str, rng: random.Random) -> None:
    """SIGKILL to the whole run, to one of its hosts, or to the training processes there."""
    supervisor = psutil.Process(run.folder.read(run.folder.supervisor)["pid"])
    host = str(run.folder.host(rng.choice(run.hosts)))
    shims = [child for child in supervisor.children() if child.cwd() == host]
    if how == WORKERS:
        for process in (process for shim in shims for process in toolkit.training_processes(shim)):
            process.kill()
    else:
        for root in [supervisor] if how == MACHINE else shims:
            _kill_tree(root)


def is_server(process: psutil.Process) -> bool:
    """Whether a process makes images for a run."""
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith(SERVER_TITLE)
    return False


def _kill_tree(root: psutil.Process) -> None:
    """SIGKILL to a process and its descendants: all are suspended first, so that none sees another die."""
    suspended: list[psutil.Process] = []
    while new := [process for process in [root, *root.children(recursive=True)] if process not in suspended]:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        suspended += new
    for process in suspended:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
