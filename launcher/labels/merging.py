"""Merge label banks: parts that several jobs filled, with the same teacher, images and views."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.config.issues import Issue, UserError
from launcher.labels.bank import Bank, rules
from launcher.record import folder_lock
from launcher.show.text import counted


@dataclass(frozen=True)
class Merged:
    """What merging did."""

    target: Path
    added: int
    """Labels that the target did not have."""
    conflicts: int
    """Labels that differ between banks: the target's own is kept, or that of the bank named first."""
    damaged: int
    """Records that were written, but that no bank holds whole."""

    def __str__(self) -> str:
        parts = [f"{self.target}: {counted(self.added, 'label')} added"]
        if self.conflicts:
            parts.append(f"{counted(self.conflicts, 'label')} differ between banks, the first one's is kept")
        if self.damaged:
            parts.append(f"{counted(self.damaged, 'damaged record')} left out")
        return "; ".join(parts)


def merge(sources: Sequence[Bank], target: Path) -> Merged:
    """Write all labels of several banks into one, new or begun. If it is killed and started again, it continues.

    A view that is complete in the target stays as it is. One that has changed since it was complete keeps its checksum, so that
    verification reports it, until a bank has the whole view.

    Raises:
        UserError: the banks are of different teachers, images or views; it names every difference. Or another process writes the target.
        OSError: the disk is full.
    """
    _require_same([*_begun(target), *sources])  # before anything is written
    with folder_lock.alone(target):
        return _merge(sources, target)


def _begun(target: Path) -> list[Bank]:
    """The target's own bank, if it has one."""
    return [Bank(target)] if (target / rules().MANIFEST).is_file() else []


def _merge(sources: Sequence[Bank], target: Path) -> Merged:
    own = rules()
    _require_same([*_begun(target), *sources])  # another merge may have begun it
    if not _begun(target):
        shutil.copyfile(sources[0].folder / own.MANIFEST, target / f".{own.MANIFEST}")
        os.replace(target / f".{own.MANIFEST}", target / own.MANIFEST)
    into = Bank(target)
    complete, added, conflicts, damaged = dict(into.checksums), 0, 0, 0
    for view in sorted({view for bank in sources for view in bank.views}):
        file = own.view_file(target, view)
        whole = _is_complete(into, view)
        opened = own.ViewFile(file, into.images, into.records.size, not whole)
        for bank in (bank for bank in sources if view in bank.views):
            for piece in bank.pieces(view):
                there = opened.read(piece.images)
                kept = into.holds(there, piece.images, view)
                new = piece.held & ~kept & (not whole)
                opened.write(piece.records[new], piece.images[new])
                added += int(new.sum())
                conflicts += int((piece.held & kept & (there != piece.records).any(1)).sum())
        opened.sync()
        opened.close()
        damaged += _damaged_everywhere(sources, Bank(target), view)
        if not whole and any(_is_complete(bank, view) for bank in sources):
            complete[file.name] = own.sha256_of(file)
            own.write_checksums(target, complete)
    return Merged(target, added, conflicts, damaged)


def _is_complete(bank: Bank, view: int) -> bool:
    """Whether a view's file is unchanged since it was complete."""
    file = bank.file(view)
    noted = bank.checksums.get(file.name) if view in bank.views and not bank.wrong_size(view) else None
    return noted is not None and noted == rules().sha256_of(file)


def _damaged_everywhere(sources: Sequence[Bank], merged: Bank, view: int) -> int:
    lost = np.zeros(merged.images, np.bool_)
    for bank in (bank for bank in sources if view in bank.views):
        for piece in bank.pieces(view):
            lost[piece.images] |= piece.written & ~piece.held
    for piece in merged.pieces(view):
        lost[piece.images] &= ~piece.held
    return int(lost.sum())


def _require_same(banks: Sequence[Bank]) -> None:
    first, *others = banks
    issues = [
        Issue(
            key="FOLDER",
            found=f"{other.folder} and {first.folder} differ in {name}: {other.identity.get(name)}, {first.identity.get(name)}",
            fix="merge banks of one teacher, one data set and one way to vary it; others stay apart",
        )
        for other in others
        for name in dict.fromkeys([*first.identity, *other.identity])
        if other.identity.get(name) != first.identity.get(name)
    ]
    if issues:
        raise UserError(issues, "the banks cannot be merged")
