"""The settings of what a student learns of its teacher's features. Standard library only, as all settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.settings import limits, require, setting


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """How a student learns its teacher's features."""

    weight: float = setting(1.0, above=0)
    """Weight of the features' part of the loss, beside labels and logits."""
    loss: Literal["cosine", "smooth_l1", "relational"] = "cosine"
    """How features are compared. cosine: by direction (https://arxiv.org/abs/2312.06709). smooth_l1: by smooth L1 with the teacher's
    whitened features (https://arxiv.org/abs/2205.14141). Both first project the student's features linearly; the projection trains with the
    student and is not exported. relational: by distances and angles between the images of a micro-batch, without a projection
    (https://arxiv.org/abs/1904.05068)."""
    level: Literal["pooled", "tokens"] = "pooled"
    """pooled: one vector per image, from before the classifier. tokens: one vector per position of the last feature map or per patch of a
    ViT; the teacher's grid is scaled to the student's. Segmentation uses the encoder's coarsest scale."""

    @property
    def least_images(self) -> int:
        """With which there is something to compare: an angle takes three."""
        return 3 if self.loss == "relational" else 1

    def __post_init__(self) -> None:
        pooled = self.loss != "relational" or self.level == "pooled"
        require(*limits(self), ("level", pooled, "pooled with loss relational"))
