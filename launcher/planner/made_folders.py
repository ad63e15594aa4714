"""Folders that this kit's commands make: the command for one that is missing, and whether `launcher prepare` has finished one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from launcher.config.issues import Issue

SAMPLES = ("digits", "photos", "shapes", "cutouts")
"""Images that `launcher prepare` makes from packages, as the built-in configs name their folders."""

SPLITS = ("train", "validation", "unlabelled")
"""Folders that `launcher prepare SOURCE TARGET` makes in its target: the first two, or with --unlabelled the last."""

WEIGHTS = ("dinov2-small",)
"""What `launcher weights` makes a folder of."""

RECORD = "prepared.json"
"""The target's file that says how it is made and, once finished, how many images each split has."""

Recorded = dict[str, str | bool | int | float | None]
"""What RECORD holds: the arguments by their names in Python, and the counts."""

WRITTEN = "images in "
"""Prefix of the counts' names. They are written last: a target without any was not finished."""

OPTIONS = {
    "size": "--size",
    "validation_fraction": "--validation-fraction",
    "jpeg_quality": "--jpeg-quality",
    "shard_size": "--shards",
}
"""Arguments with a value -> their options."""


def command_that_makes(folder: Path) -> str | None:
    """The command that creates an input's folder; None: the kit has none."""
    if folder.name in WEIGHTS:
        return f"launcher weights {folder.name} {shlex.quote(str(folder))}"
    if folder.name not in SPLITS:
        return None
    sample = folder.parent.name if folder.parent.name in SAMPLES else "SOURCE"
    option = " --unlabelled" if folder.name == "unlabelled" else ""
    return f"launcher prepare {sample} {shlex.quote(str(folder.parent))}{option}"


def image_counts(recorded: Recorded) -> dict[str, int]:
    """Split -> the images that were written, by a target's record; empty: the target was not finished."""
    counts = {split: recorded.get(f"{WRITTEN}{split}") for split in SPLITS}
    return {split: count for split, count in counts.items() if isinstance(count, int)}


def not_finished(key: str, target: Path, recorded: Recorded) -> Issue:
    """The issue for a target that lacks images, since its record has no counts."""
    return Issue(
        key=key, found=f"{target} was not finished", fix=f"prepare it to its end: {_command(target, recorded)}"
    )


def _command(target: Path, recorded: Recorded) -> str:
    """The command that made, or began, a target, and that continues it."""
    words = ["launcher", "prepare", str(recorded.get("source", "SOURCE")), str(target)]
    for name, option in OPTIONS.items():
        if recorded.get(name) is not None:
            words += [option, str(recorded[name])]
    return shlex.join([*words, "--unlabelled"] if recorded.get("unlabelled") else words)


def unfinished(key: str, folder: Path) -> Issue | None:
    """The issue for an input's folder that `launcher prepare` began but did not finish: training on it would succeed, with whole classes
    missing. None: it is complete, or something else made it."""
    folder = folder.resolve()
    if folder.name not in SPLITS:
        return None
    how = recorded(folder.parent)
    makes_it = bool(how) and (folder.name == "unlabelled") == bool(how.get("unlabelled"))
    if not makes_it or image_counts(how):
        return None
    return not_finished(key, folder.parent, how)


def recorded(target: Path) -> Recorded:
    """A folder's record; empty if there is none, or another program's file of that name."""
    try:
        found = json.loads((target / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("source"), str) else {}
