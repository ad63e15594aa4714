"""The training loop. It knows no method: a task gives a dict of named losses, and the loop lowers the one called `loss`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from launcher_observer.process import grad_sync_seconds
from torch import nn

from training.data.batches import STAYING, TrainingBatches
from training.data.loaders import Loaders
from training.distributed.data_parallel import synchronise
from training.distributed.world import World
from training.engine.memory import peak_memory
from training.engine.random_state import reseed, restore_rng, rng_state
from training.engine.run import Run
from training.engine.state import TrainingState
from training.measure.debugger import register_hook
from training.measure.timeline import Timeline
from training.runtime import failure, metrics
from training.settings.scripts import TrainingSettings

Losses = dict[str, torch.Tensor]
"""Scalars by name; `loss` is the one that is lowered."""


class Task(Protocol):
    """A method of training."""

    def __call__(self, batch: Any) -> Losses:
        """The losses of one micro-batch, a NamedTuple of tensors on this rank's device."""

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """An epoch begins, counted from 1; also once where a run goes on in the middle of one."""


Place = tuple[int, int, int, int]
"""Epoch, epochs, step, steps."""

Evaluate = Callable[[nn.Module], dict[str, Any]]
"""model -> metrics by name over all ranks' shares of the held-out images, the same on every rank: numbers, or mappings such as
one of each class, which no metric line has room for."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    steps: int
    """Optimizer steps done, those before a resume too."""
    resumed_from: int | None
    """The step of the checkpoint that it went on from; None: it began at the first."""
    stopped: bool
    """Whether SIGTERM ended it before its last step."""
    images_per_second: float | None
    """Over all processes, without the first steps and without evaluation. None: there were no other steps."""
    validation: dict[str, Any]
    """Metrics of the last evaluation: a stopped run leaves at once, without one more. Empty: there was none."""


def train(task: Task, evaluate: Evaluate, state: TrainingState, loaders: Loaders, steps: int, run: Run) -> Outcome:
    """Train until the last step, or until a stop is asked for; go on from the newest checkpoint where there is one.

    Returns:
        How it ended; the state is that of the last step, on the stop's step too.

    Raises:
        ValueError: the checkpoints are of another job.
        FloatingPointError: the loss is not finite.
    """
    settings, world, report, timeline = run.settings, run.world, run.report, run.timeline
    per_epoch, validation = len(loaders.train_batches), {}
    epochs = -(-steps // per_epoch)
    resumed_from = _resume(state, run)
    register_hook(state.model, report.say)

    def evaluation_is_due() -> bool:
        epoch, rest = divmod(state.step, per_epoch)
        return state.step == steps or (rest == 0 and epoch % settings.evaluate_every == 0)

    if resumed_from and evaluation_is_due() and (state.evaluated_at != state.step or state.step == steps):
        epoch = -(-state.step // per_epoch)  # the run before ended between this step and its evaluation
        validation = _evaluate(evaluate, state, (epoch, epochs, state.step, steps), run)
    stopped, saved = False, state.step
    while state.step < steps and not stopped:
        epoch, first = state.step // per_epoch + 1, state.step % per_epoch
        loaders.train_batches.start(epoch, first)
        task.begin_epoch(epoch, loaders.train_batches)
        state.model.train()
        batches = on_device(iter(loaders.train), world, timeline)
        timeline.start()
        for _ in range(first, min(per_epoch, steps - (epoch - 1) * per_epoch)):
            run.operators.step()
            run.profiler.step()
            losses = _step(task, state, batches, loaders.train_batches.accumulation, settings, timeline)
            run.record.first_step(state.step, loaders.workers.count)
            stopped = run.stop.agreed() and state.step < steps
            place = (epoch, epochs, state.step, steps)
            if state.step % settings.log_every == 0 or state.step == steps or stopped:
                _report_step(losses, state, place, run)
            else:
                timeline.step()
            if stopped:
                report.say(f"stopped after step {state.step} of {steps} on SIGTERM")
                break
            if settings.checkpoint_every and state.step % settings.checkpoint_every == 0:
                saved = _save(state, place, run)
                timeline.start()
        if not stopped and evaluation_is_due():
            validation = _evaluate(evaluate, state, place, run)
        if state.step != saved and (stopped or settings.checkpoint_every is None or state.step == steps):
            saved = _save(state, place, run, required=stopped)
    run.operators.close()
    run.profiler.close()
    run.stop.finish()
    run.checkpoints.finish()
    failure.progress.enter("")
    world.average_buffers(state.evaluated)  # as they are exported, also after a stop
    seconds = timeline.seconds_per_step()
    speed = settings.global_batch_size / seconds if seconds else None
    return Outcome(state.step, resumed_from, stopped, speed, validation)


def step_by_step(
    task: Task, state: TrainingState, loaders: Loaders, run: Run, first_step: int = 0
) -> Generator[None, None, None]:
    """An optimizer step at each `next`, epoch after epoch, and nothing between them: no line, evaluation, checkpoint or end.

    Args:
        first_step: the step of the run, from 0 on, with whose images it begins.
    """
    batches, timeline = loaders.train_batches, run.timeline
    epoch, first = divmod(first_step, len(batches))
    state.model.train()
    timeline.start()
    for number in itertools.count(epoch + 1):
        batches.start(number, first)
        task.begin_epoch(number, batches)
        moved = on_device(iter(loaders.train), run.world, timeline)
        for _ in range(first, len(batches)):
            _step(task, state, moved, batches.accumulation, run.settings, timeline)
            timeline.step()
            yield
        first = 0


def _step(
    task: Task,
    state: TrainingState,
    batches: Iterator[Any],
    accumulation: int,
    settings: TrainingSettings,
    timeline: Timeline,
) -> Losses:
    """One optimizer step over `accumulation` micro-batches; the means of their losses."""
    totals: Losses = {}
    for part in range(accumulation):
        batch = next(batches)
        with synchronise(state.trained, part == accumulation - 1):
            with state.precision.autocast():
                losses = task(batch)
            with timeline.phase("backward"):
                loss = losses[metrics.LOSS.name] / accumulation
                scaled = loss if state.scaler is None else state.scaler.scale(loss)
                scaled.backward()
        for name, value in losses.items():
            value = value.detach() / accumulation
            totals[name] = totals[name] + value if name in totals else value
    with timeline.phase("optimizer"):
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(state.model.parameters(), settings.max_grad_norm)
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
    failure.progress.step = state.step
    return totals


def on_device(batches: Iterator[Any], world: World, timeline: Timeline) -> Iterator[Any]:
    """The loader's batches, NamedTuples, with their tensors on this rank's device, but for those of STAYING."""
    while True:
        with timeline.phase("data_wait"):
            batch = next(batches, None)
        if batch is None:
            return
        with timeline.phase("host_to_device"):
            moved = {
                name: value.to(world.device, non_blocking=True)
                for name, value in batch._asdict().items()
                if name not in STAYING
            }
        yield batch._replace(**moved)


def _report_step(losses: Losses, state: TrainingState, place: Place, run: Run) -> None:
    """The metric line of a step: losses of the whole global batch, seconds of the phases, images/s, memory."""
    means = run.world.total(torch.stack([*losses.values()]).double()) / run.world.size
    values = dict(zip(losses, means.tolist()))  # waits for the device
    if not math.isfinite(values[metrics.LOSS.name]):
        raise FloatingPointError(
            f"the loss is {values['loss']} at step {state.step}: lower learning_rate, lengthen the warm-up, set max_grad_norm, "
            "or compute in bf16 or fp32 where it was fp16"
        )
    run.timeline.step()
    seconds = run.timeline.window()
    memory = {metrics.MEMORY.name: peak_memory(run.world.device) / 2**30}
    record_steps(seconds, memory, place, run, grad_sync_seconds(state.trained))
    whole = seconds.pop("step")
    speed = run.settings.global_batch_size / whole
    values |= {metrics.LEARNING_RATE.name: state.learning_rate, metrics.IMAGES_PER_SECOND.name: speed}
    if "teacher_forward" in seconds:
        values[metrics.TEACHER_SHARE.name] = seconds["teacher_forward"] / whole
    phases = {f"{phase}_s": round(value, 6) for phase, value in seconds.items()}
    said = {name: phases.pop(name) for name in metrics.STEP_LINE if name in phases}
    run.report.metrics(*place, {**values, **said, **memory}, phases)


def record_steps(
    seconds: Mapping[str, float], memory: Mapping[str, float], place: Place, run: Run, waited: float | None = None
) -> None:
    """This rank's own line of the window.

    Args:
        seconds: as Timeline.window gives them.
        waited: seconds a step for other ranks' gradients. None: not measured.
    """
    shown = {**seconds}
    of_workers = run.timeline.worker_cpu
    used = {"cpu_seconds": shown.pop("cpu") - of_workers, "worker_cpu_seconds": of_workers}  # no phases: of all threads
    if waited is not None:
        shown["grad_sync"] = waited
    window = {"steps": run.timeline.steps, "slowest_step": run.timeline.slowest_step}
    speed = {"images_per_second": run.settings.global_batch_size / seconds["step"]}
    slowed = {"profiled": True} if run.operators.slowed() else {}
    served: dict[str, Any] = {"servers": run.servers.window()} if run.servers is not None else {}
    run.record.steps(
        place[0], place[2], shown, {**window, **speed, **used, **run.timeline.scheduling, **memory, **slowed, **served}
    )


def _evaluate(evaluate: Evaluate, state: TrainingState, place: Place, run: Run) -> dict[str, Any]:
    started = time.perf_counter()
    failure.progress.enter("evaluate")
    run.world.average_buffers(state.evaluated)
    found = evaluate(state.evaluator)
    state.evaluated_at = state.step
    seconds = time.perf_counter() - started
    run.record.stall("evaluate", state.step, seconds)
    said = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
    parts = {
        f"{name}/{part}": value
        for name, values in found.items()
        if isinstance(values, Mapping)
        for part, value in values.items()
        if isinstance(value, float)
    }
    run.report.metrics(*place, {**said, metrics.EVALUATE_SECONDS.name: seconds}, parts)
    return found


def _save(state: TrainingState, place: Place, run: Run, *, required: bool = False) -> int:
    """A checkpoint of this step, where there is a folder for it; the step. A collective."""
    if run.checkpoints.enabled:
        started = time.perf_counter()
        failure.progress.enter("checkpoint")
        buffers = {f"buffer {name}": buffer for name, buffer in state.own_buffers().items()}
        own = {**rng_state(run.world.device), **buffers}
        run.checkpoints.save(state.step, state.capture(), own, required=required)
        seconds = time.perf_counter() - started
        run.record.stall("checkpoint", state.step, seconds)
        run.report.metrics(*place, {metrics.CHECKPOINT_SECONDS.name: seconds})
    return state.step


def _resume(state: TrainingState, run: Run) -> int | None:
    """Set up the newest good checkpoint; its step, or None where there is none."""
    loaded = run.checkpoints.load()
    if loaded is None:
        return None
    state.restore(loaded.shared)
    if loaded.own is None:
        reseed(run.settings.seed, state.step, run.world.rank)
    else:
        restore_rng(loaded.own, run.world.device)
        for name, buffer in state.own_buffers().items():
            buffer.copy_(loaded.own[f"buffer {name}"])
    run.report.say(f"resuming from the checkpoint of step {state.step}")
    return state.step
