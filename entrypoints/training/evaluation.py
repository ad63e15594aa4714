"""Accuracy on held-out images, of images or of pixels, exact at any number of processes."""

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


@torch.no_grad()
def evaluate_pixels(
    model: nn.Module, loader: DataLoader, world: World, *, classes: int, ignore_index: int
) -> dict[str, float]:
    """Mean IoU, accuracy and mean cross-entropy over all ranks' pixels; every pixel that is not ignored counts once.

    Args:
        model: takes uint8 images (batch, channels, height, width), gives logits (batch, classes, height, width). Not a DDP
            wrapper: ranks may have different numbers of batches.
        loader: this rank's share: images, and for each its mask (height, width) in its own size, to which the logits are
            scaled, so that the numbers do not depend on the size that the model sees.

    Returns:
        validation_miou and validation_pixel_accuracy in 0…1, validation_loss in nats, the same on every rank.

    Raises:
        ValueError: no pixel of any mask is labelled.
    """
    training = model.training
    model.eval()
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=world.device)
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    for images, masks in loader:
        for logits, mask in zip(model(images.to(world.device)).float(), masks):
            mask = mask.to(world.device).long()
            logits = F.interpolate(logits[None], size=mask.shape, mode="bilinear", align_corners=False)
            loss += F.cross_entropy(logits, mask[None], ignore_index=ignore_index, reduction="sum")
            labelled = mask != ignore_index
            pairs = mask[labelled] * classes + logits[0].argmax(0)[labelled]
            confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    model.train(training)
    confusion, loss = world.total(confusion), world.total(loss)
    pixels = confusion.sum().item()
    if pixels == 0:
        raise ValueError(
            f"every pixel of the validation masks is ignored ({ignore_index}): there is nothing to measure"
        )
    return {
        "validation_miou": mean_iou(confusion, ignore_index),
        "validation_pixel_accuracy": confusion.diagonal().sum().item() / pixels,
        "validation_loss": loss.item() / pixels,
    }


def mean_iou(confusion: torch.Tensor, ignore_index: int) -> float:
    """Intersection over union, TP / (TP + FP + FN), mean over the classes that occur in a label or in a prediction.

    The measure of PASCAL VOC (Everingham et al. 2015, https://doi.org/10.1007/s11263-014-0733-5, section 4.1.3).

    Args:
        confusion: (classes, classes), pixels by label and prediction.
        ignore_index: a class of this number is left out.
    """
    intersection = confusion.diagonal().double()
    union = confusion.sum(0) + confusion.sum(1) - intersection
    counted = union > 0
    counted[ignore_index : ignore_index + 1] = False
    return (intersection[counted] / union[counted]).mean().item()
