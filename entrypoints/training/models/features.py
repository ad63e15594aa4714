"""A model's features and logits from one forward pass, and the projection of a student's features to its teacher's width."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from training.models import timm_models
from training.models.segmenter import Segmenter
from training.models.timm_models import Normalized

Level = Literal["pooled", "tokens"]
"""pooled: one vector per image, as the classifier sees it. tokens: one per place in the image, without class and register tokens."""


class WithFeatures(nn.Module):
    """A model that also returns its features, optionally through a projection.

    This module trains if features are learned. The projection belongs to it, and not to the model that is evaluated and
    exported.
    """

    def __init__(self, model: Normalized, level: Level, projection: nn.Module | None = None):
        """
        Args:
            projection: of the features' last dimension. None: as they are.

        Raises:
            ValueError: the model does not separate its features from its classifier.
        """
        super().__init__()
        inner = model.model
        if not isinstance(inner, Segmenter) and not (
            hasattr(inner, "forward_features") and hasattr(inner, "forward_head")
        ):
            raise ValueError(
                f"{type(inner).__name__} lacks the forward_features and forward_head of timm's models: take another model, or "
                "features: null"
            )
        self.model, self.level, self.projection = model, level, projection

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images as Normalized takes them -> its logits, and features (batch, width) or (batch, rows, columns, width).

        Raises:
            ValueError: `level` is tokens, and the model's features are no grid.
        """
        logits, features = _logits_and_features(self.model.model, self.model.normalized(images), self.level)
        return logits, features if self.projection is None else self.projection(features)

    def feature_shape(self, image: torch.Tensor) -> torch.Size:
        """The shape of an image's features: (width,) or (rows, columns, width). The model stays unchanged.

        Args:
            image: (1, channels, height, width), on the model's device.
        """
        modes = [(module, module.training) for module in self.modules()]
        try:
            with torch.no_grad():
                _, features = self.eval()(image)
                return torch.Size(features.shape[1:])
        finally:
            for module, training in modes:
                module.training = training


def projecting(model: Normalized, level: Level, width: int, image: torch.Tensor) -> WithFeatures:
    """A student with a new linear projection of its features to its teacher's width.

    It is used even if both are equally wide: nothing says that their dimensions mean the same.

    Args:
        model: on the CPU.
        width: of the teacher's features.
        image: uint8 (1, channels, height, width).
    """
    own = WithFeatures(model, level).feature_shape(image.cpu())[-1]
    return WithFeatures(model, level, nn.Linear(own, width))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups, as timm_models gives them: the model's, and those of its projection."""
    if not isinstance(module, WithFeatures):
        return timm_models.parameter_groups(module, weight_decay)
    parts = [part for part in (module.model, module.projection) if part is not None]
    return [group for part in parts for group in timm_models.parameter_groups(part, weight_decay)]


def _logits_and_features(model: Any, pixels: torch.Tensor, level: Level) -> tuple[torch.Tensor, torch.Tensor]:
    """Both from a timm classifier, or from a Segmenter, whose features are its encoder's coarsest."""
    if isinstance(model, Segmenter):
        levels = model.encoded(pixels)
        tokens = levels[-1].permute(0, 2, 3, 1)
        return model.decoded(levels, pixels.shape[-2:]), tokens.mean((1, 2)) if level == "pooled" else tokens
    found = model.forward_features(pixels)
    features = _grid(model, found) if level == "tokens" else model.forward_head(found, pre_logits=True)
    return model.forward_head(found), features


def _grid(model: Any, features: Any) -> torch.Tensor:
    """A timm model's forward_features output as (batch, rows, columns, width): feature maps in either order, or tokens.

    Raises:
        ValueError: it is neither; or the tokens are no square grid, as those of a classifier's square images are.
    """
    name, width = type(model).__name__, model.num_features
    shape: Any = type(features).__name__
    if isinstance(features, torch.Tensor):
        shape = tuple(features.shape)
        if features.ndim == 4 and getattr(model, "output_fmt", "NCHW") == "NHWC":
            return features
        if features.ndim == 4 and shape[1] == width:
            return features.permute(0, 2, 3, 1)
        if features.ndim == 3 and shape[2] == width:
            tokens = features[:, getattr(model, "num_prefix_tokens", 0) :]
            side = math.isqrt(tokens.shape[1])
            if side * side == tokens.shape[1]:
                return tokens.reshape(-1, side, side, width)
    raise ValueError(
        f"the features of {name} are not a grid of places ({shape}): set features.level to pooled, or take another model"
    )
