"""The run store: one folder a run, found by name from any process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.issues import did_you_mean, mistake

# SageMaker's own words: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html (TrainingJobStatus)
IN_PROGRESS, STOPPING, COMPLETED, FAILED, STOPPED = "InProgress", "Stopping", "Completed", "Failed", "Stopped"
OVER = (COMPLETED, FAILED, STOPPED)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run's files."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def job(self) -> Path:
        """The resolved job, as YAML that `launcher run` accepts."""
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def files(self) -> Path:
        """List of the files in `code`, with sizes in bytes."""
        return self.path / "files.txt"

    @property
    def git(self) -> Path:
        return self.path / "git.json"

    @property
    def git_patch(self) -> Path:
        """Uncommitted changes when the run started."""
        return self.path / "git.patch"

    @property
    def versions(self) -> Path:
        """Versions of Python and of the packages on the machine that started it."""
        return self.path / "versions.json"

    @property
    def supervisor(self) -> Path:
        """Id of the process that supervises a local run."""
        return self.path / "supervisor.json"

    @property
    def lock(self) -> Path:
        """Locked from before the run can be found until its supervisor ends, however it does."""
        return self.path / "lock"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "logs" / "supervisor.log"

    @property
    def remote(self) -> Path:
        """SageMaker's last answer about the run, and its time."""
        return self.path / "remote.json"

    @property
    def request(self) -> Path:
        """The CreateTrainingJob request of a run on SageMaker, without secrets."""
        return self.path / "request.json"

    @property
    def code(self) -> Path:
        """The source package that the run used."""
        return self.path / "code"

    @property
    def stop_request(self) -> Path:
        """Exists once the run was asked to stop, and says why."""
        return self.path / "stop.json"

    @property
    def outcome(self) -> Path:
        """State, times, exit codes and failure of a run that is over."""
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.tar.gz"

    def host(self, host: str) -> Path:
        """The /opt/ml of a host."""
        return self.path / "hosts" / host / "opt" / "ml"

    def log(self, host: str) -> Path:
        return self.path / "logs" / f"{host}.log"

    def read(self, file: Path) -> dict[str, Any]:
        """A JSON file of this run; {} where it does not exist yet."""
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return values

    def state(self) -> str:
        """The run's state, from its folder and its supervisor; for a run on SageMaker, as last reported."""
        if not self.outcome.exists() and (self.remote.exists() or self.supervisor_lives()):
            return STOPPING if self.stop_request.exists() else IN_PROGRESS
        # the supervisor is gone, so what it wrote is final
        return str(self.read(self.outcome).get("state", FAILED))

    def supervisor_lives(self) -> bool:
        """Whether a process holds the run's lock; unlike a process id, a lock is never reused."""
        try:
            with open(self.lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def request_stop(self, reason: str) -> bool:
        """Record that the run is to stop, for its supervisor. Returns whether this is the first request."""
        if self.stop_request.exists():
            return False
        write_json(self.stop_request, {"reason": reason, "time": time.time()})
        return True

    def left_checkpoints(self) -> bool:
        """Whether any host left a checkpoint in this folder."""
        return any(any(folder.iterdir()) for folder in self.path.glob("hosts/*/opt/ml/checkpoints"))

    def artifacts(self, hosts: Sequence[str]) -> dict[str, Path]:
        """The files and folders that exist, by name: model, metrics; and for each host output, checkpoints, log."""
        places = {"model": self.model, "metrics": self.metrics}
        for host in hosts:
            places |= {
                f"output {host}": self.host(host) / "output/data",
                f"checkpoints {host}": self.host(host) / "checkpoints",
                f"log {host}": self.log(host),
            }
        return {
            name: path for name, path in places.items() if path.is_file() or (path.is_dir() and any(path.iterdir()))
        }

    def result(self) -> dict[str, Any]:
        """The script's result.json, from the first host that has one; {} where none can be read."""
        for file in sorted(self.path.glob("hosts/*/opt/ml/output/data/*/result.json")):
            with contextlib.suppress(OSError, ValueError):
                found = self.read(file)
                if isinstance(found, dict):
                    return found
        return {}


def store() -> Path:
    """The folder that holds all runs: $LAUNCHER_RUNS, or `runs` in the current folder."""
    return Path(os.environ.get("LAUNCHER_RUNS") or "runs").absolute()


def all_runs() -> list[RunFolder]:
    """Every run in the store, oldest first. Other folders are skipped."""
    folder = store()
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            run = RunFolder(path)
            plan = json.loads(run.plan.read_text(encoding="utf-8"))
            found.append((plan["planned"], plan["name"], run, plan["job"]["name"], plan["hosts"][0], plan["backend"]))
    return [entry[2] for entry in sorted(found, key=lambda entry: entry[:2])]


def find(name: str, *, completed: bool = False) -> RunFolder:
    """A run by its name, or the latest run of a job by the job's name.

    Args:
        name: `quickstart-20261121-031500-abcd`, or `quickstart`.
        completed: consider only runs that completed.

    Raises:
        UserError: no such run.
    """
    runs = all_runs()
    matching = [run for run in runs if run.name == name] or [
        run for run in runs if run.read(run.plan).get("job", {}).get("name") == name
    ]
    fitting = [run for run in matching if not completed or run.state() == COMPLETED]
    if fitting:
        return fitting[-1]
    if matching:
        raise mistake(
            "run",
            f"{name}: none of {len(matching)} run{'s' if len(matching) > 1 else ''} has completed; the latest is {matching[-1].state()}",
            f"launcher show {matching[-1].name}",
        )
    names = [run.name for run in runs]
    job_names = {run.read(run.plan).get("job", {}).get("name", "") for run in runs}
    fix = did_you_mean(
        name,
        [*names, *job_names],
        "launcher runs lists them; for one that another machine started on SageMaker: launcher attach NAME --region REGION",
    )
    raise mistake("run", f"{name}: no such run in {store()}", fix)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part. Its folder must exist."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(temporary, file)


def write_json(file: Path, value: Any) -> None:
    write_atomically(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def merge_metrics(folder: RunFolder, hosts: list[str]) -> None:
    """Write all hosts' metrics as one file, host after host, without lines that a kill cut short."""
    lines = []
    for host in hosts:
        for file in sorted(folder.host(host).glob("output/data/*/metrics*.jsonl")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    json.loads(line)
                    lines.append(line + "\n")
    if lines:
        write_atomically(folder.metrics, "".join(lines))


def installed_versions() -> dict[str, str]:
    """Versions of Python, the system and every installed package, by name."""
    import platform
    from importlib.metadata import distributions

    packages = {item.metadata["Name"]: item.version for item in distributions() if item.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        **dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
