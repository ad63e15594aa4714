"""How far a run is and how well it does, from its metric lines and its result: for a terminal's line, a table, a notebook."""

from __future__ import annotations

from typing import Any

from launcher.record.metric_lines import Metric
from launcher.show.text import dollars

HISTORY_SECONDS = 1.0
"""Lines that come within so many seconds of the first were there before anybody looked: they tell nothing of the speed."""

CURVES = ("loss", "validation_accuracy", "validation_miou")
"""Numbers whose course is kept."""


class Progress:
    """The latest of every number of a run, the course of some, and how long it will take."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.last: Metric | None = None
        self.curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
        """By name: (step, value), in order."""
        self._began: tuple[float, int] | None = None

    def add(self, metric: Metric, now: float) -> None:
        """Take a metric line that came at `now`, in seconds of a clock that only goes forward."""
        self.metrics.update(metric.values)
        self.last = metric
        for name in CURVES:
            if name in metric.values:
                self.curves[name].append((metric.step, metric.values[name]))
        if self._began is None or now - self._began[0] < HISTORY_SECONDS:
            self._began = (self._began[0] if self._began else now, metric.step)

    @property
    def share(self) -> float:
        """Of its steps that are done, 0 to 1."""
        return 0.0 if self.last is None else self.last.step / max(self.last.steps, 1)

    def seconds_left(self, now: float) -> float | None:
        """By the speed since somebody looks; None where that is not known yet."""
        if self._began is None or self.last is None:
            return None
        done = self.last.step - self._began[1]
        return (now - self._began[0]) / done * (self.last.steps - self.last.step) if done > 0 else None

    def line(self, seconds_left: float | None = None, spend: float | None = None) -> str:
        """`epoch 3/60  step 40/1260  loss 0.1234  accuracy 97.1 %  512 images/s  $1.20  1:23 left`, from the latest of each number."""
        if self.last is None:
            return ""
        parts = [f"epoch {self.last.epoch}/{self.last.epochs}", f"step {self.last.step}/{self.last.steps}"]
        if "loss" in self.metrics:
            parts.append(f"loss {self.metrics['loss']:.4f}")
        if "validation_accuracy" in self.metrics:
            parts.append(f"accuracy {self.metrics['validation_accuracy']:.1%}".replace("%", " %"))
        if "validation_miou" in self.metrics:
            parts.append(f"mIoU {self.metrics['validation_miou']:.1%}".replace("%", " %"))
        if "images/s" in self.metrics:
            parts.append(f"{self.metrics['images/s']:.0f} images/s")
        if spend is not None:
            parts.append(dollars(spend))
        if seconds_left is not None:
            parts.append(f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left")
        return "  ".join(parts)


def quality(result: dict[str, Any]) -> str:
    """A result's accuracy, or its mean intersection over union where pixels were classified; - for neither."""
    miou = percent(result.get("validation_miou"))
    return percent(result.get("validation_accuracy")) if miou == "-" else f"{miou} mIoU"


def percent(fraction: Any) -> str:
    """A fraction in percent; - for anything else that a script may have written."""
    return f"{fraction * 100:.2f} %" if isinstance(fraction, (int, float)) else "-"
