"""Segmentation task: a model learns each pixel's class from masks, and from a teacher of pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from training.data.batches import MaskedBatch, TrainingBatches
from training.data.loaders import Batches, Data
from training.data.masks import MaskedImages
from training.distributed.world import World
from training.engine.held_out_size import Forward, WholeImages
from training.engine.memory import example
from training.engine.state import TrainingState
from training.measure.timeline import Timeline
from training.runtime.environment import Environment
from training.settings.segmentation import PixelCacheSettings, SegmentationSettings
from training.tasks.distillation import open_bank
from training.tasks.evaluation import evaluate_pixels, evaluating, resized
from training.tasks.features import asked_of, kept_features, logits_and_features, untaught, with_features
from training.tasks.losses import dice_loss, dice_sums, pixel_cross_entropy, temperature_kl
from training.teacher import frozen
from training.teacher.cache import TeacherCache
from training.teacher.frozen import Teacher
from training.teacher.logit_records import Output
from training.teacher.pixel_records import PixelLayout


class Segmentation:
    """`hard_label_weight` × (cross-entropy + `dice_weight` × Dice) of the masks + `teacher_weight` × temperature KL with a teacher
    + `features.weight` × the loss of its encoder's features.

    Each labelled pixel that the processes see at once weighs the same in the cross-entropy, however unevenly labels are spread, and
    the Dice loss is that of all these pixels together. So the gradients are the same at any number of processes. They do depend
    on how many micro-batches a batch is accumulated from, because each knows nothing of the others.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: Teacher | None,
        settings: SegmentationSettings,
        world: World,
        timeline: Timeline,
        cache: TeacherCache | None = None,
    ):
        """
        Args:
            model: `TrainingState.trained`; it also returns features if `settings.features` are learned.
            teacher: gives logits for each pixel or on a grid of its own, on the model's device. None: masks alone.
            cache: keeps the teacher's answers; None: the teacher runs on every step.
        """
        self.model, self.teacher, self.settings, self.cache = model, teacher, settings, cache
        self.world, self.timeline = world, timeline

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Check whether the cache holds all that all ranks draw in this epoch; if so, move the teacher to the CPU. A collective."""
        if self.cache is not None:
            complete = self.cache.begin_epoch(batches.views_of(epoch), batches.own_indices(epoch))
            if complete and self.teacher is not None:
                self.teacher.to(torch.device("cpu"))

    def __call__(self, batch: MaskedBatch) -> Iterator[dict[str, torch.Tensor]]:
        """Losses of a micro-batch on the model's device; scalars, in nats except for the Dice loss. A collective."""
        yield self._losses(batch)

    def _losses(self, batch: MaskedBatch) -> dict[str, torch.Tensor]:
        settings, phase = self.settings, self.timeline.phase
        masks = batch.masks.long()
        counted = self.world.all_reduce_sum_async((masks != settings.ignore_index).sum().double())
        target = taught = None
        if self.teacher is not None:
            with phase("teacher_forward"):
                target, taught = self._target(batch)
        with phase("student_forward"):
            logits, features = logits_and_features(self.model(batch.images))
        with phase("loss"):
            labelled = counted() / self.world.size  # ranks wait for it only here
            losses, label_loss = {}, pixel_cross_entropy(logits, masks, settings.ignore_index, labelled)
            if settings.dice_weight:
                dice = dice_loss(_of_all_ranks(dice_sums(logits, masks, settings.ignore_index), self.world))
                losses = {"cross_entropy": label_loss, "dice_loss": dice}
                label_loss = label_loss + settings.dice_weight * dice
            if target is None:
                return {"loss": label_loss + untaught(features), **losses}
            loss, losses = settings.hard_label_weight * label_loss, {"label_loss": label_loss, **losses}
            if settings.teacher_weight > 0:
                losses["teacher_loss"] = temperature_kl(logits, target, settings.temperature)
                loss = loss + settings.teacher_weight * losses["teacher_loss"]
            return {**losses, **with_features(loss, features, taught, settings)}

    def _target(self, batch: MaskedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The teacher's logits for each pixel, float32 (batch, classes, height, width), and its features if they are learned."""
        answers = self._ask(batch.images) if self.cache is None else self.cache.answers(batch, self._ask)
        logits, features = logits_and_features(answers)
        return upsampled(logits, batch.images), features

    def _ask(self, images: torch.Tensor) -> Output:
        assert self.teacher is not None
        self.timeline.asks(len(images))
        return asked_of(self.teacher.to(images.device), self.settings)(images)


def upsampled(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Logits (batch, classes, rows, columns), resized bilinearly to the height and width of their images, as in Segmenter."""
    return logits if logits.shape[2:] == images.shape[2:] else resized(logits, images.shape[2:])


def pixel_layout(
    settings: SegmentationSettings, kept: PixelCacheSettings, teacher: Teacher, image: torch.Tensor
) -> PixelLayout:
    """The layout in which a label bank keeps a teacher's answers.

    Args:
        teacher: its logits are not upsampled.
        image: uint8 (1, channels, height, width), on the teacher's device.

    Raises:
        ValueError: the models of an ensemble answer on different grids.
    """
    grids = {member.name: tuple(member(image).shape[2:]) for member in teacher.eager().members}
    if len({*grids.values()}) > 1:
        found = ", ".join(f"{name} {rows} × {columns}" for name, (rows, columns) in grids.items())
        raise ValueError(
            f"the teachers' grids differ ({found}), but teacher_cache keeps their mean logits on one grid: give one teacher, or several "
            "with similar encoders, or set teacher_cache to null"
        )
    [(rows, columns)] = {*grids.values()}
    learned = settings.features
    features = None if learned is None else kept_features(learned, kept.feature_precision, teacher, image)
    return PixelLayout(rows, columns, settings.classes, min(kept.top_k, settings.classes - 1), kept.precision, features)


def load_teacher(
    settings: SegmentationSettings, environment: Environment, classes: Sequence[str], channels: int
) -> Teacher:
    """The teacher in its channel, on the CPU. With teacher_cache its logits stay on its own grid, as the cache keeps them.

    Raises:
        ValueError: as frozen.load.
    """
    return frozen.load(
        environment.channel("teacher"),
        classes,
        channels=channels,
        image_size=settings.image_size,
        precision=settings.teacher_number_format,
        compile=settings.compile_teacher is True,
        cuda_graphs=settings.cuda_graphs is True,
        pixels=True,
        upsampled=settings.teacher_cache is None,
        features=settings.features.level if settings.features else None,
    )


def open_cache(
    settings: SegmentationSettings,
    teacher: Teacher,
    data: Data[MaskedImages, MaskedImages],
    environment: Environment,
    world: World,
) -> TeacherCache | None:
    """The cache that the settings ask for, in its folder. A collective.

    Raises:
        ValueError: as `open_bank` and `pixel_layout`.
    """
    kept = settings.teacher_cache
    if kept is None:
        return None
    layout = pixel_layout(settings, kept, teacher, example(data, world.device))
    return open_bank(settings, kept, layout, teacher, data, environment, world)


def measured(
    teacher: Teacher, loader: Batches, settings: SegmentationSettings, classes: Sequence[str], world: World
) -> dict[str, Any]:
    """Metrics of `evaluate_pixels` for a teacher, whose logits may be on a grid of its own."""
    of_pixels = partial(_of_pixels, teacher)
    return evaluate_pixels(of_pixels, loader, world, classes=classes, ignore_index=settings.ignore_index)


def whole_images(
    settings: SegmentationSettings,
    image: torch.Tensor,
    *,
    state: TrainingState | None = None,
    teacher: Teacher | None = None,
) -> WholeImages | None:
    """The held-out images if they are larger than what training sees of an image; None: they are not.

    Args:
        image: a training image on the models' device: uint8 (1, channels, height, width).
        state, teacher: what is evaluated on them.
    """
    if math.prod(settings.crop_size or settings.image_size) >= math.prod(settings.image_size):
        return None
    evaluated: list[Forward] = []
    if state is not None:
        evaluated.append(partial(_evaluated, state))
    if teacher is not None:
        evaluated.append(partial(_of_pixels, teacher.eager()))
    assert settings.crop_size is not None, "it is smaller"
    return WholeImages(image.new_zeros(1, image.shape[1], *settings.image_size), settings.crop_size, evaluated)


def _evaluated(state: TrainingState, images: torch.Tensor) -> torch.Tensor:
    """The logits of the model that is evaluated, computed as in an evaluation."""
    with evaluating(state.evaluated), state.precision.autocast():
        logits: torch.Tensor = state.evaluated(images)
    return logits


def _of_pixels(teacher: Teacher, images: torch.Tensor) -> torch.Tensor:
    """A teacher's logits for each pixel of the images."""
    return upsampled(teacher(images), images)


def _of_all_ranks(own: torch.Tensor, world: World) -> torch.Tensor:
    """The sum over all ranks. Its gradient is `world.size` times this rank's own, because DDP averages what should be a sum."""
    everyones = world.all_reduce_sum(own.detach().clone())
    return everyones + world.size * (own - own.detach())
