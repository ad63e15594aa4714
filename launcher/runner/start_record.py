"""What a run records before it starts: job, plan, request, code, git state and package versions."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from typing import BinaryIO

from launcher.config import yaml_file
from launcher.config.issues import mistake
from launcher.planner.plan import Plan
from launcher.planner.source_package import copy_files, uncommitted
from launcher.record import disk, records, trust
from launcher.record.records import RunFolder

STARTING = f".starting-{os.getuid()}"
"""The user's own folder of the store in which a run's folder is built. Only a complete one leaves it."""

ABANDONED_SECONDS = 60
"""Age from which an unlocked folder there is abandoned. A live starter locks its folder within milliseconds."""


@contextlib.contextmanager
def recorded(plan: Plan) -> Iterator[tuple[RunFolder, BinaryIO]]:
    """`new_folder` for a planned run."""
    resumed = [RunFolder(records.store() / plan.resumes)] if plan.resumes else []
    with new_folder(plan.name, lambda folder: write(plan, folder), *resumed) as made:
        yield made


@contextlib.contextmanager
def new_folder(
    name: str, write: Callable[[RunFolder], None], *resumed: RunFolder
) -> Iterator[tuple[RunFolder, BinaryIO]]:
    """A run's new folder with its record, and its lock file, locked. The folder appears in the store once its record is complete.

    Args:
        name: the run's.
        write: writes the record into the folder.
        resumed: runs whose files the new one uses.

    Raises:
        UserError: a run of that name has started already, the store is a file, others can change the store or the runs that it
            resumes, or the disk is full. Nothing is left.
    """
    records.require_folder()  # a file in its place is no earlier run
    folder, making = RunFolder(records.store() / name), RunFolder(records.store() / STARTING / name)
    with contextlib.ExitStack() as undo:
        try:
            for place in (records.store(), making.path.parent):
                place.mkdir(parents=True, exist_ok=True)
            require_trusted_owner(*resumed)
            _remove_abandoned()
            making.path.mkdir()
            undo.callback(shutil.rmtree, making.path, ignore_errors=True)
            lock = undo.enter_context(open(making.lock, "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(making)
            making.path.rename(folder.path)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and making.path.parent.is_dir():
                fix = "plan again: a plan starts one run"
                raise mistake("run", f"{name} has already started", fix) from None
            if error.errno in disk.NO_SPACE:
                raise mistake("run", f"not started: {disk.full(records.store(), error)}", disk.FIX) from None
            raise
        undo.pop_all()
    with lock:
        yield folder, lock


def require_trusted_owner(*runs: RunFolder) -> None:
    """Raise a UserError if users other than root and the store's group can change the store, or the code of these runs."""
    fix = "set LAUNCHER_RUNS to a folder of yours; where it is yours or your team's: chown it to you, or to root, and chmod o-w"
    store = records.store()
    folders = [store.resolve(), store / STARTING, *(path for run in runs for path in (run.path, run.code))]
    trust.require_trusted_owner(folders, "the run store", fix, shared=True)


def _remove_abandoned() -> None:
    """Remove the folders whose starter was killed before they were complete."""
    for path in (records.store() / STARTING).glob("*"):
        with contextlib.suppress(OSError):  # another process completes or removes it
            is_old = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
            if is_old and not RunFolder(path).supervisor_lives():
                shutil.rmtree(path)


def not_started(folder: RunFolder, error: Exception) -> None:
    """Record why a run did not start, unless its backend did so or it has started after all.

    Raises:
        UserError: instead of the error, if the disk is full.
    """
    if folder.remote.exists():
        return  # it was sent to SageMaker: what the disk does is another matter
    full = disk.full(folder.path, error)
    if not folder.outcome.exists() and not folder.supervisor.exists():
        with contextlib.suppress(OSError):
            folder.reserve.unlink(missing_ok=True)
            records.write_json(folder.outcome, {"state": records.FAILED, "failure": f"not started: {full or error}"})
    if full:
        raise mistake("run", f"{folder.name} has not started: {full}", disk.FIX) from error


def why_no_outcome(folder: RunFolder) -> str:
    """Why a run that is over has no outcome."""
    if not folder.supervisor.exists() and not folder.remote.exists():
        return "not started: the process that started it was killed"
    full = disk.full(folder.path)
    killed = "the run's supervising process was killed; its folder holds what its hosts wrote until then"
    return f"{killed}; {full}" if full else killed


def write(plan: Plan, folder: RunFolder) -> None:
    """Write a run's record, before anything starts."""
    replayed = records.RunFolder(records.store() / plan.replay_of) if plan.replay_of else None
    if replayed is not None and replayed.git.exists():
        state = replayed.read(replayed.git)
        patch = replayed.git_patch.read_bytes() if replayed.git_patch.exists() else b""
    else:
        state, patch = uncommitted(plan.source)
    records.write_json(folder.git, state)
    if patch:
        records.write_atomically(folder.git_patch, patch)
    records.write_json(folder.versions, installed_versions())
    records.write_atomically(folder.files, "".join(f"{file.size:>10} {file.path}\n" for file in plan.files))
    copy_files(list(plan.files), folder.code)
    if plan.request is not None:
        records.write_json(folder.request, plan.kept_request())
    records.write_atomically(folder.job, yaml_file.dumped(plan.kept_job()))
    kept = {name: value for name, value in plan.to_dict().items() if name != "files"}  # files.txt lists them
    records.write_json(folder.plan, kept)  # last: the run can be found once this exists


def installed_versions() -> dict[str, str]:
    """Versions of Python, the system and every installed package, by name."""
    packages: dict[str, str] = {}
    for item in distributions():
        values = item.metadata  # each access reads the file
        if values["Name"]:
            packages.setdefault(values["Name"], values["Version"])  # the first on the path is the one that is imported
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        **dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
