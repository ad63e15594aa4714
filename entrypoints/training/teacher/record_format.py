"""Layout of a label bank's records: their fields, and how these hold an image's logits. numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from training.teacher.bits import CODE_BITS, packed_bits, unpacked_bits
from training.teacher.feature_format import FeatureFormat

Precision = Literal["fp32", "fp16", "int8", "int4"]

Field = tuple[str, str, tuple[int, ...]]
"""A field's name, numpy type and shape."""

WORD = 4
"""Bytes. A record is a whole number of words; the last is its checksum."""


class KeptLogits(NamedTuple):
    """A teacher's logits as records hold them."""

    logits: np.ndarray
    """float32 (images, kept); with top_k in falling order, else in the order of the classes."""
    classes: np.ndarray | None
    """int64 (images, kept), the class of each logit. None: all are kept."""
    residual: np.ndarray | None
    """float32 (images,), the log-sum-exp of the logits of all other classes. None: there are no others."""


class Records:
    """What all kinds of records share: an answer's fields, then those of features if kept, then a checksum; little-endian."""

    classes: int
    features: FeatureFormat | None

    def identity(self) -> dict[str, Any]:
        """Entries of a manifest's `logits of` that describe the records."""
        raise NotImplementedError

    @property
    def answer_fields(self) -> list[Field]:
        """Fields of the logits."""
        raise NotImplementedError

    @property
    def answer_bytes(self) -> int:
        """Bytes of an image's logits in the content that `encode` takes."""
        raise NotImplementedError

    @cached_property
    def fields(self) -> np.dtype:
        """A record's fields."""
        fields = [*self.answer_fields, *([] if self.features is None else self.features.fields)]
        unused = -np.dtype(fields).itemsize % WORD
        fields += [("unused", "u1", (unused,))] if unused else []
        return np.dtype([*fields, ("checksum", "<u4", ())])

    @property
    def size(self) -> int:
        """Bytes of a record with its checksum."""
        return self.fields.itemsize

    @property
    def width(self) -> int:
        """Bytes per image in the content that `encode` takes: those of the logits, then those of the features as in a record."""
        return self.answer_bytes + (0 if self.features is None else self.features.size)

    @property
    def class_bits(self) -> int:
        """Bits of a class number."""
        return max(1, (self.classes - 1).bit_length())

    def feature_identity(self) -> dict[str, Any]:
        """Entries of a manifest's `logits of` that describe the features."""
        return {} if self.features is None else self.features.identity()

    def about_features(self) -> str:
        """The features in a sentence that names what is kept."""
        return "" if self.features is None else f" and {self.features.about()}"

    def description(self) -> dict[str, Any]:
        """The manifest's `record`: bytes, and each field's name, numpy type and shape."""
        fields = [[name, *_described(self.fields[name])] for name in self.fields.names or ()]
        return {"bytes": self.size, "class_bits": self.class_bits, "fields": fields}

    def fields_of(self, records: np.ndarray) -> np.ndarray:
        """The fields of records, uint8 (batch, size), as a structured array (batch,) of the same memory."""
        found: np.ndarray = records.view(self.fields)[:, 0]
        return found

    @cached_property
    def feature_bytes(self) -> slice:
        """Byte range of a record's features."""
        assert self.features is not None and self.fields.fields is not None, "they are kept"
        start = self.fields.fields[self.features.fields[0][0]][1]
        return slice(start, start + self.features.size)

    def tensors(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Records, uint8 (batch, size), decoded to arrays by name."""
        raise NotImplementedError

    def feature_tensors(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """`features`, float32 (batch, *features.shape), if they are kept."""
        return {} if self.features is None else {"features": self.features.decode(self.fields_of(records))}

    def with_features(self, records: np.ndarray, content: np.ndarray) -> np.ndarray:
        """Copy the features from encoded content, uint8 (batch, width), into records, in place.

        Raises:
            ValueError: a feature is not finite, or its precision cannot hold it.
        """
        if self.features is not None:
            records[:, self.feature_bytes] = content[:, self.answer_bytes :]
            self.features.require_finite(self.fields_of(records))
        return records


@dataclass(frozen=True)
class RecordFormat(Records):
    """The fields of a record, the answer for one view of one image; little-endian.

    With `top_k`: the largest logits in falling order, their classes, and the residual, the log-sum-exp of all others. That gives the
    softmax at temperature 1 and leaves the temperature open, unlike the probabilities that TinyViT stores
    (https://arxiv.org/abs/2207.10666, section 3.1). Without: all logits in the order of their classes.

    int8 and int4 store a logit as its distance from the record's largest one, in steps of a scale: the widest distance over 255 or 15.
    So the largest logit, which weighs most in a softmax, has an exact distance. Its value is rounded to fp16, which shifts all logits
    alike, and no softmax sees that.
    """

    classes: int
    top_k: int | None
    """Logits kept per image, below `classes`. None: all."""
    precision: Precision
    """Of the logits kept. fp16 holds a bf16 teacher's logits without loss, from 6e-5 to 65504 in size."""
    features: FeatureFormat | None = None
    """Of the features kept beside the logits. None: there are none."""

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> RecordFormat:
        """The format of a bank's records, from its manifest's `logits of`."""
        return cls(identity["classes"], identity["top_k"], identity["precision"], FeatureFormat.of(identity))

    def identity(self) -> dict[str, Any]:
        """Entries of a manifest's `logits of` that describe the records."""
        return {"classes": self.classes, "top_k": self.top_k, "precision": self.precision, **self.feature_identity()}

    def about(self) -> str:
        """Summary of what is kept, for messages."""
        logits = "all" if self.top_k is None else f"the {self.top_k} largest of"
        return f"{logits} {self.classes:,} logits in {self.precision}{self.about_features()}"

    @property
    def kept(self) -> int:
        """Logits in a record."""
        return self.classes if self.top_k is None else self.top_k

    @property
    def steps(self) -> int | None:
        """The largest code of a logit. None: logits are kept as numbers."""
        return 2 ** CODE_BITS[self.precision] - 1 if self.precision in CODE_BITS else None

    @property
    def answer_fields(self) -> list[Field]:
        """`codes` and `classes` are bit-packed, lowest bit first."""
        if self.steps is None:
            residual = "<f4"
            fields: list[Field] = [("logits", {"fp16": "<f2", "fp32": "<f4"}[self.precision], (self.kept,))]
        else:
            residual, code_bytes = "<f2", -(-self.kept * CODE_BITS[self.precision] // 8)
            fields = [("largest", "<f2", ()), ("scale", "<f2", ()), ("codes", "u1", (code_bytes,))]
        if self.top_k is not None:
            fields += [("residual", residual, ()), ("classes", "u1", (-(-self.top_k * self.class_bits // 8),))]
        return fields

    @property
    def answer_bytes(self) -> int:
        """Bytes of an image's logits in the content that `encode` takes: float32 numbers."""
        rest = self.top_k + 1 if self.top_k is not None else 0
        return 4 * (self.kept + rest + (2 if self.steps is not None else 0))

    def encode(self, content: np.ndarray) -> np.ndarray:
        """The content of records -> the records without checksums, uint8 (batch, size).

        Args:
            content: uint8 (batch, width). First, float32 numbers: the logits, or their codes; with top_k, their classes and the residual;
                with codes, the largest logit (subtracted from the residual) and the scale. Then the features' fields.

        Raises:
            ValueError: a logit or a feature is not finite, or its precision cannot hold it.
        """
        records, kept = np.zeros((len(content), self.size), np.uint8), self.kept
        packed = np.ascontiguousarray(content[:, : self.answer_bytes]).view("<f4")
        fields = self.fields_of(records)
        with np.errstate(over="ignore", invalid="ignore"):  # reported below
            if self.steps is None:
                fields["logits"] = packed[:, :kept]
                floats = ["logits"]
            else:
                fields["largest"], fields["scale"] = packed[:, -2], packed[:, -1]
                fields["codes"] = packed_bits(packed[:, :kept].astype(np.uint8), CODE_BITS[self.precision])
                floats = ["largest", "scale"]
            if self.top_k is not None:
                fields["classes"] = packed_bits(packed[:, kept : 2 * kept].astype(np.uint32), self.class_bits)
                fields["residual"] = packed[:, 2 * kept]
                floats.append("residual")
        if not all(np.isfinite(fields[name]).all() for name in floats):
            largest = np.abs(packed[:, :kept] if self.steps is None else packed[:, -2]).max()
            raise ValueError(
                f"the teacher gave logits that are not finite, or beyond what {self.precision} holds "
                f"(the largest: {largest:g}): set teacher_precision to bf16 or fp32, "
                "or, if they are finite, the precision of teacher_cache or teacher_servers to fp32"
            )
        return self.with_features(records, content)

    def tensors(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Records, uint8 (batch, size), decoded to arrays by name: `logits` float32 (batch, kept); with top_k also `classes` int32
        (batch, kept) and `residual` float32 (batch,), as in KeptLogits; and `features` if they are kept."""
        kept = self.logits_of(records)
        found = {"logits": kept.logits}
        if kept.classes is not None and kept.residual is not None:
            found |= {"classes": kept.classes.astype(np.int32), "residual": kept.residual}
        return {**found, **self.feature_tensors(records)}

    def logits_of(self, records: np.ndarray) -> KeptLogits:
        """The logits in records, uint8 (batch, size). Damaged records may give any."""
        fields = self.fields_of(records)
        classes = None if self.top_k is None else unpacked_bits(fields["classes"], self.top_k, self.class_bits)
        residual = None if self.top_k is None else fields["residual"].astype(np.float32)
        if self.steps is None:
            return KeptLogits(fields["logits"].astype(np.float32), classes, residual)
        codes = unpacked_bits(fields["codes"], self.kept, CODE_BITS[self.precision]).astype(np.float32)
        largest, scale = (fields[name].astype(np.float32)[:, None] for name in ("largest", "scale"))
        residual = None if residual is None else largest[:, 0] + residual
        return KeptLogits(largest - scale * codes, classes, residual)


def _described(field: np.dtype) -> tuple[str, list[int]]:
    """A field's numpy type, and its shape."""
    base, shape = field.subdtype or (field, ())
    return base.str, [*shape]
