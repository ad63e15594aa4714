"""Accuracy on held-out data, per image or per pixel, exact at any number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.distributed.world import World
from training.runtime import accelerator, failure, metrics
from training.tasks.losses import temperature_kl

TOP = 5
"""k of the top-k accuracy, which is reported if there are more classes than that."""

VALUES_AT_ONCE = 2**24
"""Logits resized to a mask's size at once: 64 MiB of float32. Those of 150 classes and 8 megapixels would take 4.8 GiB."""

Autocast = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a model computes, as Precision.autocast does."""


@torch.no_grad()
def evaluate(
    model: Callable[[torch.Tensor], torch.Tensor],
    loader: Iterable[Any],
    world: World,
    *,
    autocast: Autocast = contextlib.nullcontext,
    teacher_logits: Sequence[torch.Tensor] | None = None,
    keep: list[torch.Tensor] | None = None,
) -> dict[str, float]:
    """A model's accuracy, loss and agreement with its teacher over all ranks' shares; every image counts once.

    Args:
        model: takes uint8 images (batch, channels, height, width), gives logits (batch, classes). Not a DDP wrapper:
            ranks may have different numbers of batches. An nn.Module's mode is restored afterwards.
        loader: this rank's share, in the same order every time; a batch without a readable image is None.
        teacher_logits: what the teacher's evaluation left in its `keep`.
        keep: takes the logits of every batch: fp16, on the CPU, shifted so that each image's largest is 0, where fp16 is finest.

    Returns:
        The same on every rank: validation_accuracy, validation_top5_accuracy (more than 5 classes only) in 0…1,
        validation_loss in nats. With `teacher_logits` also teacher_top1_agreement, the share of the images for which both
        models predict the same class; teacher_top5_agreement (more than 5 classes only), the share for which the teacher's
        class is among the student's first 5, as big_vision's `agree`
        (https://github.com/google-research/big_vision, evaluators/proj/distill/distance.py); and teacher_kl, the mean
        KL(teacher ‖ student) at temperature 1 in nats.

    Raises:
        ValueError: there are no images, because none could be read.
    """
    sums = torch.zeros(6, dtype=torch.float64, device=world.device)  # nothing waits for the device before the end
    images = ranked = 0
    with evaluating(model):
        for number, (pixels, labels) in enumerate(batch for batch in loader if batch is not None):
            failure.progress.enter("evaluate")
            pixels, labels = (values.to(world.device, non_blocking=True) for values in (pixels, labels))
            with autocast():
                logits = model(pixels)
            logits = logits.float()
            images += len(labels)
            ranked += len(labels) if logits.shape[1] > TOP else 0
            loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
            sums[:3] += torch.stack([*_right(logits, labels), loss])
            if teacher_logits is not None:
                teacher = teacher_logits[number].to(world.device, non_blocking=True).float()
                assert teacher.shape == logits.shape, "the loader's batches differ from those that the teacher got"
                kl = temperature_kl(logits, teacher, 1.0).double() * len(labels)
                sums[3:] += torch.stack([*_right(logits, teacher.argmax(1)), kl])
            if keep is not None:
                kept = (logits - logits.amax(1, keepdim=True)).half().cpu()
                keep.append(accelerator.pinned(kept, world.device))
    counted = torch.tensor([images, ranked], dtype=torch.float64, device=world.device)
    *totals, images, ranked = world.all_reduce_sum(torch.cat([sums, counted])).tolist()
    if not images:
        raise ValueError("none of the validation images can be read: the log and broken_images.txt name them")
    names: tuple[str, ...] = (metrics.ACCURACY.name, metrics.TOP5_ACCURACY.name, metrics.VALIDATION_LOSS.name)
    if teacher_logits is not None:
        names += (metrics.TEACHER_TOP1.name, metrics.TEACHER_TOP5.name, metrics.TEACHER_KL.name)
    return {name: total / images for name, total in zip(names, totals) if ranked or "top5" not in name}


@torch.no_grad()
def evaluate_pixels(
    model: Callable[[torch.Tensor], torch.Tensor],
    loader: Iterable[Any],
    world: World,
    *,
    classes: Sequence[str],
    ignore_index: int,
    autocast: Autocast = contextlib.nullcontext,
) -> dict[str, Any]:
    """IoU, accuracy and mean cross-entropy over all ranks' pixels; every pixel that is not ignored counts once.

    Args:
        model: takes uint8 images (batch, channels, height, width), gives logits (batch, classes, height, width). Not a DDP
            wrapper: ranks may have different numbers of batches.
        loader: this rank's share: images, each with its mask (height, width) at the mask's own size. Logits are resized to
            it, so that the numbers do not depend on the size that the model sees.
        classes: their names, in the order of the logits.

    Returns:
        The same on every rank: validation_miou and validation_pixel_accuracy in 0…1, validation_loss in nats; validation_iou
        by class name, None for a class that occurs in neither labels nor predictions; and validation_majority, the result of a
        model that gives every pixel the most frequent label: its class, miou and pixel_accuracy.

    Raises:
        ValueError: no mask can be read or has a labelled pixel.
    """
    count = len(classes)
    # the last counts the pixels that are ignored
    counts = torch.zeros(count**2 + 1, dtype=torch.int64, device=world.device)
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for images, masks in (batch for batch in loader if batch is not None):
            failure.progress.enter("evaluate")
            with autocast():
                batch = model(images.to(world.device, non_blocking=True))
            for logits, mask in zip(batch.float(), masks):
                mask = mask.to(world.device, non_blocking=True)
                for rows, scaled in bands(logits, mask.shape):
                    labels = mask[rows].long()
                    loss += F.cross_entropy(scaled[None], labels[None], ignore_index=ignore_index, reduction="sum")
                    # not mask indexing or bincount, which wait for the device to learn how many values there are
                    pairs = torch.where(labels == ignore_index, count**2, labels * count + scaled.argmax(0)).flatten()
                    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    totals, loss = world.all_reduce_sum(counts.double()), world.all_reduce_sum(loss)
    confusion = totals[:-1].view(count, count)
    pixels = confusion.sum().item()
    if pixels == 0:
        raise ValueError(
            f"every pixel of the readable validation masks is ignored ({ignore_index}): there is nothing to measure"
        )
    ious = class_ious(confusion, ignore_index)
    largest = int(confusion.sum(1).argmax())
    majority = torch.zeros_like(confusion)
    majority[:, largest] = confusion.sum(1)
    return {
        metrics.MIOU.name: ious.nanmean().item(),
        metrics.PIXEL_ACCURACY.name: confusion.diagonal().sum().item() / pixels,
        metrics.VALIDATION_LOSS.name: loss.item() / pixels,
        "validation_iou": {name: None if iou != iou else iou for name, iou in zip(classes, ious.tolist())},
        "validation_majority": {
            "class": classes[largest],
            "miou": class_ious(majority, ignore_index).nanmean().item(),
            "pixel_accuracy": confusion.sum(1).max().item() / pixels,
        },
    }


def class_ious(confusion: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Intersection over union of each class, TP / (TP + FP + FN): float64 (classes,).

    The measure of PASCAL VOC (Everingham et al. 2015, https://doi.org/10.1007/s11263-014-0733-5, section 4.1.3).

    Args:
        confusion: (classes, classes), pixels by label and prediction.
        ignore_index: the class with this number is NaN, as is one that occurs in neither labels nor predictions.
    """
    intersection = confusion.diagonal().double()
    ious = intersection / (confusion.sum(0) + confusion.sum(1) - intersection)  # 0 / 0 is NaN
    ious[ignore_index : ignore_index + 1] = torch.nan
    return ious


def describe_classes(found: Mapping[str, Any]) -> str:
    """The per-class results of `evaluate_pixels`, as a log line."""
    ious = ", ".join(f"{name} {'-' if iou is None else f'{iou:.4f}'}" for name, iou in found["validation_iou"].items())
    majority = found["validation_majority"]
    return f"IoU: {ious}; with {majority['class']} for every pixel the mean would be {majority['miou']:.4f}"


def resized(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Logits (batch, classes, height, width), resized bilinearly to another height and width."""
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def bands(logits: torch.Tensor, size: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
    """One image's logits (classes, height, width), resized like by `resized`, in bands of rows from top to bottom.

    A batch's memory is planned for the size that the model sees; a mask at its own size may be many times larger.

    Yields:
        The rows, and their logits (classes, rows, columns): VALUES_AT_ONCE of them at most, or one row.
    """
    height, width = size
    classes, given, columns = logits.shape
    rows = max(1, VALUES_AT_ONCE // (classes * max(width, columns)))
    if rows >= height:
        yield slice(0, height), resized(logits[None], size)[0]
        return
    # row centres as interpolate places them without align_corners; none lies above the first row's
    middles = ((torch.arange(height, device=logits.device) + 0.5) * (given / height) - 0.5).clamp(min=0)
    above = middles.long().clamp(max=given - 1)
    below, part = (above + 1).clamp(max=given - 1), (middles - above)[:, None]
    for first in range(0, height, rows):
        band = slice(first, min(first + rows, height))
        between = torch.lerp(logits[:, above[band]], logits[:, below[band]], part[band])
        yield band, resized(between[None], (between.shape[1], width))[0]


@contextlib.contextmanager
def evaluating(model: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Put a module into eval mode, and restore its mode afterwards; a teacher is no nn.Module and does so itself."""
    if not isinstance(model, nn.Module):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _right(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the wanted classes (batch,) have the largest logit, and how many one of the 5 largest; scalars."""
    first = logits.topk(min(TOP, logits.shape[1]), dim=1).indices == wanted[:, None]
    return (logits.argmax(1) == wanted).sum().double(), first.sum().double()
