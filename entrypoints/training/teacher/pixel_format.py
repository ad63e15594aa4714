"""How a record of a label bank holds a teacher's answer for the pixels of an image. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from training.teacher.bits import CODE_BITS, unpacked_bits
from training.teacher.feature_format import FeatureFormat
from training.teacher.record_format import Field, Records

PixelPrecision = Literal["int8", "int4"]

GRID = "pixel grid"
"""The entry of a manifest's `logits of` that marks a bank of pixels: its rows and columns."""


@dataclass(frozen=True)
class PixelFormat(Records):
    """The logits of one view of one image at the teacher's own grid, before upsampling to its pixels.

    All classes' logits are kept at half the grid, as means of two by two places. At each place, the classes of the largest logits are kept
    in falling order, with each one's distance below the largest. The rest has a distance too: that of the logit which each remaining
    class would have if they shared their probability evenly. The coarse logits say how they share it. So edges are sharp and every class
    has its part: if a teacher is in doubt, an even rest moves the loss by a third, this one by a hundredth (docs/results/segmentation.md).

    A distance is widest × (code / steps)², with the record's widest distance and 255 or 15 steps: fine near 0, where classes compete, and
    coarse for classes out of the question. The largest logits themselves are not kept: no softmax sees them, and bilinear upsampling of
    logits keeps that so.
    """

    rows: int
    columns: int
    classes: int
    top_k: int
    """Logits kept per place, below `classes`; 0: the coarse ones alone."""
    precision: PixelPrecision
    """Of the distances."""
    features: FeatureFormat | None = None
    """Of the features kept beside the logits. None: there are none."""

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> PixelFormat:
        """The format of a bank's records, from its manifest's `logits of`."""
        rows, columns = identity[GRID]
        kept: tuple[int, int, PixelPrecision] = (identity["classes"], identity["top_k"], identity["precision"])
        return cls(rows, columns, *kept, FeatureFormat.of(identity))

    def identity(self) -> dict[str, Any]:
        """Entries of a manifest's `logits of` that describe the records."""
        kept = {"classes": self.classes, "top_k": self.top_k, "precision": self.precision}
        return {GRID: [self.rows, self.columns], **kept, **self.feature_identity()}

    def about(self) -> str:
        """Summary of what is kept, for messages."""
        largest = f"the {self.top_k} largest" if self.top_k > 1 else "the largest"
        kept = (
            f"{largest} of {self.classes:,} logits for {self.rows} × {self.columns} places and " if self.top_k else ""
        )
        high, wide = self.coarse
        return (
            f"{kept}all {self.classes:,} logits for {high} × {wide} places in {self.precision}{self.about_features()}"
        )

    @property
    def places(self) -> int:
        """Places in the grid."""
        return self.rows * self.columns

    @property
    def coarse(self) -> tuple[int, int]:
        """Rows and columns of half the grid."""
        return -(-self.rows // 2), -(-self.columns // 2)

    @property
    def code_bits(self) -> int:
        """Bits of a distance's code."""
        return CODE_BITS[self.precision]

    @property
    def steps(self) -> int:
        """The largest code."""
        return (1 << self.code_bits) - 1

    @property
    def answer_fields(self) -> list[Field]:
        """`coarse`, `codes` and `classes` are bit-packed, lowest bit first: the coarse codes class by class, the others place by place."""
        counts = {"coarse": math.prod(self.coarse) * self.classes, "codes": self.places * self.top_k}
        coarse, codes = (-(-count * self.code_bits // 8) for count in counts.values())
        fields: list[Field] = [("coarse_widest", "<f2", ()), ("coarse", "u1", (coarse,))]
        if self.top_k:
            classes = -(-self.places * self.top_k * self.class_bits // 8)
            fields += [("widest", "<f2", ()), ("codes", "u1", (codes,)), ("classes", "u1", (classes,))]
        return fields

    @property
    def answer_bytes(self) -> int:
        """Bytes of `answer_fields`, which are encoded already."""
        return np.dtype(self.answer_fields).itemsize

    def encode(self, content: np.ndarray) -> np.ndarray:
        """The content of records, uint8 (batch, width) -> the records without checksums, uint8 (batch, size).

        Raises:
            ValueError: a logit or a feature is not finite.
        """
        records = np.zeros((len(content), self.size), np.uint8)
        records[:, : self.answer_bytes] = content[:, : self.answer_bytes]
        fields = self.fields_of(records)
        if not all(np.isfinite(fields[name]).all() for name, kind, _ in self.answer_fields if kind == "<f2"):
            raise ValueError(
                "the teacher gave logits of pixels that are not finite, or are further apart than fp16 can hold: set "
                "teacher_precision to bf16 or fp32, or, if they are finite, teacher_cache to null"
            )
        return self.with_features(records, content)

    def tensors(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Records, uint8 (batch, size), decoded to arrays by name.

        `coarse` float32 (batch, classes, ceil(rows / 2), ceil(columns / 2)): all logits at half the grid. With top_k, for each place,
        `logits` float32 and `classes` int32 (batch, rows, columns, top_k), where the largest logit is 0, and `residual` float32 (batch,
        rows, columns), the log-sum-exp of all others. And `features` if they are kept.
        """
        fields, grid = self.fields_of(records), (len(records), self.rows, self.columns)
        shape = (len(records), self.classes, *self.coarse)
        found = {"coarse": -self._distances(fields["coarse_widest"], fields["coarse"], shape)}
        if self.top_k:
            below = self._distances(fields["widest"], fields["codes"], (*grid, self.top_k))
            found["logits"] = np.concatenate([np.zeros((*grid, 1), np.float32), -below[..., :-1]], axis=3)
            classes = unpacked_bits(fields["classes"], self.places * self.top_k, self.class_bits)
            found["classes"] = classes.reshape(*grid, self.top_k).astype(np.int32)
            found["residual"] = np.float32(math.log(self.classes - self.top_k)) - below[..., -1]
        return {**found, **self.feature_tensors(records)}

    def _distances(self, widest: np.ndarray, packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Distances, float32 (batch, …), from packed codes, uint8 (batch, bytes), and each record's widest distance (batch,)."""
        codes = unpacked_bits(packed, math.prod(shape[1:]), self.code_bits).reshape(shape)
        shares = codes.astype(np.float32) / np.float32(self.steps)
        return np.asarray(widest.astype(np.float32).reshape(-1, *[1] * (len(shape) - 1)) * (shares * shares))
