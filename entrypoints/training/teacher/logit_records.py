"""A teacher's logits as records of one size, and files of them: the largest logits, the log-sum-exp of the rest, a checksum."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from training.runtime import accelerator

Precision = Literal["fp16", "fp32"]

WORD = 4
"""Bytes. A record is a whole number of words; the last is its checksum."""


@dataclass(frozen=True)
class RecordLayout:
    """The fields of a record, the logits of one view of one image; little-endian.

    With `top_k`: the classes of the largest logits in falling order, these logits, and the residual, the log-sum-exp of all
    others. That gives the softmax at temperature 1 and leaves the temperature open, unlike the probabilities that TinyViT keeps
    (https://arxiv.org/abs/2207.10666, section 3.1). Without: all logits in the order of their classes.
    """

    classes: int
    top_k: int | None
    """Logits kept of each image, below `classes`. None: all."""
    precision: Precision
    """Of the logits kept. fp16 holds a bf16 teacher's logits without loss, from 6e-5 to 65504 in size."""

    @cached_property
    def fields(self) -> np.dtype:
        """A record's fields; its end holds the checksum."""
        logit = {"fp16": "<f2", "fp32": "<f4"}[self.precision]
        fields: list[tuple[str, str] | tuple[str, str, tuple[int]]]
        if self.top_k is None:
            fields = [("logits", logit, (self.classes,))]
        else:
            number = "<u2" if self.classes <= 2**16 else "<u4"
            fields = [("classes", number, (self.top_k,)), ("logits", logit, (self.top_k,)), ("residual", "<f4")]
        used = np.dtype(fields).itemsize
        return np.dtype([*fields, ("end", f"V{-used % WORD + WORD}")])

    @property
    def width(self) -> int:
        """Numbers an image in what `pack` returns."""
        return self.classes if self.top_k is None else 2 * self.top_k + 1

    @property
    def size(self) -> int:
        """Bytes of a record with its checksum."""
        return self.fields.itemsize

    def pack(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (batch, classes) of any type -> the content of their records, float32 (batch, width), on the same device.

        With `top_k` the largest logits, their classes (float32 holds numbers below 2**24) and the residual; else all logits.
        """
        assert logits.shape[1] == self.classes
        logits = logits.detach().float()
        if self.top_k is None:
            return logits
        largest, classes = logits.topk(self.top_k, dim=1)
        residual = logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True)
        return torch.cat([largest, classes.float(), residual], dim=1)

    def encode(self, packed: np.ndarray) -> np.ndarray:
        """The result of `pack`, float32 (batch, width) -> records without checksums, uint8 (batch, size).

        Raises:
            ValueError: a logit is not finite, or `precision` cannot hold it.
        """
        records = np.zeros((len(packed), self.size), np.uint8)
        fields = self._of(records)
        with np.errstate(over="ignore"):  # reported below
            if self.top_k is None:
                fields["logits"] = packed
            else:
                fields["logits"] = packed[:, : self.top_k]
                fields["classes"] = packed[:, self.top_k : -1]
                fields["residual"] = packed[:, -1]
        floats = ("logits",) if self.top_k is None else ("logits", "residual")
        if not all(np.isfinite(fields[name]).all() for name in floats):
            largest = np.abs(packed if self.top_k is None else packed[:, : self.top_k]).max()
            raise ValueError(
                f"the teacher gave logits that are not finite, or beyond what {self.precision} holds "
                f"(the largest: {largest:g}): set teacher_precision to bf16 or fp32, "
                "and where they are finite, the precision of teacher_cache or teacher_servers to fp32"
            )
        return records

    def rounded(self, packed: torch.Tensor) -> torch.Tensor:
        """The logits that `decode` will return for what `pack` returned: float32 (batch, classes), on the same device."""
        kept = packed if self.top_k is None else packed[:, : self.top_k]
        kept = kept.to(torch.float16).float() if self.precision == "fp16" else kept
        if self.top_k is None:
            return kept
        tail = packed[:, -1:] - float(np.float32(math.log(self.classes - self.top_k)))
        return self._spread(kept, packed[:, self.top_k : -1], tail)

    def decode(self, records: np.ndarray, device: torch.device) -> torch.Tensor:
        """Records, uint8 (batch, size) -> logits float32 (batch, classes) on a device.

        The classes that were not kept share their probability evenly: each gets residual - log(their number). At temperature 1
        the softmax of the kept classes and the sum of the rest are the teacher's. At another temperature T an even tail has the
        most (T > 1) or least (T < 1) weight that its probability allows, so the kept classes get too little or too much: with
        75 % for the largest at T = 1, 8 % too little at T = 4 with 10 of 1,000 classes, 1 % with 500.
        """
        fields = self._of(records)
        if self.top_k is None:
            return _to_device(np.ascontiguousarray(fields["logits"]), device).float()
        packed = np.empty((len(records), 2 * self.top_k + 1), np.float32)  # one copy to the device
        packed[:, : self.top_k] = fields["logits"]
        packed[:, self.top_k : -1] = fields["classes"]
        packed[:, -1] = fields["residual"] - np.float32(math.log(self.classes - self.top_k))
        moved = _to_device(packed, device)
        return self._spread(moved[:, : self.top_k], moved[:, self.top_k : -1], moved[:, -1:])

    def _spread(self, kept: torch.Tensor, classes: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Logits (batch, top_k) at their classes, and the tail (batch, 1) at all others: (batch, classes)."""
        return tail.expand(-1, self.classes).contiguous().scatter_(1, classes.long(), kept)

    def _of(self, records: np.ndarray) -> np.ndarray:
        found: np.ndarray = records.view(self.fields)[:, 0]
        return found


def record_layout(classes: int, top_k: int | None, precision: Precision) -> RecordLayout:
    """The layout that keeps the `top_k` largest logits; None, or as many as there are classes: all."""
    return RecordLayout(classes, None if top_k is None or top_k >= classes else top_k, precision)


class Seal:
    """Checksums that hold for the records of one cache only, each at its place.

    Multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961, section 3): over 32-bit words, with 64-bit
    weights drawn from the cache's key, h = ⌊(m₀ + Σ mᵢ wᵢ mod 2⁶⁴) / 2³²⌋. Any other record, or one of another cache or place,
    passes with a probability of 2⁻³²; an unwritten one, all zeros, never does.
    """

    def __init__(self, key: bytes, record_size: int):
        words = record_size // WORD - 1
        weights = np.frombuffer(hashlib.shake_256(key).digest(8 * (3 + words)), "<u8")
        self._start, self._index, self._view, self._words = weights[0], weights[1], weights[2], weights[3:]

    def close(self, records: np.ndarray, indices: np.ndarray, view: int) -> None:
        """Write the checksums of records, uint8 (batch, size), of images with these indices; in place."""
        records.view("<u4")[:, -1] = self._checksums(records, indices, view)

    def holds(self, records: np.ndarray, indices: np.ndarray, view: int) -> np.ndarray:
        """Which records, uint8 (batch, size), are whole and belong to these images: bool (batch,)."""
        held: np.ndarray = records.view("<u4")[:, -1] == self._checksums(records, indices, view)
        return held

    def _checksums(self, records: np.ndarray, indices: np.ndarray, view: int) -> np.ndarray:
        place = self._start + self._index * indices.astype(np.uint64) + self._view * np.array([view], np.uint64)
        # einsum reads the words in place; a matrix product copies them as 64-bit numbers
        total = place + np.einsum("ij,j->i", records.view("<u4")[:, :-1], self._words)
        checksums: np.ndarray = np.maximum(total >> np.uint64(32), np.uint64(1)).astype(np.uint32)
        return checksums


class ViewFile:
    """The records of one view, one an image, placed by the image's index. Unwritten ones are zeros and take no room."""

    def __init__(self, path: Path, images: int, record_size: int, writable: bool):
        """
        Raises:
            ValueError: a read-only file has another size.
            OSError: it does not exist, or cannot be opened.
        """
        self.path, self.record_size = path, record_size
        self._file = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o644)
        self._written = False
        size, expected = os.fstat(self._file).st_size, images * record_size
        if size != expected and writable:
            os.ftruncate(self._file, expected)
        elif size != expected:
            os.close(self._file)
            raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}: copy it again, or fill a new cache")
        self._records = np.asarray(np.memmap(path, np.uint8, "r", shape=(images, record_size)))

    def read(self, indices: np.ndarray) -> np.ndarray:
        """The records of images, uint8 (batch, record size); zeros: unwritten."""
        records: np.ndarray = self._records[indices]
        return records

    def write(self, records: np.ndarray, indices: np.ndarray) -> None:
        """Write records, uint8 (batch, record size), to the places of images.

        Raises:
            OSError: the disk is full.
        """
        try:
            for record, index in zip(records, indices.tolist()):
                os.pwrite(self._file, record.data, index * self.record_size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            fix = "free some space, or set another teacher_cache.where, and resume"
            raise OSError(error.errno, f"no room for the teacher cache: {fix}", str(self.path)) from error
        self._written = True

    def sync(self) -> None:
        """Flush what was written to the disk."""
        if self._written:
            os.fsync(self._file)
            self._written = False

    def close(self) -> None:
        os.close(self._file)


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a device; the host does not wait for a GPU's."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.is_gpu(device) else tensor.to(device)
