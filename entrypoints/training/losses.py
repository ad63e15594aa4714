"""Losses, each a small function of logits with its paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def temperature_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The teacher's part of the distillation loss: T² KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch.

    Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531, section 2; the factor T² keeps its gradients on the
    scale of the label loss. `batchmean` divides by images, not by images × classes.

    Args:
        student_logits, teacher_logits: (batch, classes).
        temperature: T, above 0.

    Returns:
        A scalar, in nats.
    """
    student = F.log_softmax(student_logits.float() / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def label_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy with the labels, mean over the batch.

    Args:
        logits: (batch, classes).
        labels: (batch,), class numbers.
        smoothing: weight of the uniform distribution, https://arxiv.org/abs/1512.00567 section 7.

    Returns:
        A scalar, in nats.
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def pixel_cross_entropy(
    logits: torch.Tensor, masks: torch.Tensor, ignore_index: int, labelled: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross-entropy with a mask's classes: -1/n Σ log softmax(logits)[class], summed over the n pixels that are not ignored.

    Args:
        logits: (batch, classes, height, width).
        masks: (batch, height, width), class numbers or `ignore_index`, int64.
        labelled: n, a scalar. None: counted in `masks`. Processes that average their gradients give the mean of their
            counts, so that each pixel of the global batch weighs the same, however unevenly the ignored ones lie.

    Returns:
        A scalar, in nats; 0 with gradients of 0 where n is 0.
    """
    if labelled is None:
        labelled = (masks != ignore_index).sum()
    total = F.cross_entropy(logits.float(), masks, ignore_index=ignore_index, reduction="sum")
    return total / torch.where(labelled > 0, labelled, 1)
