"""What a label bank is and how complete it is, as `launcher labels show` prints it."""

from __future__ import annotations

from typing import Any

from launcher.labels.bank import Bank
from launcher.show.table import Table
from launcher.show.text import file_size


def description(bank: Bank) -> dict[str, Any]:
    """Everything that `launcher labels show --json` prints."""
    views = {view: sum(int(piece.held.sum()) for piece in bank.pieces(view)) for view in bank.views}
    return {
        "folder": str(bank.folder),
        "labels of": dict(bank.identity),
        "created": dict(bank.manifest["created"]),
        "bytes of a record": bank.records.size,
        "images a view": bank.images_per_view,
        "views": [
            {"view": view, "labels": count, "complete": bank.file(view).name in bank.checksums}
            for view, count in views.items()
        ],
        "digest": bank.digest,
    }


def as_text(bank: Bank) -> str:
    """The same for people."""
    about, records = description(bank), bank.records
    names = [name for name in bank.identity if name not in ("record format", "images", *records.identity())]
    lines = [
        f"label bank {bank.folder}",
        f"  kept    {records.about()}: {records.size:,} bytes for each view of an image",
        *(f"  {name:<15} {bank.identity[name]}" for name in names),
        f"  teacher         {about['created'].get('teacher', 'not named')}",
        f"  digest          {about['digest']}",
        "",
    ]
    of = f"{about['images a view']:,}"
    rows = [
        (
            str(one["view"]),
            f"{one['labels']:,} of {of}",
            "yes" if one["complete"] else "no",
            file_size(_size(bank, one)),
        )
        for one in about["views"]
    ]
    notes = [] if rows else ["no view was begun"]
    return "\n".join([*lines, str(Table(("view", "labels", "complete", "size"), rows, notes=notes))])


def _size(bank: Bank, one: dict[str, Any]) -> int:
    """Bytes of the labels of a view."""
    return int(one["labels"]) * int(bank.records.size)
