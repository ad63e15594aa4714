"""Run: a plan under way or over, the same on every backend, and found again by name from any process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher import backends, records
from launcher.findings import mistake
from launcher.metric_lines import Metric, parse_line
from launcher.planning import Plan, refuse_errors
from launcher.records import OVER, RunFolder


@dataclass
class Run:
    """A run's folder, and what can be asked of it.

    A run that this process started and did not `detach` is stopped when this process dies.
    """

    folder: RunFolder
    _lifeline: int | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state(self) -> str:
        """InProgress, Stopping, Completed, Failed or Stopped: SageMaker's words."""
        return self.folder.state()

    @functools.cached_property
    def hosts(self) -> list[str]:
        return [host["name"] for host in self.folder.read(self.folder.plan)["hosts"]]

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the run is over, at most `timeout` seconds.

        Returns:
            The state then; it is the unfinished one where the time was too short.
        """
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (state := self.state) not in OVER and time.monotonic() < end:
            time.sleep(0.1)
        return state

    def logs(self, *, follow: bool = False, positions: dict[str, int] | None = None) -> Iterator[tuple[str, str]]:
        """The hosts' log lines as (host, line), each host's in order.

        Args:
            follow: go on until the run is over; else stop at what is there now.
            positions: bytes of each host's log to pass over; it is kept up to date, so that a later call goes on from there.
        """
        positions = {} if positions is None else positions
        while True:
            over = self.state in OVER  # asked before reading, so that nothing written before the end is missed
            for host in self.hosts:
                for line, after in _complete_lines(
                    self.folder.log(host), positions.get(host, 0), last=over or not follow
                ):
                    positions[host] = after
                    yield host, line
            if over or not follow:
                return
            time.sleep(0.2)

    def metrics(self) -> list[dict[str, Any]]:
        """The measurements so far, one dict a logged step and rank; while the run goes on, those that its log lines show."""
        if self.folder.metrics.is_file():
            return [json.loads(line) for line in self.folder.metrics.read_text(encoding="utf-8").splitlines()]
        return [metric.values for metric in self.progress()]

    def progress(self, *, follow: bool = False) -> Iterator[Metric]:
        """The metric lines of the first host's log."""
        for host, line in self.logs(follow=follow):
            metric = parse_line(line) if host == self.hosts[0] else None
            if metric is not None:
                yield metric

    def stop(self, reason: str = "asked to") -> None:
        """Ask the run to stop: its training processes get SIGTERM and may finish their step. Returns at once."""
        if self.state not in OVER:
            backends.get(self.folder.read(self.folder.plan)["backend"]).stop(self.folder, reason)

    def detach(self) -> None:
        """Let the run outlive this process."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):  # it is over
                os.write(self._lifeline, b"d")
            os.close(self._lifeline)
            self._lifeline = None

    def artifacts(self) -> dict[str, Path]:
        """What the run left, by name, as far as it is there: model, metrics, output (by host), checkpoints (by host), logs (by host)."""
        places = {"model": self.folder.model, "metrics": self.folder.metrics}
        for host in self.hosts:
            places |= {
                f"output {host}": self.folder.host(host) / "output/data",
                f"checkpoints {host}": self.folder.host(host) / "checkpoints",
                f"log {host}": self.folder.log(host),
            }
        return {
            name: path for name, path in places.items() if path.is_file() or (path.is_dir() and any(path.iterdir()))
        }

    def result(self) -> dict[str, Any]:
        """The script's own summary (result.json); {} where it wrote none."""
        return self.folder.result()

    def outcome(self) -> dict[str, Any]:
        """How the run ended; {} while it goes on. A run whose supervisor was killed is Failed and says so."""
        outcome = self.folder.read(self.folder.outcome)
        if outcome or self.state not in OVER:
            return outcome
        return {
            "state": records.FAILED,
            "failure": "the process that stayed with the run was killed; what its hosts wrote until then is in the folder",
        }


def start(plan: Plan, *, detach: bool = False) -> Run:
    """Carry a plan out.

    Args:
        plan: from `plan()`.
        detach: let the run outlive this process from the start.

    Returns:
        The Run, under way.

    Raises:
        UserError: the plan has errors; nothing was started.
    """
    refuse_errors(plan)
    folder = RunFolder(records.store() / plan.name)
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise mistake(
            "run", f"{plan.name} was started already", "plan again: every run needs a plan of its own"
        ) from None
    with open(folder.lock, "wb") as lock:  # the supervisor inherits it and holds it after us
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_records(plan, folder)
        reading, writing = (None, None) if detach else os.pipe()
        try:
            backends.get(plan.backend).start(plan, folder, lock.fileno(), reading)
        finally:
            if reading is not None:
                os.close(reading)
    return Run(folder, writing)


def attach(name: str) -> Run:
    """A run by its name, or the latest of a job's name. Raises UserError where there is none."""
    return Run(records.find(name))


def runs() -> list[Run]:
    """Every run in the store, oldest first."""
    return [Run(folder) for folder in records.all_runs()]


def _write_records(plan: Plan, folder: RunFolder) -> None:
    """What the run is started with, before anything starts."""
    state, patch = records.git_state(plan.source)
    records.write_json(folder.git, state)
    if patch:
        records.write_atomically(folder.git_patch, patch)
    records.write_json(folder.versions, records.installed_versions())
    records.write_atomically(folder.files, "".join(f"{file.size:>10} {file.path}\n" for file in plan.files))
    records.write_atomically(folder.job, yaml.safe_dump(plan.kept_job(), sort_keys=False, allow_unicode=True))
    records.write_atomically(folder.plan, plan.to_json() + "\n")  # last: with it the run can be found


def _complete_lines(file: Path, position: int, *, last: bool) -> Iterator[tuple[str, int]]:
    """Each complete line after a byte position, with the position after it; with `last`, an unfinished one too."""
    try:
        with open(file, "rb") as log:
            log.seek(position)
            for line in log:
                if not line.endswith(b"\n") and not last:
                    return
                position += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n"), position
    except FileNotFoundError:
        return
