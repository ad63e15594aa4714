"""What a run's record holds for changing its config and running it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.record import records
from launcher.record.records import RunFolder

HELD_OUT = ("validation", "val", "test")
"""Names of the folder of held-out images, as `launcher prepare` looks for it beside train."""


@dataclass(frozen=True)
class Replay:
    """A run that `launcher replay` can run again."""

    run: str
    """Its name."""
    images: str | None = None
    """The folder on this machine that holds its training and held-out images, file by file, as `launcher prepare` takes it; None: they
    are elsewhere, or already in shards."""
    checkpoints: str | None = None
    """A folder in S3 that can keep its checkpoints, for a run on SageMaker whose job keeps none; None: it has one, or needs none."""


def replay_of(run: RunFolder) -> Replay | None:
    """None if the run lies outside the store, or its record has no config that can be planned again."""
    plan = run.read(run.plan)
    if run.path.resolve() != (records.store() / run.name).resolve():
        return None
    starter, job = backends.starter(plan["backend"]), plan["job"]
    if starter.why_not_planned_again(run) is not None:
        return None
    return Replay(run.name, _images(job.get("inputs", {})), starter.room_for_checkpoints(job))


def _images(inputs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The folder around the inputs `train` and `validation`, if it is named as theirs and holds image files."""
    train, held_out = (inputs.get(part, {}).get("folder") for part in ("train", "validation"))
    if not isinstance(train, str) or not isinstance(held_out, str):
        return None
    try:
        one, other = Path(train).expanduser(), Path(held_out).expanduser()
        both = [name for name in HELD_OUT if (one.parent / name).is_dir()]
        holds_files = one.is_dir() and any(entry.is_dir() for entry in one.iterdir())
    except (OSError, RuntimeError, ValueError):  # no permission, no home, a NUL
        return None
    together = one.parent == other.parent and one.name == "train" and both[:1] == [other.name]
    return str(one.parent) if together and holds_files and one.parent.name else None
