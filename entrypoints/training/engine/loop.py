"""The training loop. It knows no method: a task yields each model's dict of named losses, and the loop minimises the one called `loss`.

A run trains one model, or several on the same batches. Their states have the same order everywhere, and each step handles one after the
other, so that a model's activations are freed before the next one's are allocated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from training.data.batches import TrainingBatches
from training.data.loaders import Loaders
from training.distributed.data_parallel import synchronise
from training.engine.device_batches import on_device
from training.engine.metric_lines import DIVERGENCE_HINT, MetricLines, Place
from training.engine.random_state import reseed, restore_rng, rng_state
from training.engine.run import Run
from training.engine.state import TrainingState
from training.measure.debugger import register_hook
from training.measure.timeline import Timeline
from training.runtime import accelerator, failure, metrics

Losses = dict[str, torch.Tensor]
"""Scalars by name; `loss` is the one that is minimised."""

States = Sequence[TrainingState]
"""One per model that a run trains; all take the same steps."""


class Task(Protocol):
    """A method of training."""

    def __call__(self, batch: Any) -> Iterator[Losses]:
        """The losses of one micro-batch, a NamedTuple of tensors on this rank's device, for each model in turn. A model's forward pass
        runs when its losses are requested."""

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Called when an epoch begins, counted from 1, and when a run resumes in the middle of one."""


Evaluate = Callable[[nn.Module], dict[str, Any]]
"""model -> metrics by name over all ranks' shares of the held-out images, the same on every rank: numbers, or mappings, such as one
per class, which no metric line has room for."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    steps: int
    """Optimizer steps done, including those before a resume."""
    resumed_from: int | None
    """Step of the checkpoint that it resumed from; None: it began at the first step."""
    stopped: bool
    """Whether SIGTERM ended it before its last step."""
    images_per_second: float | None
    """Over all processes, without the first steps and evaluation. None: there were no other steps."""
    validation: dict[str, dict[str, Any]]
    """Metrics of the last evaluation, by model name; a stopped run ends without another one. Empty: there was none."""


def train(task: Task, evaluate: Evaluate, states: States, loaders: Loaders, steps: int, run: Run) -> Outcome:
    """Train until the last step or a requested stop, resuming from the newest checkpoint if there is one.

    Returns:
        How it ended; the states are those of the last step, also after a stop.

    Raises:
        ValueError: the checkpoints belong to another job.
        FloatingPointError: the loss, or a model at a checkpoint, is not finite.
    """
    settings, world, report, timeline = run.settings, run.world, run.report, run.timeline
    per_epoch, validation = len(loaders.train_batches), {}
    epochs = -(-steps // per_epoch)
    resumed_from = _resume(states, run)
    run.record.passed("checkpoint")
    state = states[0]  # all take the same steps
    register_hook(state.trainable, report.log)  # of the first model only: smdebug follows one

    def evaluation_is_due() -> bool:
        epoch, rest = divmod(state.step, per_epoch)
        return state.step >= steps or (rest == 0 and epoch % settings.evaluate_every == 0)

    if resumed_from and evaluation_is_due():  # the previous run may have ended between this step and its evaluation
        epoch = -(-state.step // per_epoch)
        validation = _evaluate(evaluate, states, (epoch, epochs, state.step, steps), run)
    if state.step > steps:
        report.log(f"nothing is left to train: the checkpoint is from step {state.step}, and the job has {steps}")
    stopped, saved, lines = False, state.step, MetricLines(states, run)
    while state.step < steps and not stopped:
        epoch, first = state.step // per_epoch + 1, state.step % per_epoch
        loaders.train_batches.start(epoch, first)
        task.begin_epoch(epoch, loaders.train_batches)
        for one in states:
            one.trainable.train()
        batches = on_device(iter(loaders.train), world, timeline, settings.copy_stream)
        timeline.start()
        for _ in range(first, min(per_epoch, steps - (epoch - 1) * per_epoch)):
            run.operators.step()
            run.profiler.step()
            losses = _step(task, states, batches, loaders.train_batches.accumulation, timeline)
            run.record.first_step(state.step, loaders.workers.count)
            stopped = run.stop.agreed() and state.step < steps
            place = (epoch, epochs, state.step, steps)
            due = state.step % settings.log_every == 0 or state.step == steps or stopped
            lines.step_ended(losses, place, due=due)
            if stopped:
                lines.print_unprinted()
                report.log(f"stopped after step {state.step} of {steps} on SIGTERM")
                break
            if settings.checkpoint_every and state.step % settings.checkpoint_every == 0:
                lines.print_unprinted()
                saved = _save(states, place, run)
                timeline.start()
        lines.print_unprinted()
        # before the evaluation, which may take longer than a stop leaves time for; a run that resumes from here evaluates first
        if state.step != saved and (stopped or settings.checkpoint_every is None or evaluation_is_due()):
            saved = _save(states, place, run, required=stopped)
        if not stopped and evaluation_is_due():
            validation = _evaluate(evaluate, states, place, run)
            stopped = state.step < steps and world.any(run.stop.received)
            if stopped:
                report.log(f"stopped after the evaluation of step {state.step} of {steps} on SIGTERM")
    run.operators.close()
    run.profiler.close()
    run.stop.finish()
    run.checkpoints.finish()
    failure.progress.enter("")
    for one in states:
        world.average_buffers(one.evaluated)  # as they are exported, also after a stop
    seconds = timeline.seconds_per_step()
    speed = settings.global_batch_size / seconds if seconds else None
    return Outcome(state.step, resumed_from, stopped, speed, validation)


def step_by_step(
    task: Task, states: States, loaders: Loaders, run: Run, first_step: int = 0
) -> Generator[None, None, None]:
    """One optimizer step per `next`, epoch after epoch, and nothing else: no log line, evaluation, checkpoint or end.

    Args:
        first_step: the step of the run, from 0 on, whose images come first.
    """
    batches, timeline = loaders.train_batches, run.timeline
    epoch, first = divmod(first_step, len(batches))
    for state in states:
        state.trainable.train()
    timeline.start()
    for number in itertools.count(epoch + 1):
        batches.start(number, first)
        task.begin_epoch(number, batches)
        moved = on_device(iter(loaders.train), run.world, timeline, run.settings.copy_stream)
        for _ in range(first, len(batches)):
            _step(task, states, moved, batches.accumulation, timeline)
            timeline.step()
            yield
        first = 0


def _step(task: Task, states: States, batches: Iterator[Any], accumulation: int, timeline: Timeline) -> list[Losses]:
    """One optimizer step of each model over `accumulation` micro-batches. Returns the means of their losses."""
    totals: list[Losses] = [{} for _ in states]
    for part in range(accumulation):
        asked = task(next(batches))
        for state, total in zip(states, totals):
            with synchronise(state.trained, part == accumulation - 1), state.random_numbers.drawn():
                with state.precision.autocast():
                    losses = next(asked)
                with timeline.phase("backward"):
                    loss = losses[metrics.LOSS.name] / accumulation
                    scaled = loss if state.scaler is None else state.scaler.scale(loss)
                    scaled.backward()
            for name, value in losses.items():
                value = value.detach() / accumulation
                total[name] = total[name] + value if name in total else value
    for state in states:
        _optimize(state, timeline)
    failure.progress.step = states[0].step
    return totals


def _optimize(state: TrainingState, timeline: Timeline) -> None:
    """Update a model from its gradients."""
    with timeline.phase("optimizer"):
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if state.settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(state.trainable.parameters(), state.settings.max_grad_norm)
        if state.scaler is None:
            state.optimizer.step()
        else:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.learning_rate = float(state.schedule.get_last_lr()[0])
        state.schedule.step()
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)


def _evaluate(evaluate: Evaluate, states: States, place: Place, run: Run) -> dict[str, dict[str, Any]]:
    accelerator.synchronize(run.world.device)  # the steps so far are no part of it
    started, found = time.perf_counter(), {}
    failure.progress.enter("evaluate")
    for state in states:
        run.world.average_buffers(state.evaluated)
        found[state.name] = evaluate(state.evaluator)
        state.evaluated_at = state.step
    seconds, step = time.perf_counter() - started, states[0].step
    run.record.stall("evaluate", step, seconds)
    numbers = {
        model: {name: value for name, value in of_one.items() if not isinstance(value, Mapping)}
        for model, of_one in found.items()
    }
    parts = {
        f"{metrics.of_model(model, name)}/{part}": value
        for model, of_one in found.items()
        for name, values in of_one.items()
        if isinstance(values, Mapping)
        for part, value in values.items()
        if isinstance(value, float)
    }
    printed, unprinted = metrics.line_of(numbers)
    run.report.metrics(*place, {**printed, metrics.EVALUATE_SECONDS.name: seconds}, {**unprinted, **parts})
    return found


def _save(states: States, place: Place, run: Run, *, required: bool = False) -> int:
    """Save a checkpoint of this step, if there is a folder for it. Returns the step. A collective.

    Raises:
        FloatingPointError: a model is not finite; its checkpoint must not replace a good one.
    """
    step = states[0].step
    for state in states:
        # an fp16 forward pass that overflows has its step skipped, but leaves its mark on BatchNorm's statistics
        statistics = [
            one for name, one in state.model.named_buffers() if name.endswith(("running_mean", "running_var"))
        ]
        numbers = [*map(torch.Tensor.detach, state.model.parameters()), *statistics]
        if not run.world.all(bool(torch.stack([one.isfinite().all() for one in numbers]).all())):
            raise FloatingPointError(
                f"the model{f' {state.name}' if state.name else ''} has weights or BatchNorm statistics that are not finite after step "
                f"{step}: {DIVERGENCE_HINT}"
            )
    if run.checkpoints.enabled:
        started = time.perf_counter()  # the device has done the steps so far: the check has waited for it
        failure.progress.enter("checkpoint")
        shared = {state.name: state.capture() for state in states}
        own = rng_state(run.world.device)
        for state in states:
            own |= {metrics.of_model(state.name, f"model {name}"): value for name, value in state.own().items()}
        run.checkpoints.save(step, shared if run.world.is_first else None, own, required=required)
        seconds = time.perf_counter() - started
        run.record.stall("checkpoint", step, seconds)
        run.report.metrics(*place, {metrics.CHECKPOINT_SECONDS.name: seconds})
    return step


def _resume(states: States, run: Run) -> int | None:
    """Restore the newest good checkpoint. Returns its step, or None if there is none."""
    loaded = run.checkpoints.load()
    if loaded is None:
        return None
    for state in states:
        state.restore(loaded.shared[state.name])
        prefix = metrics.of_model(state.name, "model ")
        own = {name.removeprefix(prefix): value for name, value in loaded.own.items() if name.startswith(prefix)}
        state.restore_own(own, loaded.same_world)
    if not loaded.same_world:
        reseed(run.settings.seed, loaded.step, run.world.rank)
    else:
        restore_rng(loaded.own, run.world.device)
    run.report.log(f"resuming from the checkpoint of step {loaded.step}")
    return loaded.step
