"""How a drill ends runs: SIGKILL to a script, a host, a whole run or a server, at a moment that is likely to hurt."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.backends import toolkit
from launcher.config.issues import mistake
from launcher.record import records
from launcher.runner.run import Run

WORKERS, STOP, HOST, MACHINE = "SIGKILL to the script", "SIGTERM", "SIGKILL to a host", "SIGKILL to all of the run"
ORDER = (WORKERS, STOP, HOST, MACHINE)
"""How runs are ended, in turn: one host's training processes die; the run is stopped; a host is lost; the machine fails."""

SERVER, SERVER_TITLE = "SIGKILL to a server", "ray::ImageServer"
"""How a server drill kills, and how the process title that Ray gives a server begins."""

WRITING_SECONDS = 20
"""Seconds that a kill waits for a checkpoint to begin."""

ENDING_SECONDS = 30
"""Seconds to wait for the end of a run whose host has no process left: its supervisor still packs the model."""


@dataclass(frozen=True)
class Kill:
    """One kill, and how the next run continued."""

    how: str
    at_step: int
    """The last step that the killed run reported."""
    resumed_from: int | None = 0
    """The step from which the next run resumed; 0: it started over; None: the script does not report it. For a server: the same step,
    since the run goes on."""
    seconds: float = 0.0
    """Seconds from the kill to the next run's first metric line; for a server, to the run's next step."""

    @property
    def steps_lost(self) -> int | None:
        """Steps that the next run did again; None if it is not known from which it resumed."""
        return None if self.resumed_from is None else max(0, self.at_step - self.resumed_from)


def wait_for_a_checkpoint_under_way(run: Run) -> None:
    """Wait until a hidden file (an incomplete checkpoint) appears or changes in the first host's folder."""
    folder = run.folder.checkpoints(run.hosts[0])
    before, end = _hidden(folder), time.monotonic() + WRITING_SECONDS  # an earlier kill may have left one
    while time.monotonic() < end and not run.folder.outcome.exists() and _hidden(folder) <= before:
        time.sleep(0.001)


def _hidden(folder: Path) -> set[tuple[str, int]]:
    found = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # it is complete now
                found.add((path.name, path.stat().st_mtime_ns))
    return found


def kill(run: Run, how: str, rng: random.Random) -> None:
    """SIGKILL the whole run, one of its hosts, or the training processes there.

    Raises:
        UserError: the run goes on, and no such process was found.
    """
    supervisor = psutil.Process(run.folder.read(run.folder.supervisor)["pid"])
    host = rng.choice(run.hosts)
    found = [supervisor] if how == MACHINE else _shims(supervisor, run.folder.host(host))
    if how == WORKERS:
        found = [process for shim in found for process in toolkit.training_processes(shim)]
        for process in found:
            _kill(process)
    else:
        for root in found:
            _kill_tree(root)
    if not found and run.wait(ENDING_SECONDS, progress=False) not in records.OVER:
        what = f"{run.name} goes on, and {host} has no process to kill"
        raise mistake("run", what, f"stop it with launcher stop {run.name}, and read {run.folder.supervisor_log}")


def _shims(supervisor: psutil.Process, host: Path) -> list[psutil.Process]:
    """A host's processes among a supervisor's children: they run in its folder, which the kernel names without symbolic links."""
    folder, found = str(host.resolve()), []
    for child in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += [child] if child.cwd() == folder else []
    return found


def is_server(process: psutil.Process) -> bool:
    """Whether a process is a run's image server."""
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith(SERVER_TITLE)
    return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, by itself or with one that was killed before
        process.kill()


def _kill_tree(root: psutil.Process) -> None:
    """SIGKILL a process and its descendants: all are suspended first, so that none sees another die."""
    suspended: list[psutil.Process] = []
    try:
        while new := [process for process in [root, *root.children(recursive=True)] if process not in suspended]:
            for process in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            suspended += new
    finally:  # if the first ends meanwhile, the others must not stay suspended
        for process in suspended:
            _kill(process)
