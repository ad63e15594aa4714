"""Segmentation as a task of the training loop: a model that learns each pixel's class from masks, and from a teacher of pixels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from training.data.batches import MaskedBatch, TrainingBatches
from training.distributed.world import World
from training.measure.timeline import Timeline
from training.settings.segmentation import SegmentationSettings
from training.tasks.features import logits_and_features, untaught, with_features
from training.tasks.losses import dice_loss, dice_sums, pixel_cross_entropy, temperature_kl
from training.teacher.frozen import Teacher


class Segmentation:
    """`hard_label_weight` × (cross-entropy + `dice_weight` × Dice) of the masks + `teacher_weight` × temperature KL with a teacher
    + `features.weight` × the loss of its encoder's features.

    Each labelled pixel that the processes see at once weighs the same in the cross-entropy, however unevenly the others lie, and
    the Dice loss is that of all these pixels together. So the gradients are the same at any number of processes; they do depend
    on how many parts a batch is accumulated from, because a part knows nothing of the others.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: Teacher | None,
        settings: SegmentationSettings,
        world: World,
        timeline: Timeline,
    ):
        """
        Args:
            model: as TrainingState.trained has it; it gives features too where `settings.features` are learned.
            teacher: gives logits for each pixel, on the model's device. None: masks alone.
        """
        self.model, self.teacher, self.settings = model, teacher, settings
        self.world, self.timeline = world, timeline

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Nothing changes between epochs."""

    def __call__(self, batch: MaskedBatch) -> Iterator[dict[str, torch.Tensor]]:
        """The losses of a micro-batch on the model's device; scalars, in nats but for the Dice loss. A collective."""
        yield self._losses(batch)

    def _losses(self, batch: MaskedBatch) -> dict[str, torch.Tensor]:
        settings, phase = self.settings, self.timeline.phase
        masks = batch.masks.long()
        labelled = self.world.total((masks != settings.ignore_index).sum().double()) / self.world.size
        target = taught = None
        if self.teacher is not None:
            with phase("teacher_forward"):
                if settings.features is None:
                    target = self.teacher(batch.images)
                else:
                    target, taught = self.teacher.with_features(batch.images)
        with phase("student_forward"):
            logits, features = logits_and_features(self.model(batch.images))
        with phase("loss"):
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


def _of_all_ranks(own: torch.Tensor, world: World) -> torch.Tensor:
    """The sum over all ranks, through which each has `world.size` times its own gradient: DDP then averages what should be a sum."""
    everyones = world.total(own.detach().clone())
    return everyones + world.size * (own - own.detach())
