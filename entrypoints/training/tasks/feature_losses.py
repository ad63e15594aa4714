"""Losses between a student's features and its teacher's, each with its paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.settings.features import FeatureSettings

BETA = 2.0
"""Of the smooth L1 loss: where it turns from quadratic to linear. As in Wei et al. 2022, equation 2."""

ANGLE_WEIGHT = 2.0
"""Of the relational loss's angles; that of its distances is 1. The ratio of Park et al. 2019, section 4.1 (25 and 50 there)."""


def feature_loss(student: torch.Tensor, teacher: torch.Tensor, settings: FeatureSettings) -> torch.Tensor:
    """The features' part of the loss, by `settings.loss`.

    If both have a feature for each place of an image, the teacher's grid is resized to the student's (bilinear, antialiased):
    both cover the whole view, so that their places correspond. The teacher's features need no gradient.

    Args:
        student: (batch, width), or (batch, rows, columns, width), of any floating-point type; as wide as the teacher's, except
            for the relational loss.
        teacher: the same, with rows and columns of its own.

    Returns:
        A scalar without a unit, at least float32, even under autocast.
    """
    with torch.autocast(student.device.type, enabled=False):  # it would multiply matrices in lower precision
        student, teacher = _exact(student), _exact(teacher)
        if student.ndim == 4 and student.shape[1:3] != teacher.shape[1:3]:
            maps, size = teacher.permute(0, 3, 1, 2), student.shape[1:3]
            teacher = F.interpolate(maps, size, mode="bilinear", align_corners=False, antialias=True).permute(
                0, 2, 3, 1
            )
        if settings.loss == "cosine":
            return cosine_distance(student, teacher)
        if settings.loss == "smooth_l1":
            return whitened_smooth_l1(student, teacher)
        if settings.loss == "relational":
            return relational_loss(student, teacher)
    raise ValueError(f"loss {settings.loss!r} of features is unknown: cosine, smooth_l1 or relational")


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 - cos of the angle between a student's feature and its teacher's, mean over images and places.

    Ranzinger et al. 2024, https://arxiv.org/abs/2312.06709, section 3.3: features match in direction, whatever their size.

    Args:
        student, teacher: (batch, width), or (batch, rows, columns, width).

    Returns:
        A scalar from 0 to 2.
    """
    return 1 - F.cosine_similarity(student, teacher, dim=-1).mean()


def whitened_smooth_l1(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance to the teacher's whitened features, mean over images, places and dimensions.

    Wei et al. 2022, https://arxiv.org/abs/2205.14141, section 3: d² / 2β where |d| is at most β = 2, else |d| - β / 2; d is the
    difference to the teacher's features after a layer normalisation without weights. So feature magnitudes, which differ by orders
    of magnitude between models, do not matter, and one weight suits all.

    Args:
        student, teacher: (batch, width), or (batch, rows, columns, width).
    """
    return F.smooth_l1_loss(student, F.layer_norm(teacher, teacher.shape[-1:]), beta=BETA)


def relational_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Relational knowledge distillation: the distances between images, and the angles between every three.

    Park et al. 2019, https://arxiv.org/abs/1904.05068, section 3.2: a distance is divided by the mean over all pairs (equation 5), an
    angle is the cosine at one of three images (equation 8), and the Huber loss with δ = 1 (equation 7) compares the student's with the
    teacher's. It is the mean over all pairs and all triples of different images, as in the authors' code; the paper has their sum.
    Angles weigh twice as much. The images are those of one micro-batch: relations to others are not learned.

    Args:
        student: (batch, width).
        teacher: (batch, its own width).

    Returns:
        A scalar; 0 for a single image.
    """
    (lengths, cosines), (taught_lengths, taught_cosines) = _relations(student), _relations(teacher)
    count = len(student)
    pairs, triples = max(1, count * (count - 1)), max(1, count * (count - 1) * (count - 2))
    # an image paired with itself, or twice in a triple, relates alike in both models: it adds 0 to a mean, and counts in it
    distances = F.smooth_l1_loss(lengths, taught_lengths) * (count**2 / pairs)
    angles = F.smooth_l1_loss(cosines, taught_cosines) * (count**3 / triples)
    return distances + ANGLE_WEIGHT * angles


def _relations(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, width) -> each pair's distance over the mean distance (batch, batch); at [j, i, k] the cosine at j of i, j and k."""
    differences = features[None] - features[:, None]  # [j, i] = i - j
    lengths: torch.Tensor = torch.linalg.vector_norm(differences, dim=2)
    directions = differences / _divisor(lengths)[..., None]
    count = len(features)
    mean = lengths.sum() / max(1, count * (count - 1))
    return lengths / _divisor(mean), directions @ directions.mT


def _divisor(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths to divide by: 1 between images with the same features, where a tiny divisor would give a huge gradient."""
    return torch.where(lengths > 0, lengths, 1)


def _exact(features: torch.Tensor) -> torch.Tensor:
    """In float32, if they are less precise."""
    return features.to(torch.promote_types(features.dtype, torch.float32))
