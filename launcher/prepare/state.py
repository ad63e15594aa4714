"""A target's records of its preparation, in JSON files that anything may have damaged since."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from launcher.config.issues import mistake
from launcher.planner.made_folders import Recorded
from launcher.record.shapes import complaint

State = TypeVar("State")

ARGUMENTS = TypeAdapter(Recorded)
"""What prepared.json holds."""


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
        fix = f"put it back from a copy, or remove the folder and prepare it anew: rm -r {shlex.quote(str(target))}"
        raise mistake("TARGET", f"{file} is damaged: {wrong}", fix) from None
