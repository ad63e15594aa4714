"""Accuracy on held-out images, exact at any number of processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from training.distributed import World


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, world: World) -> dict[str, float]:
    """Top-1 accuracy and mean cross-entropy over all ranks' shares; every image counts once.

    Args:
        model: takes uint8 images (batch, channels, height, width), gives logits (batch, classes). Not a DDP wrapper:
            ranks may have different numbers of batches.
        loader: this rank's share.

    Returns:
        validation_accuracy in 0…1, validation_loss in nats, the same on every rank.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # correct, loss, images
    for images, labels in loader:
        images, labels = images.to(world.device), labels.to(world.device)
        logits = model(images).float()
        sums += torch.tensor(
            [
                (logits.argmax(1) == labels).sum().item(),
                F.cross_entropy(logits, labels, reduction="sum").item(),
                len(labels),
            ],
            dtype=torch.float64,
        )
    model.train(training)
    correct, loss, count = world.total(sums.to(world.device)).tolist()
    return {"validation_accuracy": correct / count, "validation_loss": loss / count}
