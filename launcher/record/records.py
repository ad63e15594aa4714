"""The run store: one folder per run, found by name from any process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import ValidationError

from launcher.config import yaml_file
from launcher.config.issues import Issue, UserError, did_you_mean, mistake
from launcher.record import disk, trust
from launcher.record.shapes import complaint, shape, utc

OPT_ML = PurePosixPath("/opt/ml")
CHECKPOINTS = OPT_ML / "checkpoints"
"""Where a script keeps checkpoints unless its job says otherwise."""

# SageMaker's own words: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html (TrainingJobStatus)
IN_PROGRESS, STOPPING, COMPLETED, FAILED, STOPPED = "InProgress", "Stopping", "Completed", "Failed", "Stopped"
OVER = (COMPLETED, FAILED, STOPPED)

NAME = re.compile(r"(?P<job>.+)-(?P<time>\d{8}-\d{6})-[a-z]{4}")
"""A run's name: its job's, the UTC time of its plan, and four letters."""

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of writing to another user's folder, or to a read-only one."""

SUGGESTED = 100
"""Latest runs and jobs that a wrong name is compared with; a comparison takes some 0.1 ms."""


class DamagedRecord(UserError):
    """A file of a run's folder that cannot be read."""

    def __init__(self, run: RunFolder, file: Path, found: str):
        fix = f"put the file back from a copy, or remove the run: launcher rm {run.name}"
        super().__init__(
            [Issue(key=f"{run.name}/{file.relative_to(run.path)}", found=found, fix=fix)], "a run's record"
        )


def is_locked(file: Path) -> bool:
    """Whether a process holds a file's lock; False also if there is no such file."""
    try:
        with trust.opened(file) as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


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
        """Locked from before the run can be found until its supervisor ends, however it ends."""
        return self.path / "lock"

    @property
    def reserve(self) -> Path:
        """Disk space reserved for a stop request and the outcome."""
        return self.path / "reserve"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "logs" / "supervisor.log"

    @property
    def refresh_lock(self) -> Path:
        """Locked by the process that updates the folder from SageMaker."""
        return self.path / "refresh.lock"

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
        """Exists once the run has been asked to stop; says why."""
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

    @property
    def unpacked_model(self) -> Path:
        """The model folder that a run on this machine left on the first training host, which its plan lists first whatever its number.

        Raises:
            DamagedRecord: the plan cannot be read.
        """
        return self.host(self.read(self.plan)["hosts"][0]["name"]) / "model"

    def host(self, host: str) -> Path:
        """The /opt/ml of a host."""
        return self.path / "hosts" / host / "opt" / "ml"

    def log(self, host: str) -> Path:
        return self.path / "logs" / f"{host}.log"

    @property
    def job_name(self) -> str:
        """The job's name, from the folder's; for a job that another program started on SageMaker, its whole name."""
        named = NAME.fullmatch(self.name)
        return named["job"] if named is not None else self.name

    @property
    def time(self) -> str:
        """When it was planned, as in names: from the folder's name, else from its plan; "" if neither can be read."""
        named = NAME.fullmatch(self.name)
        return named["time"] if named is not None else _planned(self).partition(".")[0]

    def read(self, file: Path) -> dict[str, Any]:
        """A JSON file of this run, as launcher/record/shapes.py describes it; {} if it does not exist (yet).

        Raises:
            DamagedRecord: it cannot be read or has another shape, or is a missing plan: every run has one.
        """
        try:
            return shape(file.name).validate_json(trust.content(file))
        except FileNotFoundError:
            if file == self.plan:
                raise DamagedRecord(self, file, "missing: the run was not started, or the file was deleted") from None
            return {}
        except OSError as error:
            raise DamagedRecord(self, file, error.strerror or str(error)) from None
        except ValidationError as error:
            wrong = [complaint(item) for item in error.errors(include_url=False)]
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise DamagedRecord(self, file, "; ".join(wrong[:3]) + more) from None

    def read_job(self) -> dict[str, Any]:
        """The resolved job, from job.yaml; {} if there is none.

        Raises:
            DamagedRecord: it cannot be read, or is not a mapping.
        """
        try:
            text = trust.content(self.job).decode("utf-8")
            yaml_file.parse(text, str(self.job))  # refuses what is no mapping, and endless aliases
            values: dict[str, Any] = yaml.safe_load(text)  # as yaml_file.dumped wrote it
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DamagedRecord(self, self.job, error.strerror or str(error)) from None
        except UnicodeDecodeError as error:
            raise DamagedRecord(self, self.job, f"not UTF-8 text (byte {error.start})") from None
        except UserError as error:
            raise DamagedRecord(self, self.job, error.issues[0].found) from None
        except (ValueError, yaml.YAMLError) as error:
            raise DamagedRecord(self, self.job, f"not YAML: {error}") from None
        return values

    def state(self) -> str:
        """The run's state, from its folder and its supervisor; for a run on SageMaker, as last reported.

        Raises:
            DamagedRecord: outcome.json cannot be read.
        """
        if not os.path.lexists(self.outcome) and (
            self.remote.exists() or self.supervisor_lives()
        ):  # a broken link is damage
            return STOPPING if self.stop_request.exists() else IN_PROGRESS
        # the supervisor is gone, so what it wrote is final
        return str(self.read(self.outcome).get("state", FAILED))

    def supervisor_lives(self) -> bool:
        """Whether a process holds the run's lock; unlike a process id, a lock is never reused."""
        return is_locked(self.lock)

    @trust.closed_umask()
    def is_closed(self) -> bool:
        """Whether this process may not update the folder from SageMaker: it is another user's, or read-only."""
        try:
            open(self.refresh_lock, "ab").close()
        except OSError as error:
            return error.errno in CLOSED
        return False

    def request_stop(self, reason: str) -> bool:
        """Record a stop request for the run's supervisor. Returns whether this is the first request."""
        if self.stop_request.exists():
            return False
        request = {"reason": reason, "time": time.time()}
        try:
            write_json(self.stop_request, request)
        except OSError as error:
            if error.errno not in disk.NO_SPACE or not self.reserve.exists():
                raise
            os.truncate(self.reserve, disk.RESERVE_BYTES // 2)  # the rest stays for the outcome
            write_json(self.stop_request, request)
        return True

    def left_checkpoints(self) -> bool:
        """Whether any host left a checkpoint in this folder."""
        return any(self.complete_checkpoints(host) for host in _folders(self.path / "hosts"))

    def complete_checkpoints(self, host: str) -> list[Path]:
        """What a host left in its checkpoints folder, without hidden files and folders, which are checkpoints being written."""
        place = self.checkpoints(host)
        return [path for path in place.iterdir() if not path.name.startswith(".")] if place.is_dir() else []

    def checkpoints(self, host: str) -> Path:
        """A host's checkpoints folder, below its /opt/ml, from the job's `checkpoints.path`."""
        kept: dict[str, Any] = {}
        with contextlib.suppress(DamagedRecord):
            kept = self.read_job().get("checkpoints") or {}
        inside = PurePosixPath(kept.get("path") or CHECKPOINTS)
        if not inside.is_relative_to(OPT_ML) or ".." in inside.parts:
            inside = CHECKPOINTS
        return self.host(host) / inside.relative_to(OPT_ML)

    def artifacts(self, hosts: Sequence[str]) -> dict[str, Path]:
        """The files and folders that exist, by name: model, metrics; and for each host output, checkpoints, log."""
        places = {"model": self.model, "metrics": self.metrics}
        for host in hosts:
            places |= {
                f"output {host}": self.host(host) / "output/data",
                f"checkpoints {host}": self.checkpoints(host),
                f"log {host}": self.log(host),
            }
        return {
            name: path for name, path in places.items() if path.is_file() or (path.is_dir() and any(path.iterdir()))
        }

    def result(self) -> dict[str, Any]:
        """The script's result.json, from the first host that has one; {} if none can be read."""
        for host in _folders(self.path / "hosts"):
            data = self.host(host) / "output/data"
            for name in _folders(data):
                with contextlib.suppress(DamagedRecord):  # any script may have written it
                    if found := self.read(data / name / "result.json"):
                        return found
        return {}


def _folders(place: Path) -> list[str]:
    """The names of the folders in a folder, sorted; [] if it cannot be read. Path.glob takes twice the time."""
    try:
        return sorted(entry.name for entry in os.scandir(place) if entry.is_dir())
    except OSError:
        return []


def store() -> Path:
    """The folder that holds all runs: $LAUNCHER_RUNS, or `runs` in the current folder."""
    return Path(os.environ.get("LAUNCHER_RUNS") or "runs").absolute()


def require_folder() -> None:
    """Raise a UserError if the store cannot be a folder: it, or what its path leads through, is a file or a broken link."""
    folder = store()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        kind = "a broken link" if there.is_symlink() and not there.exists() else "a file"
        fix = f"set LAUNCHER_RUNS to a folder, which need not exist yet; or move {there} away"
        raise mistake("LAUNCHER_RUNS", f"{there} is {kind}, and no folder for runs", fix)


def all_runs(job: str | None = None) -> list[RunFolder]:
    """Every run in the store, oldest first, by the time in its name; only runs with another form of name, or started in the same
    second as another, are read. Other folders are skipped.

    Args:
        job: only runs of the job with this name.

    Raises:
        UserError: the store is a file.
    """
    folder = store()
    is_there = folder.is_dir()
    if not is_there:
        require_folder()
    found: list[tuple[str, RunFolder]] = []
    for entry in os.scandir(folder) if is_there else ():
        if not entry.name.startswith(job or "") or not entry.is_dir(follow_symlinks=False):
            continue
        run = RunFolder(Path(entry.path))
        if job in (None, run.job_name) and _can_be_shown(run):
            found.append((run.time, run))
    runs = []
    for _, group in itertools.groupby(sorted(found, key=lambda one: one[0]), key=lambda one: one[0]):
        same = [run for _, run in group]
        runs += same if len(same) == 1 else sorted(same, key=lambda run: (_planned(run), run.name))
    return runs


def _can_be_shown(run: RunFolder) -> bool:
    """Whether a folder is a run's. A folder without a plan is a damaged run, unless it is just being started."""
    return os.path.lexists(run.plan) or (NAME.fullmatch(run.name) is not None and not run.supervisor_lives())


def _planned(run: RunFolder) -> str:
    """When a run was planned, as in names, with microseconds; "" if its plan cannot be read."""
    try:
        return f"{utc(run.read(run.plan)['planned']):%Y%m%d-%H%M%S.%f}"
    except DamagedRecord:
        return ""


def find(name: str, *, completed: bool = False) -> RunFolder:
    """A run by its name, or the latest run of a job by the job's name.

    Args:
        name: `quickstart-20261121-031500-abcd`, or `quickstart`.
        completed: consider only runs that completed.

    Raises:
        UserError: no such run, or the store is a file.
    """
    named = RunFolder(store() / name)
    is_name = named.name == name and name != ".."  # not a path
    is_link = is_name and os.path.islink(named.path)  # os.path: a name may be longer than any file's
    exact = is_name and not is_link and os.path.isdir(named.path) and _can_be_shown(named)
    matching = [named] if exact else [run for run in all_runs(name) if run.plan.exists()]
    for run in reversed(matching):
        if not completed or _has_completed(run):
            return run
    if matching:
        raise mistake(
            "run",
            f"{name}: none of {len(matching)} run{'s' if len(matching) > 1 else ''} has completed; the latest is {matching[-1].state()}",
            f"launcher show {matching[-1].name}",
        )
    runs = all_runs()
    jobs = list(dict.fromkeys(run.job_name for run in reversed(runs)))
    fix = did_you_mean(
        name,
        [*(run.name for run in runs[-SUGGESTED:]), *jobs[:SUGGESTED]],
        "launcher runs lists them; for one that another machine started on SageMaker: launcher attach NAME --region REGION",
    )
    what = "a link, and no run" if is_link else "no such run"
    raise mistake("run", f"{name}: {what} in {store()}", fix)


def _has_completed(run: RunFolder) -> bool:
    """Whether a run is known to have completed."""
    try:
        return run.state() == COMPLETED
    except DamagedRecord:
        return False


def write_atomically(file: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file so that readers see the old content or the new, never a part. Its folder must exist.

    Args:
        durable: the file survives a power cut from then on, which takes the disk some milliseconds.
    """
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "xb") as stream:  # through no link that another user planted
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the new name
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems that sync no folders
                raise
        finally:
            os.close(folder)


def write_named(file: Path, content: str | bytes) -> None:
    """Write the file that a user named for a result: through a link, into a pipe or a device, and atomically if it is a regular file."""
    if file.exists() and not file.is_file():
        file.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    else:
        write_atomically(Path(os.path.realpath(file)), content)


def write_json(file: Path, value: Any, *, durable: bool = True) -> None:
    write_atomically(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)
