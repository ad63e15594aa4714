"""A run's progress and quality, from its metric lines and its result, for a terminal, a table, a notebook."""

from __future__ import annotations

from typing import Any

from launcher.config import students
from launcher.config.metrics import metric_table
from launcher.record.metric_lines import Metric, parse_line
from launcher.record.metrics_file import observed_metrics
from launcher.record.records import RunFolder
from launcher.record.script_output import training_loss
from launcher.show.text import dollars, number


class Progress:
    """The latest value of every metric of a run, the curves of some, and the time left."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.last: Metric | None = None
        self.curves: dict[str, list[tuple[int, float]]] = {
            one.name: [] for one in metric_table().METRICS if one.is_curve
        }
        """By name: (step, value), in order."""
        self._passes = 0
        """The first pass over the metrics is the history, whose times are unknown; the second brings the first new ones."""
        self._began: tuple[float, int] | None = None
        """When the last metrics of the second pass arrived, and their step: speed is measured from there."""

    def caught_up(self) -> None:
        """End a pass: all metrics that exist so far were added."""
        if self._passes != 1 or self._began is not None:
            self._passes += 1

    def add(self, metric: Metric, now: float) -> None:
        """Add metrics that arrived at `now`, in seconds of a monotonic clock."""
        self.metrics.update(metric.values)
        self.last = metric
        for name in self.curves:
            if name in metric.values:
                self.curves[name].append((metric.step, metric.values[name]))
        if self._passes == 1:
            self._began = (now, metric.step)

    def add_loss(self, loss: float) -> None:
        """Add a loss that a script printed in its own form, when nothing counts its steps."""
        self.metrics["loss"] = loss
        self.curves["loss"].append((len(self.curves["loss"]) + 1, loss))

    @property
    def share(self) -> float:
        """Share of steps done, 0 to 1; of the epoch's steps if the script's end is not known."""
        done, steps = self._done()
        return done / steps if steps else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Seconds left, at the speed since the history, or as the observer measured it; None while the speed is unknown. Of the
        epoch if the script's end is not known."""
        done, steps = self._done()
        if self.last is None or not steps:
            return None
        if self.last.steps is None:
            return (steps - done) / self.metrics["steps/s"]
        if self._began is None:
            return None
        new = self.last.step - self._began[1]
        return (now - self._began[0]) / new * (steps - done) if new > 0 else None

    def _done(self) -> tuple[int, int]:
        """Steps done, and in total; (0, 0) if unknown."""
        if self.last is None:
            return 0, 0
        if self.last.steps is not None:
            return self.last.step, self.last.steps
        return self.last.epoch_step or 0, self.last.epoch_steps or 0

    def line(self, seconds_left: float | None = None, spend: float | None = None) -> str:
        """The latest values: `epoch 3/60  step 40/1260  loss 0.1234  accuracy 97.1 %  512 images/s  $1.20  1:23 left`, and for steps that
        the observer counted `epoch 3  step 240  40 of 100  loss 0.1234  512 images/s  8.1 steps/s  0:07 left of the epoch`.
        """
        parts = [] if self.last is None else self._place(self.last)
        for one in metric_table().METRICS:
            if one.shown and one.name in self.metrics:
                parts.append(one.shown.format(self.metrics[one.name]).replace("%", " %"))
        if spend is not None:
            parts.append(dollars(spend))
        if seconds_left is not None:
            of = " of the epoch" if self.last is not None and self.last.steps is None else ""
            parts.append(f"{_clock(seconds_left)} left{of}")
        return "  ".join(parts)

    def _place(self, last: Metric) -> list[str]:
        if last.steps is not None:
            return [f"epoch {last.epoch}/{last.epochs}", f"step {last.step}/{last.steps}"]
        of = [f"{last.epoch_step} of {last.epoch_steps}"] if last.epoch_steps else []
        return [f"epoch {last.epoch}", f"step {last.step}", *of]


class RunProgress(Progress):
    """A run's progress from its metric lines; if it prints none, from the steps that the observer counted, or the loss alone."""

    def __init__(self, folder: RunFolder):
        super().__init__()
        self._folder = folder
        self._position = 0
        self._reports_itself = False

    def read_line(self, line: str, now: float) -> bool:
        """Read a line of the first host's log. Returns whether it says something new.

        Args:
            now: seconds of a monotonic clock, at which it arrived.
        """
        metric = parse_line(line)
        if metric is not None:
            self._reports_itself = True
            self.add(metric, now)
            return True
        loss = training_loss(line) if self.last is None else None
        if loss is not None:
            self.add_loss(loss)
        return loss is not None

    def read_observed(self, now: float) -> bool:
        """Read what the observer has counted since. Returns whether there was any."""
        if self._reports_itself:
            return False
        before = self._position
        for metric, after in observed_metrics(self._folder, before):
            if self.last is None:
                self.curves["loss"].clear()  # by lines, not by steps
            self._position = after
            self.add(metric, now)
        return self._position > before


def _clock(seconds: float) -> str:
    """A time as `1:23`, with hours `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def quality(result: dict[str, Any]) -> str:
    """A result's accuracy, or its mean intersection over union (mIoU); for several students the lowest and highest; - if there is
    none."""
    each = [one.get("validation_accuracy") for one in students.results(result).values()]
    known = sorted(one for one in each if isinstance(one, (int, float)))
    if known:
        return f"{percent(known[0])} to {percent(known[-1])}"
    miou = percent(result.get("validation_miou"))
    return percent(result.get("validation_accuracy")) if miou == "-" else f"{miou} mIoU"


def percent(fraction: Any) -> str:
    """A fraction in percent; - for anything but a number."""
    return number(fraction, ".2%").replace("%", " %")
