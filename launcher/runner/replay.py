"""Two runs compared by what they were started with, and a run started again from its record: anew, or from its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from launcher import backends
from launcher.config.issues import UserError, mistake
from launcher.planner.plan import Plan
from launcher.record import records
from launcher.runner.again import again
from launcher.runner.run import Run

ABSENT = "-"


@dataclass(frozen=True)
class Difference:
    """One thing that two runs were not started with alike."""

    about: str
    """backend, job, code, commit, request or version."""
    key: str
    first: str
    second: str


def diff(first: Run, second: Run) -> list[Difference]:
    """What differed between two runs: their jobs key by key, their code file by file, commit, request and package versions.

    >>> run = launcher.attach("quickstart-teacher")
    >>> launcher.diff(run, run)
    []

    Names and times, which always differ, are left out.
    """
    found = []
    for about, tell in _TOLD.items():
        one, other = tell(first.folder), tell(second.folder)
        if about == "request" and not (one and other):
            continue  # one of them sent none, which the backend says
        for key in sorted({**one, **other}):
            if one.get(key, ABSENT) != other.get(key, ABSENT):
                found.append(Difference(about, key, one.get(key, ABSENT), other.get(key, ABSENT)))
    return found


def replay(name: str, overrides: Sequence[str] = (), *, on: str | None = None) -> Plan:
    """The plan of a run's job again, with the code and the earlier runs that it was started with.

    >>> plan = launcher.replay("quickstart-teacher", ["hyperparameters.learning_rate=1e-3"])
    >>> plan.replay_of, plan.job.hyperparameters["learning_rate"]
    ('quickstart-teacher-...', 0.001)

    Args:
        name: a run, or a job's name for the latest.
        overrides: `key=value` texts. Secrets have to be given again: no record holds them.
        on: another backend than the run's.

    Raises:
        UserError: no such run, or its record is not whole.
    """
    return again(records.find(name), overrides, on)


def resume(name: str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a run's job again, from its last checkpoint, on the same backend: with the code and the earlier runs that it had.

    >>> plan = launcher.resume("quickstart-teacher", ["hyperparameters.max_steps=6"])
    >>> plan.resumes
    'quickstart-teacher-...'

    On this machine each host begins with a copy of the checkpoints that the host of its name left. On SageMaker the new job has the
    same `checkpoints`, from which SageMaker fills its hosts.

    Args:
        name: a run that is over, or a job's name for the latest.
        overrides: `key=value` texts, for example compute.instance_count=2. The script refuses those that make it another job.

    Raises:
        UserError: no such run, it is not over, or it left no checkpoint.
    """
    folder = records.find(name)
    earlier = Run(folder)
    if earlier.state not in records.OVER:
        raise mistake("run", f"{folder.name} is {earlier.state}", f"launcher stop {folder.name}, or wait for its end")
    made = again(folder, overrides, None)
    why_not = backends.get(made.backend).why_not_resumed(made.job, folder)
    if why_not is not None:
        raise UserError([why_not])
    return replace(made, resumes=folder.name)


def _job(folder: records.RunFolder) -> dict[str, str]:
    values = yaml.safe_load(folder.job.read_text(encoding="utf-8")) if folder.job.is_file() else {}
    return {key: value for key, value in _flat(values).items() if key not in ("name", "source")}


def _code(folder: records.RunFolder) -> dict[str, str]:
    """Each file that travelled, with the first digits of its SHA-256."""
    return {
        file.relative_to(folder.code).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(folder.code.rglob("*"))
        if file.is_file()
    }


def _commit(folder: records.RunFolder) -> dict[str, str]:
    git = folder.read(folder.git)
    uncommitted = (
        hashlib.sha256(folder.git_patch.read_bytes()).hexdigest()[:12] if folder.git_patch.is_file() else "none"
    )
    return {"commit": str(git.get("commit")), "uncommitted": uncommitted}


def _backend(folder: records.RunFolder) -> dict[str, str]:
    return {"backend": folder.read(folder.plan)["backend"]}


def _request(folder: records.RunFolder) -> dict[str, str]:
    """The request less what the job says already, and with the run's own name left out."""
    flat = _flat(folder.read(folder.request))
    return {
        key: value.replace(folder.name, "<run>")
        for key, value in flat.items()
        if not key.startswith(("HyperParameters", "TrainingJobName", "Tags", "Environment"))
    }


def _versions(folder: records.RunFolder) -> dict[str, str]:
    return _flat(folder.read(folder.versions))


_TOLD = {"backend": _backend, "job": _job, "code": _code, "commit": _commit, "request": _request, "version": _versions}


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested values by dotted key, as texts."""
    if isinstance(values, Mapping) and values:
        items: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list) and any(isinstance(item, (dict, list)) for item in values):
        items = ((str(number), item) for number, item in enumerate(values))
    else:
        return {prefix.rstrip("."): str(values)} if prefix else {}
    return {key: value for name, item in items for key, value in _flat(item, f"{prefix}{name}.").items()}
