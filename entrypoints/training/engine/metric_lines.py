"""The metric lines of training steps: losses over the global batch, seconds per phase, images/s and memory, printed and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from launcher_observer.exchange import ExchangeRecord

from training.engine.memory import peak_memory
from training.engine.run import Run
from training.engine.state import TrainingState
from training.measure.timeline import Window
from training.runtime import accelerator, metrics

DIVERGENCE_HINT = (
    "lower learning_rate, lengthen the warm-up, set max_grad_norm, or compute in bf16 or fp32 instead of fp16"
)
"""What to do if a model diverges."""

Place = tuple[int, int, int, int]
"""Epoch, epochs, step, steps."""


@dataclass(frozen=True)
class EndedSteps:
    """Consecutive steps that the host has submitted, and what it knows of them by itself."""

    place: Place
    """Of the last one."""
    read: Callable[[], Window]
    """Waits until the device has done them."""
    memory: dict[str, float]
    """Peak GiB, by the metric's name."""
    about: dict[str, Any]
    """`profiled`, if they took longer because of it; `servers`, what those did meanwhile."""


def end_steps(place: Place, run: Run) -> EndedSteps:
    """The steps since the last call end here."""
    about: dict[str, Any] = {"profiled": True} if run.operators.slowed() else {}
    if run.servers is not None:
        about["servers"] = run.servers.window()
    memory = {metrics.MEMORY.name: peak_memory(run.world.device) / 2**30}
    return EndedSteps(place, run.timeline.end_window(), memory, about)


def record_steps(
    ended: EndedSteps, window: Window, run: Run, images: int, waited: float | None = None
) -> dict[str, float]:
    """Record this rank's line for a window of steps.

    Args:
        images: of a step, over all processes.
        waited: seconds a step for other ranks' gradients. None: not measured.

    Returns:
        How much arithmetic that was, as `Arithmetic.window` gives it.
    """
    utilisation = run.arithmetic.window(images / run.world.size, window.answered, window.step, window.steps)
    seconds = {**window.phases, "step": window.step}
    if waited is not None:
        seconds["grad_sync"] = waited
    about = {
        "steps": window.steps,
        "slowest_step": window.slowest_step,
        "images_per_second": images / window.step,
        "cpu_seconds": window.cpu - window.worker_cpu,
        "worker_cpu_seconds": window.worker_cpu,
    }
    epoch, _, step, _ = ended.place
    run.record.steps(epoch, step, seconds, {**about, **utilisation, **window.scheduling, **ended.memory, **ended.about})
    return utilisation


def printed_of(window: Window) -> tuple[dict[str, float], dict[str, float]]:
    """A window's seconds that a metric line has room for, by the metrics' names, and the others."""
    seconds = {f"{phase}_s": round(value, 6) for phase, value in (*window.phases.items(), ("cpu", window.cpu))}
    return {name: seconds.pop(name) for name in metrics.STEP_LINE if name in seconds}, seconds


@dataclass(frozen=True)
class _Line:
    """A metric line that is not printed yet."""

    ended: EndedSteps
    names: list[list[str]]
    """Of each model's losses."""
    means: torch.Tensor
    """Of the losses over all processes, float64, one model after the other; in main memory once `ended.read` has returned, or before."""
    learning_rates: list[float]


class MetricLines:
    """A run's metric lines, in the order of its steps.

    A line needs the device to have done its steps. With `late_metrics` the host reads it when it has submitted the step after them, which
    the device computes meanwhile; before a pause and at an epoch's end at once. All ranks read a line after the same step, so that all of
    them find a loss that is not finite.
    """

    def __init__(self, states: Sequence[TrainingState], run: Run):
        self._states, self._run = states, run
        self._late = run.settings.late_metrics and accelerator.is_gpu(run.world.device)
        self._exchange = ExchangeRecord()
        self._unprinted: _Line | None = None

    def step_ended(self, losses: Sequence[Mapping[str, torch.Tensor]], place: Place, *, due: bool) -> None:
        """A step is submitted. A collective if a line is due.

        Args:
            losses: of each model, as Task yields them.
            due: a line follows, of the steps since the one before.

        Raises:
            FloatingPointError: the loss of a line that is read now is not finite.
        """
        self._exchange.step_ended(state.trained for state in self._states)
        means = self._means(losses) if due else None
        if means is not None:
            means = self._copied(means) if self._late else self._read_now(means)
        self._run.timeline.step()
        self.print_unprinted()
        if means is None:
            return
        rates = [state.learning_rate for state in self._states]
        self._unprinted = _Line(end_steps(place, self._run), [[*of_one] for of_one in losses], means, rates)
        if not self._late:
            self.print_unprinted()

    def print_unprinted(self) -> None:
        """Print and record the line that waits for it, if there is one. Waits for the device.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        line, self._unprinted = self._unprinted, None
        if line is None:
            return
        run, window = self._run, line.ended.read()
        step, means = line.ended.place[2], iter(line.means.tolist())
        found: dict[str, dict[str, float]] = {}
        for state, names, rate in zip(self._states, line.names, line.learning_rates):
            found[state.name] = {name: next(means) for name in names}
            loss = found[state.name][metrics.LOSS.name]
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss{f' of {state.name}' if state.name else ''} is {loss} at step {step}: {DIVERGENCE_HINT}"
                )
            found[state.name][metrics.LEARNING_RATE.name] = rate
        utilisation = record_steps(line.ended, window, run, run.settings.global_batch_size, self._exchanged())
        values, unprinted = metrics.line_of(found)
        values[metrics.IMAGES_PER_SECOND.name] = run.settings.global_batch_size / window.step
        if "teacher_forward" in window.phases:
            values[metrics.TEACHER_SHARE.name] = window.phases["teacher_forward"] / window.step
        printed, phases = printed_of(window)
        used = {metrics.MFU.name: utilisation.pop("mfu")} if "mfu" in utilisation else {}
        run.report.metrics(
            *line.ended.place,
            {**values, **used, **printed, **line.ended.memory},
            {**unprinted, **phases, **utilisation},
        )

    def _means(self, losses: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """As _Line has them, on the device."""
        stacked = torch.stack([value for of_one in losses for value in of_one.values()])
        return self._run.world.all_reduce_sum(stacked.double()) / self._run.world.size

    @staticmethod
    def _read_now(means: torch.Tensor) -> torch.Tensor:
        """Waits for the device, as a part of the step."""
        return means.cpu()

    @staticmethod
    def _copied(means: torch.Tensor) -> torch.Tensor:
        """In pinned memory, once the device has come so far."""
        return torch.empty_like(means, device="cpu", pin_memory=True).copy_(means, non_blocking=True)

    def _exchanged(self) -> float | None:
        """Seconds a step for other ranks' gradients, of all models together. None: not measured."""
        waited = [self._exchange.seconds(state.trained) for state in self._states]
        known = [seconds for seconds in waited if seconds is not None]
        return sum(known) if len(known) == len(waited) else None
