"""A report: what all rules say of one run, and what a probe adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher.insight.answers import NotMeasured
from launcher.insight.findings import Finding


@dataclass(frozen=True)
class ProbeAnswer:
    """A probe's answer for people, in every form of the report."""

    HEAD: ClassVar[list[str]] = ["measured", "images/s", "x as it is"]
    title: str
    speaks: bool = False
    """Whether it applies to the run as it was measured."""
    rows: tuple[tuple[str, str, str], ...] = ()
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What all rules say of one run."""

    findings: tuple[Finding, ...]
    """Urgent ones first, then the one that takes most of the time, then risks."""
    not_found: tuple[str, ...]
    """What was looked for and is not there."""
    not_measured: tuple[NotMeasured, ...]
    not_applicable: tuple[tuple[str, str], ...] = ()
    """(what was not looked for, why)."""
    too_short: str | None = None
    """How short the run was, where that is too little to say where its time goes; None: it was long enough."""
    probe: ProbeAnswer | None = None
    """What a probe says; None: there was none."""
