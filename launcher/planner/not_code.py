"""What a source folder holds besides code: earlier runs, and the data of the job's own inputs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.record import records
from launcher.show.text import listed

A_RUNS_NAME = re.compile(r"-\d{8}-\d{6}-[a-z]{4}(?=/)")
"""The end of a folder's name that may be a run's (`records.NAME`), inside a path."""


def below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of some folders or files, or lies in one. All are relative, with forward slashes."""
    return any(f"{path}/".startswith(f"{one}/") for one in folders)


def inputs_inside(source: Path, job: Job) -> dict[str, list[str]]:
    """The job's inputs that lie in its source folder, by their paths there, each with its channels.

    One that is the source folder itself or holds the script is left out: it is code too.
    """
    found: dict[str, list[str]] = {}
    for channel, given in job.inputs.items():
        if given.folder is None and given.file is None:
            continue
        try:
            place = Path(given.folder or given.file or "").expanduser()
            named = os.path.relpath(os.path.abspath(place), os.path.abspath(source))
            real = os.path.relpath(os.path.realpath(place), os.path.realpath(source))
        except (OSError, RuntimeError, ValueError):
            continue  # the plan refuses such a path
        for path in dict.fromkeys((named, real)):
            outside = path == os.curdir or path.split(os.sep)[0] == os.pardir
            if not outside and not below(os.path.normpath(job.script), [path]):
                found.setdefault(path, []).append(channel)
    return found


def not_read_as_channels(script: Path, left: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The inputs for which the script does not name every channel's variable: it may read them where they lie here.

    Args:
        left: their paths, each with its channels.
    """
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return dict(left)
    return {
        path: channels
        for path, channels in left.items()
        if not all(f"SM_CHANNEL_{channel.upper()}" in text for channel in channels)
    }


def inputs_left_out(left: Mapping[str, Sequence[str]], ignore_file: str) -> Issue:
    """The warning that names the inputs of a source folder that do not travel as code.

    Args:
        left: their paths, each with its channels.
    """
    channels = dict.fromkeys(channel for names in left.values() for channel in names)
    variables = listed(f"SM_CHANNEL_{channel.upper()}" for channel in channels)
    shown = "; ".join(f"{path} (the data of inputs.{listed(names)})" for path, names in sorted(left.items()))
    return Issue(
        key="source",
        level="warning",
        found=f"left out: {shown}",
        fix=f"no change needed where the script reads {variables}; naming them in {ignore_file} silences this",
    )


def runs_among(folder: Path, paths: Iterable[str]) -> set[str]:
    """The folders, relative to `folder`, that hold runs among its paths: the current run store, others, single runs."""
    store, whole = records.store().resolve(), folder.resolve()
    found = {store.relative_to(whole).as_posix()} if whole in store.parents else set()
    seen: dict[str, str] = {}
    for path in paths:
        for match in A_RUNS_NAME.finditer(path):
            run = path[: match.end()]
            if run not in seen:
                place, store_inside = folder / run, os.path.dirname(run)
                with_code = not store_inside or any(place.parent.glob("*.py"))
                seen[run] = "" if not is_run(place) else run if with_code else store_inside
    return found | {*seen.values()} - {""}


def without_runs(place: Path, folders: Sequence[str], names: Collection[str], *, top: bool) -> list[str] | None:
    """A folder's subfolders without runs; None for a run store, which is left out whole.

    Args:
        names: of the files directly in it. Python files make it a folder of code that also holds runs.
        top: it is the source folder.
    """
    others = [name for name in folders if not is_run(place / name)]
    is_store = len(others) < len(folders) and not top and not any(name.endswith(".py") for name in names)
    return None if is_store else others


def is_run(place: Path) -> bool:
    """Whether a folder is a run's, whatever store it is in: by its name, and by the plan that every run has."""
    return records.NAME.fullmatch(place.name) is not None and os.path.lexists(records.RunFolder(place).plan)
