"""What a run records before it starts: job, plan, request, code, git state and package versions."""

from __future__ import annotations

import yaml

from launcher.planner.plan import Plan
from launcher.planner.source_package import copy_files, uncommitted
from launcher.record import records
from launcher.record.records import RunFolder


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
    records.write_json(folder.versions, records.installed_versions())
    records.write_atomically(folder.files, "".join(f"{file.size:>10} {file.path}\n" for file in plan.files))
    copy_files(list(plan.files), folder.code)
    if plan.request is not None:
        records.write_json(folder.request, plan.kept_request())
    records.write_atomically(folder.job, yaml.safe_dump(plan.kept_job(), sort_keys=False, allow_unicode=True))
    records.write_atomically(folder.plan, plan.to_json() + "\n")  # last: the run can be found once this exists
