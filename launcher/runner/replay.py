"""How two runs differ; and plans that run a run's job again, from the start or from its checkpoints."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher import backends
from launcher.config.issues import UserError, mistake
from launcher.planner.own_checkpoints import own_prefix
from launcher.planner.plan import Plan
from launcher.record import records
from launcher.runner.recorded_plan import plan_again
from launcher.runner.run import Run

ABSENT = "-"


@dataclass(frozen=True)
class Difference:
    """One difference between two runs."""

    about: str
    """backend, job, code, commit, request or version."""
    key: str
    first: str
    second: str


def diff(first: Run, second: Run) -> list[Difference]:
    """How two runs differ: backend, job by key, code by file, commit, request, package versions.

    >>> run = launcher.attach("quickstart-teacher")
    >>> launcher.diff(run, run)
    []

    Names and times, which always differ, are omitted.
    """
    found = []
    for about, read in _COMPARED.items():
        one, other = read(first.folder), read(second.folder)
        if about == "request" and not (one and other):
            continue  # only one sent a request, which the backend shows
        for key in sorted({**one, **other}):
            if one.get(key, ABSENT) != other.get(key, ABSENT):
                found.append(Difference(about, key, one.get(key, ABSENT), other.get(key, ABSENT)))
    return found


def replay(name: str, overrides: Sequence[str] = (), *, on: str | None = None) -> Plan:
    """Plan a run's job again, with the code and the earlier runs that it used.

    >>> plan = launcher.replay("quickstart-teacher", ["hyperparameters.learning_rate=1e-3"])
    >>> plan.replay_of, plan.job.hyperparameters["learning_rate"]
    ('quickstart-teacher-...', 0.001)

    It starts from the beginning. SageMaker would copy in what is under the job's `checkpoints`, so there the plan has its own folder
    beside the run's, unless the overrides name one.

    Args:
        name: a run, or a job's name for the latest.
        overrides: `key=value` texts. Pass secrets again: a record does not hold them.
        on: another backend; None: the run's.

    Raises:
        UserError: no such run, or its record is incomplete.
    """
    folder = records.find(name)
    made = plan_again(folder, overrides, on)
    shared = backends.get(made.backend).shared_checkpoints(made.job)
    if not shared or any(one.partition("=")[0] in ("checkpoints", "checkpoints.s3") for one in overrides):
        return made
    key = "checkpoints.s3" if isinstance(folder.read_job().get("checkpoints"), Mapping) else "checkpoints"
    return plan_again(folder, [*overrides, f"{key}={own_prefix(shared, 'replay')}"], on)


def resume(name: str, overrides: Sequence[str] = ()) -> Plan:
    """Plan a run's job again from its last checkpoint, on the same backend, with the code and the earlier runs that it used.

    >>> plan = launcher.resume("quickstart-teacher", ["hyperparameters.max_steps=6"])
    >>> plan.resumes
    'quickstart-teacher-...'

    On this machine each host starts with a copy of the checkpoints that the host of the same name left. On SageMaker the new job
    has the same `checkpoints`, which SageMaker copies to its hosts.

    Args:
        name: a run that has ended, or a job's name for the latest.
        overrides: `key=value` texts, for example compute.instance_count=2. The script refuses those that change the training.

    Raises:
        UserError: no such run, it has not ended, or it left no checkpoint.
    """
    folder = records.find(name)
    earlier = Run(folder)
    if earlier.state not in records.OVER:
        raise mistake("run", f"{folder.name} is {earlier.state}", f"launcher stop {folder.name}, or wait until it ends")
    made = plan_again(folder, overrides, None)
    why_not = backends.get(made.backend).why_not_resumed(made.kept_job(), folder)
    if why_not is not None:
        raise UserError([why_not])
    return replace(made, resumes=folder.name)


def _job(folder: records.RunFolder) -> dict[str, str]:
    """The job by key; the command of a run without one."""
    if not folder.job.exists():
        command = folder.read(folder.plan)["hosts"][0].get("command")
        return {"command": shlex.join(command)} if command else {}
    return {key: value for key, value in _flat(folder.read_job()).items() if key not in ("name", "source")}


def _code(folder: records.RunFolder) -> dict[str, str]:
    """File of the source package -> the first digits of its SHA-256."""
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
    """The request, without what the job already shows and without the run's name."""
    flat = _flat(folder.read(folder.request))
    return {
        key: value.replace(folder.name, "<run>")
        for key, value in flat.items()
        if not key.startswith(("HyperParameters", "TrainingJobName", "Tags", "Environment"))
    }


def _versions(folder: records.RunFolder) -> dict[str, str]:
    return _flat(folder.read(folder.versions))


_COMPARED = {
    "backend": _backend,
    "job": _job,
    "code": _code,
    "commit": _commit,
    "request": _request,
    "version": _versions,
}


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested values as dotted key -> text."""
    if isinstance(values, Mapping) and values:
        items: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list) and any(isinstance(item, (dict, list)) for item in values):
        items = ((str(number), item) for number, item in enumerate(values))
    else:
        return {prefix.rstrip("."): str(values)} if prefix else {}
    return {key: value for name, item in items for key, value in _flat(item, f"{prefix}{name}.").items()}
