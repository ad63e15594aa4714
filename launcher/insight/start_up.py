"""Start-up: the time from a process's start to the end of its first step, by parts."""

from __future__ import annotations

from launcher.config.metrics import metric_table
from launcher.insight.evidence import Evidence

Parts = list[tuple[str, float]]
"""(part, seconds), the longest first. The names are those of START in entrypoints/training/runtime/metrics.py."""

SMALL = 0.05
"""Seconds below which a part is not reported."""


def parts(evidence: Evidence) -> Parts:
    """Of the rank whose first step came last; [] if they were not recorded."""
    found = evidence.facts.get("parts_to_first_step") or {}
    return sorted(found.items(), key=lambda part: -part[1])


def parts_text(start_parts: Parts) -> str:
    """`imports 4.1 s, images 0.3 s`."""
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in start_parts if seconds >= SMALL)


def longest(start_parts: Parts) -> str:
    """The longest part, in a sentence."""
    name, seconds = start_parts[0]
    return f"{seconds:.0f} s of it go to {metric_table().START.get(name, name)}"


def sentence(evidence: Evidence) -> str:
    """When the first step came, and what took the time before; "" if that was not recorded."""
    seconds, start_parts = evidence.facts.get("seconds_to_first_step"), parts(evidence)
    if not isinstance(seconds, (int, float)) or not start_parts:
        return ""
    return f"first step after {seconds:.1f} s: {parts_text(start_parts)}"
