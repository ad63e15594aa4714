"""Labelling: a job without its student, which fills the label bank that the job's training runs read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher import backends
from launcher.backends.plans import plan_config
from launcher.config import students
from launcher.config.issues import mistake
from launcher.config.job import Job
from launcher.config.students import LABELS, LABELS_PIXELS, TRAINS
from launcher.planner.plan import Plan
from launcher.planner.teachers import PIXELS
from launcher.planner.validation import SUFFIX

SETTING = "teacher_cache"

LABELLED_BY = {TRAINS: LABELS, PIXELS: LABELS_PIXELS}
"""Script that learns from a teacher's answers -> script that only stores them; both take the same settings."""


def planned(
    config: str | Path, overrides: Sequence[str] = (), *, on: str = backends.DEFAULT, smoke: bool = False
) -> Plan:
    """Plan the labelling of a config's job.

    If the job reads its bank from a run, `inputs.NAME: {run: …}`, this run is that one: it has no such input, and writes the bank. If
    the job uses a complete bank instead of its teacher, this run has the teacher.

    Raises:
        UserError: the config has mistakes, or its script learns from no teacher whose answers can be kept.
    """
    return plan_config(config, overrides, on=on, smoke=smoke, change=labelling)


def labelling(job: Job) -> Job:
    """The job that labels another one's images. It has no students that learn from labels alone.

    Raises:
        UserError: its script learns from no teacher whose answers can be kept.
    """
    if job.source is not None or job.script not in LABELLED_BY:
        scripts = " or ".join(LABELLED_BY)
        raise mistake("script", job.script, f"launcher label takes a config of this kit's own {scripts}", valid=scripts)
    settings, inputs = dict(job.hyperparameters), dict(job.inputs)
    kept = settings.get(SETTING)
    if isinstance(kept, dict):
        where, left_out = (
            kept.get("where"),
            {"complete"} if job.script == TRAINS else set(),
        )  # the teacher is here, and fills the bank
        channel = where.removeprefix("channel:") if isinstance(where, str) and where.startswith("channel:") else ""
        if channel in inputs and inputs[channel].run is not None:
            del inputs[channel]
            left_out.add("where")
        settings[SETTING] = {name: value for name, value in kept.items() if name not in left_out}
    if own := students.taught(job):
        settings[students.SETTING] = own
    name = job.name[: 42 - len(SUFFIX)].rstrip("-") + SUFFIX
    return job.model_copy(
        update={"name": name, "script": LABELLED_BY[job.script], "inputs": inputs, "hyperparameters": settings}
    )
