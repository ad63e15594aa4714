"""Which runs of the store are in use, which are trials in a table, and the removal of runs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from launcher.record import trial_tables
from launcher.record.records import DamagedRecord, RunFolder


def under_way(run: RunFolder) -> bool:
    """Whether a run goes on, or may: SageMaker has not yet said that it ended."""
    return run.supervisor_lives() or (run.remote.exists() and not run.outcome.exists())


def in_use(runs: Iterable[RunFolder]) -> dict[str, str]:
    """Name -> why it must stay, for every run that is under way, that such a run reads or resumes, or that is a trial in a table which a
    study is using."""
    reasons: dict[str, str] = {}
    for run in runs:
        if run.outcome.exists() or not under_way(run):
            continue
        reasons[run.name] = f"{run.name} is under way"
        try:
            plan = run.read(run.plan)
        except DamagedRecord:
            continue
        inputs, store = plan["job"].get("inputs", {}).values(), run.path.parent.resolve()
        read = [given["run"] for given in inputs if given.get("run")]
        places = [Path(place).resolve() for given in inputs if (place := given.get("folder") or given.get("file"))]
        below = [
            place.relative_to(store).parts[0] for place in places if place != store and place.is_relative_to(store)
        ]
        for name in (*read, *below, plan.get("resumes")):
            if name:
                reasons.setdefault(name, f"{run.name}, which is under way, uses {name}")
    for table in filter(trial_tables.is_in_use, trial_tables.known()):
        for name in trial_tables.runs_of(table):
            reasons.setdefault(name, f"{name} is a trial in {table}, which a study or a tuning is using")
    return reasons


def tables_naming(runs: Iterable[RunFolder]) -> dict[Path, int]:
    """Table of trials -> how many of these runs are trials in it, for every table with some."""
    names = {run.name for run in runs}
    return {table: count for table in trial_tables.known() if (count := len(names & trial_tables.runs_of(table)))}


def size(run: RunFolder) -> int:
    """Bytes of a run's files; several names of one file count once. The targets of its links are neither counted nor removed."""
    sizes = {}
    for folder, _, names in os.walk(run.path):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile, or hidden from this user
                status = os.lstat(os.path.join(folder, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def remove(run: RunFolder) -> None:
    """Remove a run's folder. If that is interrupted, the rest is a damaged run that can be removed again."""
    shutil.rmtree(run.path)
