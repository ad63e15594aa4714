"""Accepts or refuses a teacher by its metrics on the held-out images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from training.runtime.metrics import ACCURACY, MIOU
from training.teacher.frozen import Teacher
from training.teacher.served import RemoteTeacher

HINTS = {
    ACCURACY.name: (
        "an accuracy",
        "min_teacher_accuracy",
        "its classes are in the order of the folders and that it gets its own image size and normalisation",
    ),
    MIOU.name: (
        "a mean IoU",
        "min_teacher_miou",
        "the masks number the classes as its training masks did",
    ),
}
"""By metric: its name in a sentence, the setting for its minimum, and what to check if it is lower."""


def accept(
    teacher: Teacher | RemoteTeacher,
    metrics: Mapping[str, Any],
    minimum: float,
    number_format: str,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Log a teacher's quality, and refuse the teacher below the minimum.

    Args:
        metrics: on the held-out images, with validation_accuracy or validation_miou among them.
        minimum: the setting min_teacher_accuracy or min_teacher_miou.
        number_format: of its weights.

    Returns:
        The teacher's entry in result.json and in the model card.

    Raises:
        ValueError: as `require`.
    """
    metric = next(name for name in HINTS if name in metrics)
    log(
        f"teacher {teacher.name}: {teacher.parameters:,} parameters in {number_format}, frozen, {metric} {metrics[metric]:.4f}"
    )
    require(metric, metrics[metric], minimum, teacher.name)
    return {"model": teacher.name, "parameters": teacher.parameters, "digest": teacher.digest(), **metrics}


def identity(taught: Mapping[str, Any]) -> dict[str, str]:
    """What identifies a teacher, from its entry in result.json: its student's checkpoints belong to it."""
    return {"teacher": f"{taught['model']} ({taught['digest'][:8]})"}


def require(metric: str, value: float, minimum: float, name: str) -> None:
    """Refuse a teacher whose metric, 0…1 on the held-out images, is below the minimum.

    Raises:
        ValueError: it is lower; the message names possible causes.
    """
    what, setting, hint = HINTS[metric]
    if value < minimum:
        raise ValueError(
            f"the teacher {name} has {what} of {value:.4f} on the validation images, below {setting} {minimum:g}: see that {hint}, "
            f"train it further, or lower {setting}"
        )
