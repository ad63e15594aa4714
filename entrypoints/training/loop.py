"""The training loop. It knows no method: a task gives a dict of named losses, and the loop lowers the one called `loss`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from training.data.batches import Data
from training.distributed import World
from training.models import parameter_groups
from training.reporting import Reporter
from training.schedules import warmup_cosine
from training.script_settings import TrainingSettings
from training.stopping import StopSignal

Task = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""(images uint8 (batch, channels, height, width), labels) -> scalar losses by name; `loss` is the one that is lowered.
Labels are what the training loader gives: class numbers (batch,), or masks (batch, height, width)."""

Evaluate = Callable[[nn.Module, DataLoader, World], dict[str, float]]
"""(model, this rank's share of the held-out images, world) -> metrics by name over all ranks' shares, the same on every rank."""

WARM_UP_STEPS = 5
"""Steps at the start that do not count for images/s: memory is allocated and libraries choose their kernels there."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    steps: int
    stopped: bool
    """Whether SIGTERM ended it before its last step."""
    images_per_second: float | None
    """Over all processes, without the first steps and without evaluation. None: there were no other steps."""
    validation: dict[str, float]
    """Metrics of the last evaluation: a stopped run leaves at once, without one more. Empty: there was none."""


class Stopwatch:
    """Counts images and the seconds spent on training steps alone."""

    def __init__(self, global_batch_size: int):
        self._batch, self._steps, self._seconds, self._started = global_batch_size, 0, 0.0, 0.0
        self._window_steps, self._window_seconds = 0, 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def step(self, number: int) -> None:
        """A step has ended; the next begins now."""
        now = time.perf_counter()
        if number > WARM_UP_STEPS:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._started
        self._window_steps, self._window_seconds = self._window_steps + 1, self._window_seconds + now - self._started
        self._started = now

    def window(self) -> float:
        """Images a second since the last call."""
        speed = self._batch * self._window_steps / self._window_seconds
        self._window_steps, self._window_seconds = 0, 0.0
        return speed

    def overall(self) -> float | None:
        """Images a second over all steps after the warm-up; None where there were no more."""
        return self._batch * self._steps / self._seconds if self._steps else None


def distribute(model: nn.Module, world: World) -> nn.Module:
    """The trainable model on this rank's device, wrapped for data-parallel training where there are several ranks."""
    model = model.to(world.device)
    if world.size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)


def train(
    task: Task,
    evaluate: Evaluate,
    model: nn.Module,
    data: Data,
    settings: TrainingSettings,
    world: World,
    report: Reporter,
    stop: StopSignal,
) -> Outcome:
    """Train until the last step, or until a stop is asked for.

    Args:
        task: the losses of this rank's share of a batch; it holds the model as `distribute` wrapped it.
        evaluate: the metrics of the model on the held-out images.
        model: the same model unwrapped, for the optimizer and for evaluation.

    Returns:
        How it ended; the model has its final weights, on the stop's step too.
    """
    per_epoch = len(data.train_batches)
    steps = min(settings.epochs * per_epoch, settings.max_steps or settings.epochs * per_epoch)
    epochs = -(-steps // per_epoch)
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, steps, settings.warmup_fraction)
    )
    watch, step, stopped = Stopwatch(settings.global_batch_size), 0, False
    validation: dict[str, float] = {}
    for epoch in range(1, epochs + 1):
        data.train_batches.epoch = epoch
        model.train()
        watch.start()
        for images, labels in data.train:
            images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
            losses = task(images, labels)
            optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()
            if settings.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            learning_rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            step += 1
            stopped = step < steps and stop.agreed()
            shown = step % settings.log_every == 0 or step == steps or stopped
            values = {name: value.item() for name, value in losses.items()} if shown and world.is_first else {}
            watch.step(step)  # after .item(), which waits for the device
            if shown:
                report.metrics(
                    epoch, epochs, step, steps, {**values, "learning_rate": learning_rate, "images/s": watch.window()}
                )
            if step == steps or stopped:
                break
        if not stopped and (epoch % settings.evaluate_every == 0 or step == steps):
            world.average_buffers(model)
            validation = evaluate(model, data.validation, world)
            report.metrics(epoch, epochs, step, steps, validation)
        if stopped:
            report.say(f"stopped after step {step} of {steps}, as asked by SIGTERM")
            break
    world.average_buffers(model)
    return Outcome(step, stopped, watch.overall(), validation)
