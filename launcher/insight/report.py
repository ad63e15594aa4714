"""A report: what all rules say about one run, and what a probe adds."""

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
    """What all rules say about one run."""

    findings: tuple[Finding, ...]
    """Urgent ones first, then by share of the time, largest first; risks last."""
    not_found: tuple[str, ...]
    """What was looked for and not found."""
    not_measured: tuple[NotMeasured, ...]
    not_applicable: tuple[tuple[str, str], ...] = ()
    """(what was not looked for, why)."""
    too_short: str | None = None
    """How short the run was, if too short to say where its time goes; None: it was long enough."""
    probe: ProbeAnswer | None = None
    """What a probe says; None: there was none."""
