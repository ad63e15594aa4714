"""A run's progress and quality, from its metric lines and its result: for a terminal, a table, a notebook."""

from __future__ import annotations

from typing import Any

from launcher.config.metrics import metric_table
from launcher.record.metric_lines import Metric
from launcher.show.text import dollars, number

HISTORY_SECONDS = 1.0
"""Seconds. Lines that arrive this soon after the first had been written before, and say nothing about the speed."""


class Progress:
    """The latest value of every metric of a run, the curves of some, and the time left."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.last: Metric | None = None
        self.curves: dict[str, list[tuple[int, float]]] = {
            one.name: [] for one in metric_table().METRICS if one.is_curve
        }
        """By name: (step, value), in order."""
        self._began: tuple[float, int] | None = None

    def add(self, metric: Metric, now: float) -> None:
        """Add a metric line that arrived at `now`, in seconds of a monotonic clock."""
        self.metrics.update(metric.values)
        self.last = metric
        for name in self.curves:
            if name in metric.values:
                self.curves[name].append((metric.step, metric.values[name]))
        if self._began is None or now - self._began[0] < HISTORY_SECONDS:
            self._began = (self._began[0] if self._began else now, metric.step)

    @property
    def share(self) -> float:
        """Share of its steps that are done, 0 to 1."""
        return 0.0 if self.last is None else self.last.step / max(self.last.steps, 1)

    def seconds_left(self, now: float) -> float | None:
        """Seconds left, at the speed since the first line; None where the speed is not known yet."""
        if self._began is None or self.last is None:
            return None
        done = self.last.step - self._began[1]
        return (now - self._began[0]) / done * (self.last.steps - self.last.step) if done > 0 else None

    def line(self, seconds_left: float | None = None, spend: float | None = None) -> str:
        """`epoch 3/60  step 40/1260  loss 0.1234  accuracy 97.1 %  512 images/s  $1.20  1:23 left`, from the latest values."""
        if self.last is None:
            return ""
        parts = [f"epoch {self.last.epoch}/{self.last.epochs}", f"step {self.last.step}/{self.last.steps}"]
        for one in metric_table().METRICS:
            if one.shown and one.name in self.metrics:
                parts.append(one.shown.format(self.metrics[one.name]).replace("%", " %"))
        if spend is not None:
            parts.append(dollars(spend))
        if seconds_left is not None:
            parts.append(f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left")
        return "  ".join(parts)


def quality(result: dict[str, Any]) -> str:
    """A result's accuracy, or its mean intersection over union (mIoU); - where it has neither."""
    miou = percent(result.get("validation_miou"))
    return percent(result.get("validation_accuracy")) if miou == "-" else f"{miou} mIoU"


def percent(fraction: Any) -> str:
    """A fraction in percent; - for anything but a number."""
    return number(fraction, ".2%").replace("%", " %")
