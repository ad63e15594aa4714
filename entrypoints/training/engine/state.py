"""What training changes: weights and their average, optimizer, schedule, scaler; captured and restored as one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from training.distributed.data_parallel import distribute
from training.distributed.world import World
from training.engine import optimizers
from training.engine.random_state import RandomNumbers, seed_of
from training.engine.schedules import warmup_cosine
from training.measure.arithmetic import Counted
from training.models import precision
from training.models.compiled import Compiled, StaticBatch
from training.models.features import WithFeatures
from training.models.timm_models import Normalized, choose_attention, convolutional
from training.settings.scripts import TrainingSettings


@dataclass
class TrainingState:
    """A model under training. `step` counts optimizer steps done, from 0."""

    model: Normalized
    """The bare model on its device."""
    trainable: nn.Module
    """Everything that the optimizer changes: the model, or a module that holds it and a projection of its features."""
    trained: nn.Module
    """The same, compiled and wrapped for data-parallel training: what a task calls."""
    average: ModelEmaV3 | None
    precision: precision.Precision
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler | None
    world: World
    compiled: bool
    settings: TrainingSettings
    random_numbers: RandomNumbers
    name: str = ""
    """The model's name if the run trains several; empty if it trains this one alone."""
    step: int = 0
    evaluated_at: int = 0
    """The step after which the last evaluation ran."""
    learning_rate: float = 0.0
    """Of the last step."""

    @property
    def evaluated(self) -> Normalized:
        """The model that is evaluated and exported: the average of the weights if one is kept."""
        return self.model if self.average is None else cast(Normalized, self.average.module)  # a copy of the model

    @property
    def counted(self) -> Counted:
        """As measure/arithmetic.py counts it."""
        return self.trainable, self.precision.name

    @functools.cached_property
    def evaluator(self) -> nn.Module:
        """The same, compiled if training is: what an evaluation calls."""
        return StaticBatch(self.evaluated, "the model", "compile") if self.compiled else self.evaluated

    def capture(self) -> dict[str, Any] | None:
        """Everything that all ranks share, on rank 0; None elsewhere. A collective."""
        optimizer = optimizers.state_for_everyone(self.optimizer, self.world)
        if not self.world.is_first:
            return None
        return {
            "step": self.step,
            "trainable": self.trainable.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def restore(self, captured: dict[str, Any]) -> None:
        """Restore a captured state; the world size may have changed."""
        self.step = captured["step"]
        self.trainable.load_state_dict(captured["trainable"])
        if self.average is not None:
            self.average.module.load_state_dict(captured["average"])
        optimizers.restore(self.optimizer, captured["optimizer"])
        self.schedule.load_state_dict(captured["schedule"])
        self._set_rates()
        if self.scaler is not None:
            self.scaler.load_state_dict(captured["scaler"])

    def _set_rates(self) -> None:
        """Give the next step this run's learning rates: the captured ones are those of the previous run, which may have been shorter."""
        factors = [factor(self.schedule.last_epoch) for factor in self.schedule.lr_lambdas]
        rates = [base * factor for base, factor in zip(self.schedule.base_lrs, factors)]
        for groups in optimizers.every_groups(self.optimizer):
            for group, rate in zip(groups, rates):
                group["lr"] = rate
        self.schedule._last_lr = rates

    def own(self) -> dict[str, torch.Tensor]:
        """What differs between ranks: random numbers, and buffers such as BatchNorm's running statistics of each rank's images."""
        modules = {"buffer": self.model, **({} if self.average is None else {"average": self.average.module})}
        # no constants, such as attention masks
        kept = {kind: module.state_dict().keys() for kind, module in modules.items()}
        buffers = {
            f"{kind} {name}": buffer
            for kind, module in modules.items()
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and name in kept[kind]
        }
        return {**self.random_numbers.state, **buffers}

    def restore_own(self, own: Mapping[str, torch.Tensor], same_world: bool) -> None:
        """Restore this rank's own values, after `restore`.

        Args:
            own: if the world size has changed, the means over ranks, like the BatchNorm statistics that an evaluation takes.
        """
        if not same_world:
            self.random_numbers.begin(seed_of(self.settings.seed, self.step, self.world.rank))
        for name, value in self.own().items():
            if name in own:  # a checkpoint from a CPU has no GPU's random numbers
                value.copy_(own[name])


def prepare(
    model: Normalized,
    settings: TrainingSettings,
    steps: int,
    world: World,
    *,
    beside: WithFeatures | None = None,
    name: str = "",
) -> TrainingState:
    """Prepare a model for N steps of training: on its device, in its memory format, compiled, distributed.

    Args:
        settings: the model's own, if a run trains several.
        beside: holds the model and a projection trained beside it, of which no average is kept. None: the model alone trains.
        name: as TrainingState has it.

    Raises:
        ValueError: the device lacks the precision, the optimizer or the compression that the settings ask for.
    """
    chosen = precision.choose(settings.precision, world.device)
    trainable: nn.Module = (beside or model).to(world.device)
    if settings.channels_last or (settings.channels_last is None and convolutional(model)):
        model.to(memory_format=torch.channels_last)
    choose_attention(model, chosen.dtype, world.device)
    average = None if settings.ema_decay is None else ModelEmaV3(model, settings.ema_decay)
    compiled = settings.compile is True
    trained = distribute(
        Compiled(trainable, "the model", "compile", graphs=settings.cuda_graphs is True) if compiled else trainable,
        world,
        static_graph=settings.static_graph,
        gradient_compression=settings.gradient_compression,
    )
    optimizer = optimizers.build(trainable, settings, world)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, steps, settings.warmup_fraction)
    )
    # dropout differs between ranks
    random_numbers = RandomNumbers(settings.seed + 1 + world.rank, world.device)
    return TrainingState(
        model=model,
        trainable=trainable,
        trained=trained,
        average=average,
        precision=chosen,
        optimizer=optimizer,
        schedule=schedule,
        scaler=chosen.scaler(),
        world=world,
        compiled=compiled,
        settings=settings,
        random_numbers=random_numbers,
        name=name,
    )
