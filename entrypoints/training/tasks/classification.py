"""Classification task: cross-entropy with the labels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from training.data.batches import LabelledBatch, TrainingBatches
from training.measure.timeline import Timeline
from training.tasks.losses import label_cross_entropy


class Classification:
    """Cross-entropy with the labels alone.

    Args:
        model: `TrainingState.trained`.
        label_smoothing: weight of the uniform distribution.
    """

    def __init__(self, model: nn.Module, label_smoothing: float, timeline: Timeline):
        self.model, self.label_smoothing, self.timeline = model, label_smoothing, timeline

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Nothing changes between epochs."""

    def __call__(self, batch: LabelledBatch) -> Iterator[dict[str, torch.Tensor]]:
        """The loss of a micro-batch on the model's device, in nats."""
        yield self._losses(batch)

    def _losses(self, batch: LabelledBatch) -> dict[str, torch.Tensor]:
        with self.timeline.phase("student_forward"):
            logits = self.model(batch.images)
        with self.timeline.phase("loss"):
            return {
                "loss": label_cross_entropy(
                    logits, batch.labels, batch.labels_b, batch.lam, smoothing=self.label_smoothing
                )
            }
