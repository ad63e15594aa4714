"""A teacher's features on their device as bytes of a label bank's records, and back."""

from __future__ import annotations

import torch

from training.teacher.feature_format import FeatureFormat

LEAST_SCALE = 2.0**-24
"""The least number above 0 of fp16; where all numbers of a vector are equal the scale is 0, and their codes are 0 over this."""


def pack_features(kept: FeatureFormat, features: torch.Tensor) -> torch.Tensor:
    """Features (batch, *kept.shape) of any type -> the content of their fields, uint8 (batch, kept.size), on the same device."""
    assert features.shape[1:] == kept.shape
    vectors = features.detach().float().reshape(-1, kept.width)
    if kept.code_bits is None:
        return _bytes_of(vectors.half()).reshape(len(features), -1)
    steps = 2**kept.code_bits - 1
    largest = vectors.amax(1, keepdim=True).half()
    distance = largest.float() - vectors
    scale = (distance.amax(1, keepdim=True) / steps).half()
    codes = (distance / scale.float().clamp_min(LEAST_SCALE)).round().clamp(0, steps).to(torch.uint8)
    if kept.code_bits == 4:
        codes = torch.nn.functional.pad(codes, (0, kept.width % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    parts = (_bytes_of(largest), _bytes_of(scale), codes)
    return torch.cat([part.reshape(len(features), -1) for part in parts], dim=1)


def unpack_features(kept: FeatureFormat, content: torch.Tensor) -> torch.Tensor:
    """What `pack_features` gave, or the same bytes of records -> the features that are kept, float32 (batch, *kept.shape)."""
    shape = (len(content), *kept.shape)
    if kept.code_bits is None:
        return _from_bytes(content).float().reshape(shape)
    each = 2 * kept.vectors
    largest, scale = (
        _from_bytes(part).float().reshape(-1, 1) for part in (content[:, :each], content[:, each : 2 * each])
    )
    codes = content[:, 2 * each :].reshape(len(content) * kept.vectors, -1)
    if kept.code_bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, : kept.width]
    return (largest - scale * codes.float()).reshape(shape)


def _bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _from_bytes(content: torch.Tensor) -> torch.Tensor:
    """uint8 (batch, 2 × N) -> fp16 (batch, N)."""
    return content.clone(memory_format=torch.contiguous_format).view(torch.float16)
