"""What a rule answers: a finding, nothing, or why it could not look."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.insight.findings import Finding


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """A rule could not look."""

    what: str
    """What it looks for."""
    reason: str
    """What is missing, and why if that is known."""


@dataclass(frozen=True)
class DoesNotApply:
    """The rule has nothing to look at in this run, or another rule's finding explains what it sees."""

    why: str


EXPLAINED = DoesNotApply("another finding explains it")

Answer = Finding | NotMeasured | DoesNotApply | None
"""None: the rule looked, and found nothing."""
