"""Start-up: what passes between a process's start and the end of its first step, by parts."""

from __future__ import annotations

from launcher.config.metrics import metric_table
from launcher.insight.evidence import Evidence

Parts = list[tuple[str, float]]
"""(part, seconds), the longest first. The names are those of START in entrypoints/training/runtime/metrics.py."""

SMALL = 0.05
"""Seconds below which a part is not said."""


def parts(evidence: Evidence) -> Parts:
    """Of the rank whose first step came last; [] where they were not recorded."""
    found = evidence.facts.get("parts_to_first_step") or {}
    return sorted(found.items(), key=lambda part: -part[1])


def said(told: Parts) -> str:
    """`imports 4.1 s, images 0.3 s`."""
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in told if seconds >= SMALL)


def longest(told: Parts) -> str:
    """What takes most of it, in a sentence."""
    name, seconds = told[0]
    return f"{seconds:.0f} s of it pass with {metric_table().START.get(name, name)}"


def sentence(evidence: Evidence) -> str:
    """When the first step came, and what passed before; "" where that was not recorded."""
    seconds, told = evidence.facts.get("seconds_to_first_step"), parts(evidence)
    if not isinstance(seconds, (int, float)) or not told:
        return ""
    return f"first step after {seconds:.1f} s: {said(told)}"
