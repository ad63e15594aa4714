"""A teacher's logits as records of one size, the largest ones, the log-sum-exp of the rest and a checksum, and files of them."""

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

from training import accelerator

Precision = Literal["fp16", "fp32"]

WORD = 4
"""Bytes; a record is a whole number of them, and the last one is its checksum."""


@dataclass(frozen=True)
class RecordLayout:
    """How the logits of one view of one image lie in a record; little-endian.

    With `top_k`: the class numbers of the largest logits in falling order, these logits, and the residual: the log-sum-exp of
    all other logits. So every softmax over them is known at temperature 1, and the temperature is not chosen by the cache
    (unlike probabilities, as TinyViT keeps: https://arxiv.org/abs/2207.10666, section 3.1). Without: all logits in the order of
    their classes.
    """

    classes: int
    top_k: int | None
    """Logits kept of each image, below `classes`. None: all."""
    precision: Precision
    """Of the logits kept. fp16 holds the logits of a bf16 teacher without loss, between 6e-5 and 65504 in size."""

    @cached_property
    def fields(self) -> np.dtype:
        """A record's fields; its end is for the checksum."""
        logit = {"fp16": "<f2", "fp32": "<f4"}[self.precision]
        if self.top_k is None:
            fields = [("logits", logit, (self.classes,))]
        else:
            number = "<u2" if self.classes <= 2**16 else "<u4"
            fields = [("classes", number, (self.top_k,)), ("logits", logit, (self.top_k,)), ("residual", "<f4")]
        used = np.dtype(fields).itemsize
        return np.dtype([*fields, ("end", f"V{-used % WORD + WORD}")])

    @property
    def size(self) -> int:
        """Bytes of a record, its checksum too."""
        return self.fields.itemsize

    def encode(self, logits: torch.Tensor) -> np.ndarray:
        """Logits (batch, classes) of any dtype and device -> records without checksums, uint8 (batch, size).

        Raises:
            ValueError: a logit is not finite, or `precision` cannot hold it.
        """
        assert logits.shape[1] == self.classes
        logits = logits.detach().float()
        records = np.zeros((len(logits), self.size), np.uint8)
        fields = self._of(records)
        with np.errstate(over="ignore"):  # it is told below
            if self.top_k is None:
                fields["logits"] = logits.cpu().numpy()
            else:
                largest, classes = logits.topk(self.top_k, dim=1)
                residual = logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True)
                # one copy from the device; float32 holds class numbers below 2**24
                packed = torch.cat([largest, classes.float(), residual], dim=1).cpu().numpy()
                fields["logits"] = packed[:, : self.top_k]
                fields["classes"] = packed[:, self.top_k : -1]
                fields["residual"] = packed[:, -1]
        if not all(np.isfinite(fields[name]).all() for name in ("logits", "residual") if name in fields.dtype.names):
            raise ValueError(
                f"the teacher gave logits that are not finite, or beyond what {self.precision} holds "
                f"(the largest: {logits.abs().max().item():g}): set teacher_precision to bf16 or fp32, "
                "and where they are finite, teacher_cache.precision to fp32"
            )
        return records

    def decode(self, records: np.ndarray, device: torch.device) -> torch.Tensor:
        """Records, uint8 (batch, size) -> logits float32 (batch, classes) on a device.

        The classes that were not kept share their probability evenly: each gets residual - log(their number). At temperature 1
        the softmax of the kept classes, and the rest's in sum, are the teacher's. At another temperature T the even tail is the
        one with the most (T > 1) or least (T < 1) weight that its probability allows, so the kept classes get too little or too
        much: 8 % too little at T = 4 with 10 of 1,000 classes, 1 % with 500, where the largest has 75 % at T = 1.
        """
        fields = self._of(records)
        if self.top_k is None:
            return _to_device(np.ascontiguousarray(fields["logits"]), device).float()
        packed = np.empty((len(records), 2 * self.top_k + 1), np.float32)  # one copy to the device
        packed[:, : self.top_k] = fields["logits"]
        packed[:, self.top_k : -1] = fields["classes"]
        packed[:, -1] = fields["residual"] - np.float32(math.log(self.classes - self.top_k))
        moved = _to_device(packed, device)
        logits = moved[:, -1:].expand(-1, self.classes).contiguous()
        return logits.scatter_(1, moved[:, self.top_k : -1].long(), moved[:, : self.top_k])

    def _of(self, records: np.ndarray) -> np.ndarray:
        return records.view(self.fields)[:, 0]


def record_layout(classes: int, top_k: int | None, precision: Precision) -> RecordLayout:
    """The layout that keeps the `top_k` largest logits; all for None, or as many as there are classes."""
    return RecordLayout(classes, None if top_k is None or top_k >= classes else top_k, precision)


class Seal:
    """Checksums that only hold for records of one cache, at their own place.

    Multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961, section 3): over 32-bit words, with 64-bit
    weights drawn from the cache's key, h = ⌊(m₀ + Σ mᵢ wᵢ mod 2⁶⁴) / 2³²⌋. Any other record, one of another cache or of another
    place passes with a chance of 2⁻³²; a record of zeros, as an unwritten one is, never does.
    """

    def __init__(self, key: bytes, record_size: int):
        words = record_size // WORD - 1
        weights = np.frombuffer(hashlib.shake_256(key).digest(8 * (3 + words)), "<u8")
        self._start, self._number, self._view, self._words = weights[0], weights[1], weights[2], weights[3:]

    def close(self, records: np.ndarray, numbers: np.ndarray, view: int) -> None:
        """Write the checksums of records, uint8 (batch, size), of images with these numbers; in place."""
        records.view("<u4")[:, -1] = self._checksums(records, numbers, view)

    def holds(self, records: np.ndarray, numbers: np.ndarray, view: int) -> np.ndarray:
        """Which records, uint8 (batch, size), are whole and belong to these images: bool (batch,)."""
        return records.view("<u4")[:, -1] == self._checksums(records, numbers, view)

    def _checksums(self, records: np.ndarray, numbers: np.ndarray, view: int) -> np.ndarray:
        place = self._start + self._number * numbers.astype(np.uint64) + self._view * np.array([view], np.uint64)
        # einsum takes the words as they lie; a matrix product would copy them as 64-bit numbers
        total = place + np.einsum("ij,j->i", records.view("<u4")[:, :-1], self._words)
        return np.maximum(total >> np.uint64(32), np.uint64(1)).astype(np.uint32)


class ViewFile:
    """The records of one view, one an image, at the place that the image's number gives. Unwritten ones are zeros and take no room."""

    def __init__(self, path: Path, images: int, record_size: int, writable: bool):
        """
        Raises:
            ValueError: a file that cannot be written has another size.
            OSError: there is none, or it cannot be written.
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

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The records of images, uint8 (batch, record size); zeros where none was written."""
        return self._records[numbers]

    def write(self, records: np.ndarray, numbers: np.ndarray) -> None:
        """Write records, uint8 (batch, record size), to the places of images.

        Raises:
            OSError: the disk is full.
        """
        try:
            for record, number in zip(records, numbers.tolist()):
                os.pwrite(self._file, record.data, number * self.record_size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            cure = "free some space, or set another teacher_cache.where, and resume"
            raise OSError(error.errno, f"no room for the teacher cache: {cure}", str(self.path)) from error
        self._written = True

    def sync(self) -> None:
        """Have the disk hold what was written."""
        if self._written:
            os.fsync(self._file)
            self._written = False

    def close(self) -> None:
        os.close(self._file)


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for, where the device works beside it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.is_gpu(device) else tensor.to(device)
