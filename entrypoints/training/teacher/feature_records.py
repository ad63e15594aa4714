"""Converts a teacher's features, on their device, to bytes of a label bank's records and back."""

from __future__ import annotations

import torch

from training.teacher.feature_format import FeatureFormat
from training.teacher.tensor_bits import bytes_of, fp16_of, pack_bits, unpack_bits

MIN_SCALE = 2.0**-24
"""The smallest positive fp16 number. If all numbers of a vector are equal, its scale is 0, and this as divisor gives codes of 0."""


def pack_features(kept: FeatureFormat, features: torch.Tensor) -> torch.Tensor:
    """Features (batch, *kept.shape) of any type -> the content of their fields, uint8 (batch, kept.size), on the same device."""
    assert features.shape[1:] == kept.shape
    vectors = features.detach().float().reshape(-1, kept.width)
    if kept.code_bits is None:
        return bytes_of(vectors.half()).reshape(len(features), -1)
    steps = 2**kept.code_bits - 1
    largest = vectors.amax(1, keepdim=True).half()
    distance = largest.float() - vectors
    scale = (distance.amax(1, keepdim=True) / steps).half()
    codes = (distance / scale.float().clamp_min(MIN_SCALE)).round().clamp(0, steps).to(torch.uint8)
    parts = (bytes_of(largest), bytes_of(scale), pack_bits(codes, kept.code_bits))
    return torch.cat([part.reshape(len(features), -1) for part in parts], dim=1)


def unpack_features(kept: FeatureFormat, content: torch.Tensor) -> torch.Tensor:
    """Output of `pack_features`, or the same bytes of records -> the features kept, float32 (batch, *kept.shape)."""
    shape = (len(content), *kept.shape)
    if kept.code_bits is None:
        return fp16_of(content).reshape(shape)
    each = 2 * kept.vectors
    largest, scale = (fp16_of(part).reshape(-1, 1) for part in (content[:, :each], content[:, each : 2 * each]))
    packed = content[:, 2 * each :].reshape(len(content) * kept.vectors, -1)
    codes = unpack_bits(packed, kept.width, kept.code_bits)
    return (largest - scale * codes.float()).reshape(shape)
