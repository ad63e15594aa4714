"""Plan a recorded run's job again, for a replay, a resumed run or a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher import backends
from launcher.backends.plans import plan
from launcher.config import yaml_file
from launcher.config.issues import Issue, UserError
from launcher.config.loading import from_record
from launcher.planner.plan import Plan
from launcher.record import records
from launcher.runner import start_record


def plan_again(folder: records.RunFolder, overrides: Sequence[str], on: str | None) -> Plan:
    """Plan a recorded run's job again, with its code, overrides, and possibly another backend.

    Raises:
        UserError: it has no job, its record is incomplete, other users can change it, or an override is wrong.
    """
    start_record.require_trusted_owner(folder)
    recorded = folder.read(folder.plan)["backend"]
    if (why_not := backends.starter(recorded).why_not_planned_again(folder)) is not None:
        raise UserError([why_not])
    values = folder.read_job()
    # without one the code is a copy of this kit's, with all that is known of its scripts
    if values.get("source") is not None:
        values["source"] = str(folder.code)
    values.pop("study", None)  # what a study varies is not part of one run's job
    changed, problems = yaml_file.override(yaml_file.Config(str(folder.job), values), overrides)
    if changed.values.get("profile") != values.get("profile"):
        found = "an earlier job planned again keeps the role, region and network that it had"
        problems.append(Issue(key="profile", found=found, fix="override these keys: role=… region=… output=…"))
    if problems:
        raise UserError(problems, str(folder.job))
    made = plan(from_record(changed.values, str(folder.job)), on=on or recorded, source=folder.code)
    return replace(made, replay_of=folder.name)
