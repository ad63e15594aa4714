"""Parse the metric line that scripts print: the same text in a local log and in CloudWatch.

A line is `epoch 3/60 step 40/1260 loss 0.1234 images/s 512.3 …`: names and plain decimals. The scripts' table of metrics,
entrypoints/training/runtime/metrics.py, has its regular expression.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from launcher.config.metrics import metric_table

GOES_ON = re.compile(r"^resuming from the checkpoint of step (\d+)$")
"""How a script reports the step from which it resumes, as entrypoints/training/engine/loop.py does."""


@dataclass(frozen=True)
class Metric:
    """One metric line, or a window of steps that the observer counted."""

    epoch: int
    step: int
    values: dict[str, float]
    """By name: loss and its parts, learning_rate, images/s, validation_accuracy …; and epoch and step."""
    epochs: int | None = None
    steps: int | None = None
    """In total; None if only the script knows."""
    epoch_step: int | None = None
    epoch_steps: int | None = None
    """Steps done in this epoch, and the loader's length; None if the observer did not count, or the loader has none."""


def parse_line(line: str) -> Metric | None:
    """Parse a log line; None if it is not a metric line."""
    whole, pair = _expressions()
    match = whole.match(line.strip())
    if match is None:
        return None
    place = {name: int(match[name]) for name in ("epoch", "epochs", "step", "steps")}
    return Metric(
        **place,
        values={
            "epoch": place["epoch"],
            "step": place["step"],
            **{name: float(value) for name, value in pair.findall(match["rest"])},
        },
    )


@functools.cache
def _expressions() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Of a whole line, and of one metric in it."""
    table = metric_table()
    return re.compile(table.LINE), re.compile(table.PAIR)
