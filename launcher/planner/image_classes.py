"""Whether the training and the held-out images on this machine have the same classes: this kit's scripts refuse others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.planner.teachers import OF_PIXELS

SHOWN = 5
"""Maximum classes of a folder that are named, as in the scripts."""


def check(job: Job, places: Mapping[str, str]) -> Iterator[Issue]:
    """An error about classes that only one of the channels `train` and `validation` has: found before the hosts start, not after.

    Args:
        places: channel -> path, of the inputs on this machine.
    """
    if job.source is not None or job.script in OF_PIXELS or _trains_without_labels(job):
        return
    train, held_out = (_classes(places.get(name, "")) for name in ("train", "validation"))
    if train and held_out and train != held_out:
        alone = {places["train"]: sorted(train - held_out), places["validation"]: sorted(held_out - train)}
        named = [f"only {place} has {', '.join(names[:SHOWN])}" for place, names in alone.items() if names]
        yield Issue(
            key="inputs.validation",
            found=f"the channels train and validation hold different classes: {'; '.join(named)}",
            fix="add images of each class to both folders, or remove its folder",
        )


def _trains_without_labels(job: Job) -> bool:
    """Whether the script is told to read no channel `train`."""
    unlabelled = job.hyperparameters.get("unlabelled")
    return isinstance(unlabelled, dict) and unlabelled.get("alone") is True


def _classes(place: str) -> set[str]:
    """The class folders that are not empty; none if it is no folder, cannot be read, or holds shards, which list their classes."""
    try:
        visible = [entry for entry in os.scandir(place) if not entry.name.startswith(".")]
        if any(entry.name.endswith(".tar") for entry in visible):
            return set()
        return {entry.name for entry in visible if entry.is_dir() and os.listdir(entry)}
    except OSError:
        return set()
