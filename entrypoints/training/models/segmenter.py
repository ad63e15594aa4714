"""Segmentation models: a timm encoder, and a decoder that merges its scales from coarse to fine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.models import timm_models

FINEST_STRIDE = 4
"""Finer encoder features are not used: they are the largest and least semantic (https://arxiv.org/abs/1612.03144, section 3)."""

OF_FEATURES = ("out_indices", "feature_cls")
"""Keyword arguments that timm.create_model takes only with features_only."""

CHANNELS_PER_GROUP = 4
"""Of the group normalisation: 32 groups for 128 channels, as in Panoptic FPN."""


class Segmenter(nn.Module):
    """An encoder with the semantic branch of Panoptic FPN (https://arxiv.org/abs/1901.02446, section 3.1).

    Smaller in one respect: each scale passes one 3 × 3 convolution before it is enlarged, not one per doubling. The
    decoder's normalisation looks at one image at a time, so it does not depend on how many images a process gets.

    Takes normalised images (batch, channels, height, width), gives logits (batch, classes, height, width); without `upsamples`,
    on the grid of the finest features that are used (batch, classes, rows, columns).
    """

    def __init__(
        self,
        encoder: timm_models.TimmModel,
        classes: int,
        channels: int,
        *,
        upsamples: bool = True,
        undecayed: Collection[str] = (),
    ):
        """
        Args:
            encoder: made with features_only.
            undecayed: names of the encoder's weights that it exempts from weight decay.
        """
        super().__init__()
        self._undecayed = frozenset(f"encoder.{name}" for name in undecayed)
        self.encoder, self.upsamples = encoder, upsamples
        strides, widths = encoder.feature_info.reduction(), encoder.feature_info.channels()
        self.used = [level for level, stride in enumerate(strides) if stride >= FINEST_STRIDE]
        self.channels_last = getattr(encoder, "output_fmt", None) == "NHWC"  # Swin and its kin
        self.lateral = nn.ModuleList(nn.Conv2d(widths[level], channels, 1) for level in self.used)
        self.smooth = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels),
                nn.ReLU(inplace=True),
            )
            for _ in self.used
        )
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoded(self.encoded(images), images.shape[-2:])

    def no_weight_decay(self) -> frozenset[str]:
        """Names of the weights exempt from weight decay, besides biases and normalisation weights, as timm's models report theirs."""
        return self._undecayed

    def encoded(self, images: torch.Tensor) -> list[torch.Tensor]:
        """The encoder's features (batch, channels, rows, columns), from fine to coarse."""
        features = self.encoder(images)
        return [features[level].permute(0, 3, 1, 2) if self.channels_last else features[level] for level in self.used]

    def decoded(self, levels: list[torch.Tensor], size: torch.Size) -> torch.Tensor:
        """The logits of images of this height and width from their features; as large as the images if it `upsamples`."""
        finest = levels[0].shape[-2:]
        merged = self.lateral[-1](levels[-1])
        total = _upsample(self.smooth[-1](merged), finest)
        for level, lateral, smooth in reversed(list(zip(levels[:-1], self.lateral, self.smooth))):
            merged = lateral(level) + F.interpolate(merged, size=level.shape[-2:], mode="nearest")
            total = total + _upsample(smooth(merged), finest)
        logits: torch.Tensor = self.classifier(total)
        return _upsample(logits, size) if self.upsamples else logits


def build(
    name: str,
    options: Mapping[str, Any],
    classes: int,
    *,
    decoder_channels: int,
    pretrained: bool = False,
    upsamples: bool = True,
) -> timm_models.Normalized:
    """A segmenter for N classes.

    Args:
        name: the encoder, for example resnet50.
        options: more keyword arguments for timm.create_model.
        classes: logits per pixel.
        decoder_channels: a multiple of 4.
        pretrained: start the encoder from timm's published weights.
        upsamples: gives logits as large as the images; else on the grid of its finest features.

    Raises:
        ValueError: as `timm_models.create`, or all features of the encoder have one scale.
    """
    encoder = timm_models.create(name, options, features_only=True, pretrained=pretrained)
    strides = encoder.feature_info.reduction()
    if len(set(strides)) == 1:
        raise ValueError(
            f"all features of {name} are {strides[0]} times smaller than the image: take an encoder that downsamples in stages, "
            "such as resnet50, mobilenetv3_large_100 or convnext_tiny"
        )
    undecayed = _undecayed(name, options, encoder)
    model = Segmenter(encoder, classes, decoder_channels, upsamples=upsamples, undecayed=undecayed)
    return timm_models.normalize(model, encoder.pretrained_cfg, options)


def _undecayed(name: str, options: Mapping[str, Any], encoder: nn.Module) -> set[str]:
    """Names of an encoder's weights that its model exempts from weight decay, such as Swin's relative_position_bias_table.

    timm's models report them, but what timm makes of them with features_only does not. So the whole model is asked, on the meta device,
    where its weights take no memory.
    """
    plain = {key: value for key, value in options.items() if key not in OF_FEATURES}
    with torch.device("meta"):
        exempt = timm_models.exempt_from_decay(timm_models.create(name, plain))
    flat = {_flat(one) for one in exempt}
    return {one for one, _ in encoder.named_parameters() if _flat(one) in flat}


def _flat(name: str) -> str:
    """A weight's name in a form common to a timm model and the three kinds of modules that give its features: FeatureListNet writes
    layers_0 for layers.0, and the others prepend `model.` or `body.`."""
    return name.removeprefix("model.").removeprefix("body.").replace(".", "_")


def _upsample(features: torch.Tensor, size: torch.Size) -> torch.Tensor:
    return F.interpolate(features, size=size, mode="bilinear", align_corners=False)
