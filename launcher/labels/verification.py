"""Verification of a label bank: every record has its seal, every complete view its checksum, and the bank the recorded digest."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.labels.bank import Bank, rules
from launcher.show.text import counted


@dataclass(frozen=True)
class Verified:
    """What verification found."""

    whole: int
    """Records with their seal, over all views."""
    absent: int
    """Records that were never written, of images that a view draws."""
    problems: list[str]
    """What is damaged; empty if nothing is."""

    def __str__(self) -> str:
        whole, absent = counted(self.whole, "whole label"), f"{self.absent:,} absent"
        return "\n".join([f"{whole}, {absent}, {counted(len(self.problems), 'problem')}", *self.problems])


def verify(bank: Bank, digest: str | None = None) -> Verified:
    """Read every record of a bank.

    Args:
        digest: from the result.json of `launcher label`'s run, for a bank that may have been replaced since.
    """
    whole, absent, problems = 0, 0, []
    for view in bank.views:
        file, damaged, held = bank.file(view), 0, 0
        for piece in bank.pieces(view):
            held += int(piece.held.sum())
            damaged += int((piece.written & ~piece.held).sum())
        whole, absent = whole + held, absent + max(0, bank.images_per_view - held - damaged)
        if wrong := bank.wrong_size(view):
            problems.append(f"{wrong}: it was cut off, or belongs to another bank")
        if damaged:
            problems.append(f"{file.name} has {counted(damaged, 'damaged record')}; a run computes them again")
        noted = bank.checksums.get(file.name)
        if noted is not None and noted != rules().sha256_of(file):
            problems.append(f"{file.name} has changed since it was complete")
    problems += [f"{name} is missing or empty, and was complete" for name in bank.lost]
    if digest is not None and bank.digest != digest:
        problems.append(f"this bank has the digest {bank.digest}, and {digest} was expected: it is another one")
    return Verified(whole, absent, problems)
