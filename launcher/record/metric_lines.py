"""The metric line that people read, read by the launcher: the same text in a local log and in CloudWatch.

A line is `epoch 3/60 step 40/1260 loss 0.1234 images/s 512.3 …`: names and plain decimals, written by
entrypoints/training/runtime/reporting.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<step>\d+)/(?P<steps>\d+)(?P<rest>(?: [A-Za-z_/0-9]+ -?(?:\d+\.?\d*|nan|inf))*)$"
)
_PAIR = re.compile(r" ([A-Za-z_/0-9]+) (-?(?:\d+\.?\d*|nan|inf))")


@dataclass(frozen=True)
class Metric:
    """One metric line."""

    epoch: int
    epochs: int
    step: int
    steps: int
    values: dict[str, float]
    """By name: loss and its parts, learning_rate, images/s, validation_accuracy …; and epoch and step."""


def parse_line(line: str) -> Metric | None:
    """The metric in a log line; None where it holds none."""
    match = _LINE.match(line.strip())
    if match is None:
        return None
    place = {name: int(match[name]) for name in ("epoch", "epochs", "step", "steps")}
    return Metric(
        **place,
        values={
            "epoch": place["epoch"],
            "step": place["step"],
            **{name: float(value) for name, value in _PAIR.findall(match["rest"])},
        },
    )
