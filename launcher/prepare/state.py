"""What prepare keeps in a target, and how that is removed. Its JSON files may have been damaged by anything since."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from launcher.config.issues import mistake
from launcher.planner.made_folders import RECORD, SPLITS, Recorded
from launcher.record.shapes import complaint

State = TypeVar("State")

ARGUMENTS = TypeAdapter(Recorded)
"""What prepared.json holds."""

BROKEN = "broken.txt"
"""The target's list of images that cannot be read."""

SHARDS = ".shards"
"""The target's folder with one record per shard. Records are kept, so that a lost shard can be written again."""

MASKS = "masks"
"""The folder of masks in a split, and the end of the name of their count."""


def splits_of(how: Recorded) -> tuple[str, ...]:
    """The folders that these arguments make."""
    return SPLITS[2:] if how.get("unlabelled") else SPLITS[:2]


def holds_any(folder: Path) -> bool:
    """Whether a folder is there and holds anything visible."""
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def removal(target: Path) -> str:
    """How to remove the folders and files that prepare made in a target, and none beside them: a command, unless the record is damaged."""
    try:
        how = ARGUMENTS.validate_json((target / RECORD).read_bytes(), strict=True)
    except ValidationError:
        listed = ", ".join((*SPLITS, SHARDS, BROKEN))
        return f"remove {RECORD} and, of {listed} beside it, what was prepared"
    made = [str(target / name) for name in (*splits_of(how), SHARDS, BROKEN, RECORD) if (target / name).exists()]
    return f"remove what was prepared: {shlex.join(['rm', '-r', *made])}"


def read_state(file: Path, target: Path, shape: TypeAdapter[State]) -> State | None:
    """What a file of a target holds; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    if not file.is_file():
        return None
    try:
        return shape.validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        wrong = complaint(error.errors(include_url=False)[0])
        fix = f"put it back from a copy, or begin anew: {removal(target)}"
        raise mistake("TARGET", f"{file} is damaged: {wrong}", fix) from None
