"""timm models by name, with their own normalisation inside, so that every model can look at the same pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn


class Normalized(nn.Module):
    """A model that takes pixels as they are stored.

    Takes uint8 images (batch, channels, height, width), scales them to 0…1, applies the wrapped model's own mean and
    standard deviation, and returns its logits: (batch, classes), or (batch, classes, height, width).
    """

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1] != self.mean.shape[1]:  # broadcasting would make three channels of one without a word
            raise ValueError(
                f"a model for {self.mean.shape[1]} channels got images with {images.shape[1]}: set in_chans"
            )
        return self.model((images.float() / 255 - self.mean) / self.std)


def build(name: str, options: Mapping[str, Any], classes: int, *, pretrained: bool = False) -> Normalized:
    """A timm model for so many classes.

    Args:
        name: for example vit_small_patch16_224.
        options: more keyword arguments for timm.create_model.
        classes: outputs.
        pretrained: start from timm's published weights.

    Raises:
        ValueError: as `create`.
    """
    model = create(name, options, num_classes=classes, pretrained=pretrained)
    return normalize(model, model.pretrained_cfg, options)


def create(name: str, options: Mapping[str, Any], **more: Any) -> nn.Module:
    """A timm model by its name; `options` and `more` are keyword arguments for timm.create_model.

    Raises:
        ValueError: timm knows no such model, or the model takes no such option; the message names near ones.
    """
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise ValueError(
            f"timm {timm.__version__} knows no model {name}" + (f"; near: {', '.join(near)}" if near else "")
        )
    try:
        return timm.create_model(name, **more, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {dict(options)}: {error}") from error


def normalize(model: nn.Module, published: Mapping[str, Any], options: Mapping[str, Any]) -> Normalized:
    """A model with the mean and standard deviation of timm's published configuration, for the channels that `options` asks for."""
    channels = options.get("in_chans", 3)
    mean, std = ([*published[key]] for key in ("mean", "std"))
    if len(mean) != channels:  # timm's numbers are for three channels: one grey channel gets their average
        mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
    return Normalized(model, mean, std)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: weight decay for weights, none for biases, normalisation weights and the model's own exceptions."""
    inner = model.model if isinstance(model, Normalized) else model
    exceptions = inner.no_weight_decay() if hasattr(inner, "no_weight_decay") else ()
    return param_groups_weight_decay(inner, weight_decay, no_weight_decay_list=exceptions)
