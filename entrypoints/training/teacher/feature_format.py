"""How a record of a label bank holds a teacher's features. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from training.teacher.bits import CODE_BITS

FeaturePrecision = Literal["fp16", "int8", "int4"]

LEVEL, SHAPE, PRECISION = "feature level", "feature shape", "feature precision"
"""Entries of a manifest's `logits of`; absent if no features are kept."""


@dataclass(frozen=True)
class FeatureFormat:
    """The features of one view of one image: one vector, or one per place, little-endian.

    int8 and int4 store a number as its distance from its vector's largest one, in steps of the vector's scale: the widest distance over
    255 or 15. Half of the numbers of a network's last layer may be 0, with others around it: a code that starts at the smallest or
    largest number wastes no step on either.
    """

    level: str
    """pooled or tokens, as training.models.features gives them."""
    shape: tuple[int, ...]
    """(width,), or (rows, columns, width)."""
    precision: FeaturePrecision

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> FeatureFormat | None:
        """A bank's feature format, from its manifest's `logits of`. None: it keeps no features."""
        return cls(identity[LEVEL], tuple(identity[SHAPE]), identity[PRECISION]) if LEVEL in identity else None

    def identity(self) -> dict[str, Any]:
        """Entries of a manifest's `logits of` that describe them."""
        return {LEVEL: self.level, SHAPE: [*self.shape], PRECISION: self.precision}

    def about(self) -> str:
        """Summary of what is kept, for messages."""
        places = f"{self.shape[0]} × {self.shape[1]} × " if len(self.shape) == 3 else ""
        return f"{self.level} features of {places}{self.width:,} numbers in {self.precision}"

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.shape[-1]

    @property
    def vectors(self) -> int:
        """Vectors per image."""
        return math.prod(self.shape[:-1])

    @property
    def code_bits(self) -> int | None:
        """Bits of a number's code. None: numbers are kept as fp16."""
        return CODE_BITS.get(self.precision)

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """A record's fields. A vector's codes take a whole number of bytes."""
        if self.code_bits is None:
            return [("features", "<f2", (self.vectors, self.width))]
        codes, each = -(-self.width * self.code_bits // 8), (self.vectors,)
        return [("feature_largest", "<f2", each), ("feature_scale", "<f2", each), ("features", "u1", (*each, codes))]

    @property
    def size(self) -> int:
        """Bytes of the fields."""
        return np.dtype(self.fields).itemsize

    def require_finite(self, fields: np.ndarray) -> None:
        """
        Raises:
            ValueError: a number of a record's fields is not finite.
        """
        numbers = [name for name, kind, _ in self.fields if kind == "<f2"]
        if not all(np.isfinite(fields[name]).all() for name in numbers):
            raise ValueError(
                "the teacher gave features that are not finite, or beyond the 65504 that fp16 holds: set teacher_precision to bf16 or "
                "fp32, or, if they are finite, features to null or teacher_cache to null"
            )

    def decode(self, fields: np.ndarray) -> np.ndarray:
        """The features in records, float32 (images, *shape)."""
        if self.code_bits is None:
            numbers = fields["features"].astype(np.float32)
        else:
            codes = fields["features"]
            if self.code_bits == 4:
                codes = np.stack([codes & 15, codes >> 4], axis=3).reshape(*codes.shape[:2], -1)[..., : self.width]
            largest, scale = (fields[f"feature_{name}"].astype(np.float32)[..., None] for name in ("largest", "scale"))
            numbers = largest - scale * codes.astype(np.float32)
        return np.asarray(numbers.reshape(len(fields), *self.shape))
