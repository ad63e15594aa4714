"""The students of a train_kd.py job, or of one that labels for them, in its hyperparameters and its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.entrypoints import kit_modules
from launcher.config.job import Job

SETTING = "students"

TRAINS, LABELS, LABELS_PIXELS = "train_kd.py", "label_images.py", "label_pixels.py"
"""The script that learns from a teacher's answers, and the one that only keeps them; both take the same settings."""


def students(job: Job) -> dict[str, dict[str, Any]]:
    """Each student's own settings in one of this kit's jobs, by name; {} if the job names none, or names them wrongly."""
    given = job.hyperparameters.get(SETTING) if job.source is None and job.script in (TRAINS, LABELS) else None
    return _entries(given)


def taught(job: Job) -> dict[str, dict[str, Any]]:
    """The students that learn from a teacher; all of them if the job's hyperparameters have mistakes, which its plan reports."""
    own = students(job)
    if not own:
        return {}
    with kit_modules("training.settings", "training.settings.entries", "training.settings.distillation") as modules:
        settings_module, entries, distillation = modules
        settings, _ = settings_module.check(distillation.DistillationSettings, job.hyperparameters)
        each = {} if settings is None else entries.variants(settings)
        return {name: values for name, values in own.items() if name not in each or each[name].has_teacher}


def results(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A result.json's entry of each student, by name; {} if it has none: any script may have written it."""
    return _entries(result.get(SETTING))


def _entries(given: Any) -> dict[str, dict[str, Any]]:
    whole = isinstance(given, dict) and all(isinstance(own, dict) for own in given.values())
    return {str(name): own for name, own in given.items()} if whole else {}
