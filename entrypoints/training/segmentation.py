"""Segmentation as a task of the training loop: cross-entropy of every labelled pixel."""

from __future__ import annotations

import torch
from torch import nn

from training.data.batches import MaskedBatch, TrainingBatches
from training.distributed import World
from training.losses import pixel_cross_entropy
from training.timeline import Timeline


class Segmentation:
    """Masks alone. Each labelled pixel that the processes see at once weighs the same, however unevenly the others lie.

    Args:
        model: as TrainingState.trained has it.
        ignore_index: the value of pixels without a label.
    """

    def __init__(self, model: nn.Module, ignore_index: int, world: World, timeline: Timeline):
        self.model, self.ignore_index, self.world, self.timeline = model, ignore_index, world, timeline

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Nothing changes between epochs."""

    def __call__(self, batch: MaskedBatch) -> dict[str, torch.Tensor]:
        """The loss of a micro-batch on the model's device, in nats. A collective."""
        masks = batch.masks.long()
        labelled = self.world.total((masks != self.ignore_index).sum()) / self.world.size
        with self.timeline.phase("student_forward"):
            logits = self.model(batch.images)
        with self.timeline.phase("loss"):
            return {"loss": pixel_cross_entropy(logits, masks, self.ignore_index, labelled)}
