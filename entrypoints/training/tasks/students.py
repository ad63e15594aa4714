"""The students of a run: each built from its own seed, prepared for training, and described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from training.distributed.world import World
from training.engine.delivery import Trained
from training.engine.state import TrainingState, prepare
from training.models import start, timm_models
from training.runtime.environment import Environment
from training.settings.distillation import DistillationSettings
from training.tasks.features import learner
from training.teacher.frozen import Teacher


class Student(NamedTuple):
    """A model that learns, and its settings."""

    model: nn.Module
    """`TrainingState.trained`, or its `trainable`."""
    settings: DistillationSettings
    """Its own."""


class Students:
    """All students of a run, in one order."""

    def __init__(
        self,
        each: Mapping[str, DistillationSettings],
        teacher: Teacher | None,
        classes: Sequence[str],
        environment: Environment,
        image: torch.Tensor,
        steps: int,
        world: World,
        log: Callable[[str], None],
    ):
        """
        Args:
            each: from `training.settings.entries.variants`.
            teacher: the one whose features they learn, if any.
            image: uint8 (1, channels, height, width), on the teacher's device.
            steps: optimizer steps of the run.

        Raises:
            ValueError: as `start.build`, `learner` and `prepare`.
        """
        self.settings, self.states = [*each.values()], list[TrainingState]()
        for name, own in each.items():
            torch.manual_seed(own.seed)  # its initial weights, and its projection's, do not depend on other students
            model = start.build(
                own.student, own.student_options, classes, own.pretrained, environment, image_size=own.image_size
            )
            called = f"{name}: {own.student}" if name else own.student
            log(f"student {called}: {timm_models.parameter_count(model):,} parameters, {len(classes)} classes")
            beside = learner(model, teacher, own, image)
            self.states.append(prepare(model, own, steps, world, beside=beside, name=name))

    @property
    def bare(self) -> list[Student]:
        """The students without a collective."""
        return [Student(state.trainable, own) for state, own in zip(self.states, self.settings)]

    @property
    def trained(self) -> list[Student]:
        """The students as they learn."""
        return [Student(state.trained, own) for state, own in zip(self.states, self.settings)]

    @property
    def delivered(self) -> list[Trained]:
        """The students as they are exported."""
        return [Trained(state, own.student, own.student_options) for state, own in zip(self.states, self.settings)]
