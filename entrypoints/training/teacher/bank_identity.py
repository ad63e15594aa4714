"""Compares what a label bank's answers depend on between a bank and a run, and names every difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from training.teacher.label_bank import FORMAT, IDENTITY
from training.teacher.record_format import Records

Values = Mapping[str, Any]


def identity_of(parts: Mapping[str, str], images: int, records: Records) -> dict[str, Any]:
    """The manifest's `logits of`.

    Args:
        parts: hashes or names of everything the logits depend on: "teacher weights", "transform", "data", "dtype".
        images: number of training images.
    """
    return {"record format": FORMAT, **parts, "images": images, **records.identity()}


def require_same(where: Path, manifest: Values, identity: Values, about: Values, fix: str) -> None:
    """Refuse a bank that holds other logits than a run asks for.

    Args:
        manifest: the bank's.
        identity, about: what this run would write as the manifest's `logits of` and under `created`. If both sides' `created` describe
            a part, such as "transform", the message says how it differs.

    Raises:
        ValueError: they differ; the message names every difference and ends with the fix.
    """
    there, created = manifest[IDENTITY], manifest.get("created", {})
    different = [
        f"{part} ({_difference(there.get(part), identity.get(part), created.get(part), about.get(part))})"
        for part in dict.fromkeys([*identity, *there])
        if there.get(part) != identity.get(part)
    ]
    if different:
        raise ValueError(f"the label bank in {where} was made with other {', '.join(different)}: {fix}")


def _difference(there: Any, here: Any, details_there: Any, details_here: Any) -> str:
    """How two values of one part differ; by the details behind them, if both sides give them."""
    if isinstance(details_there, dict) and isinstance(details_here, dict):
        there_flat, here_flat = dict(_flat(details_there)), dict(_flat(json.loads(json.dumps(details_here))))
        names = [
            name for name in dict.fromkeys([*here_flat, *there_flat]) if there_flat.get(name) != here_flat.get(name)
        ]
        if names:
            return "; ".join(f"{name}: there {there_flat.get(name)}, here {here_flat.get(name)}" for name in names)
    if isinstance(there, list) and isinstance(here, list) and not {*map(type, [*there, *here])} <= {int}:
        pairs = enumerate(zip_longest(there, here))
        return next(f"number {index}: there {one}, here {other}" for index, (one, other) in pairs if one != other)
    return f"there {_short(there)}, here {_short(here)}"


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 16 else str(value)
