"""The unfinished run of a planned job: the same job and code, stopped or failed, with a checkpoint to continue from."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

from launcher import backends
from launcher.config.issues import mistake
from launcher.planner.plan import Plan
from launcher.planner.source_package import code_checksum, recorded_files
from launcher.record import records
from launcher.runner.run import Run

NOT_COMPARED = ("source", "study")
"""Keys that may differ in the same job: the code's path, since its content is compared, and what only a study reads."""


def resume_unfinished(plan: Plan) -> Plan:
    """The plan, made to resume the unfinished run of the same job and code; unchanged if there is none.

    >>> plan = launcher.resume_unfinished(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True)))
    >>> plan.resumes is None                            # no earlier run of it was stopped
    True

    The backend, the resolved config and the content of every source file must be the same; the path of `source`, the commit, `study`
    and the values of secrets, which no record holds, are not compared. The latest such run counts, except those that ended before
    their first checkpoint. If it completed, there is nothing to resume.

    Raises:
        UserError: that run is still under way.
    """
    latest = _latest(plan)
    if latest is None or latest.state == records.COMPLETED:
        return plan
    if latest.state not in records.OVER:
        fix = f"launcher attach {latest.name} follows it; launcher stop {latest.name} stops it"
        raise mistake("run", f"{latest.name}, of the same job and code, is {latest.state}", fix)
    return replace(plan, resumes=latest.name)


def unfinished(plan: Plan) -> Run | None:
    """The run that `resume_unfinished` would continue; None if there is none."""
    latest = _latest(plan)
    return latest if latest is not None and latest.state in (records.FAILED, records.STOPPED) else None


def _latest(plan: Plan) -> Run | None:
    """The latest run of the same job and code that is under way, has completed or left a checkpoint."""
    if plan.errors:
        return None
    backend, job = backends.get(plan.backend), _compared(plan.kept_job())
    for folder in reversed(records.all_runs(plan.job.name)):
        with contextlib.suppress(records.DamagedRecord):  # it cannot be resumed either
            recorded = folder.read(folder.plan)
            if (recorded["backend"], _compared(recorded["job"])) != (plan.backend, job):
                continue
            if code_checksum(recorded_files(folder.code)) != code_checksum(plan.files):
                continue
            run = Run(folder)
            if (
                run.state not in (records.FAILED, records.STOPPED)
                or backend.why_not_resumed(recorded["job"], folder) is None
            ):
                return run
    return None


def _compared(job: dict[str, Any]) -> str:
    """The compared keys of a recorded job, as JSON."""
    return json.dumps({key: value for key, value in job.items() if key not in NOT_COMPARED}, sort_keys=True)
