"""What a check found, and the folder that keeps it: one JSON file per check, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "error", "not checked"]

FAILURES = ("failed", "error")


class NotChecked(Exception):
    """This check cannot run here; the message says why."""


@dataclass
class Result:
    """What a check measures. The check fills it as it goes, so that an exception loses nothing."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers and texts by name; a name ends with its unit, if any."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """A table: one mapping per row, with the same keys."""
    problems: list[str] = field(default_factory=list)
    """Each expectation that does not hold, as a sentence."""
    left_out: list[str] = field(default_factory=list)
    """Each part that did not run, with the reason."""

    def expect(self, holds: bool, sentence: str) -> None:
        """Record the sentence as a problem unless it holds."""
        if not holds:
            self.problems.append(sentence)


@dataclass
class Outcome:
    """How a check ended."""

    check: str
    status: Status
    reason: str = ""
    """Why it was not checked, or the error."""
    seconds: float = 0.0
    result: Result = field(default_factory=Result)
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Device, versions, commit and command; the same for a whole call."""


def write(folder: Path, outcome: Outcome) -> None:
    """Keep an outcome; it replaces an earlier one of the same check."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{outcome.check}.json", asdict(outcome))


def read(folder: Path) -> dict[str, Outcome]:
    """All outcomes in a folder, by check."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        found[values["check"]] = Outcome(**{**values, "result": Result(**values["result"])})
    return found


def write_json(file: Path, values: Any) -> None:
    """Write a file as a whole or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, file)
