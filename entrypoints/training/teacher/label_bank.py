"""The label bank: a folder with a teacher's answers for the views of a data set. Written and read with numpy alone.

It holds manifest.json, which says whose answers they are and how a record is made up, and one file a view with a record for every
training image, placed by the image's index. docs/label-bank.md has the format. The launcher's `labels` commands import this module, so it
imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from training.teacher.bits import CODE_BITS, packed_bits, unpacked_bits
from training.teacher.feature_format import FeatureFormat

FORMAT = 2
"""Of the records; a folder of another format is refused."""

MANIFEST = "manifest.json"

IDENTITY = "logits of"
"""The manifest's entry that all records depend on: their checksums hold for it alone."""

CHECKSUMS = "SHA256SUMS"
"""The SHA-256 of every view that is complete, as `sha256sum --check` reads them."""

Precision = Literal["fp32", "fp16", "int8", "int4"]

WORD = 4
"""Bytes. A record is a whole number of words; the last is its checksum."""

PIECE = 1 << 24
"""Bytes of records that are read at once."""


class KeptLogits(NamedTuple):
    """What records say of a teacher's logits."""

    logits: np.ndarray
    """float32 (images, kept); with top_k in falling order, else in the order of the classes."""
    classes: np.ndarray | None
    """int64 (images, kept), the class of each logit. None: all are kept."""
    residual: np.ndarray | None
    """float32 (images,), the log-sum-exp of the logits of all other classes. None: there are no others."""


@dataclass(frozen=True)
class RecordFormat:
    """The fields of a record, the answer for one view of one image; little-endian.

    With `top_k`: the largest logits in falling order, their classes, and the residual, the log-sum-exp of all others. That gives the
    softmax at temperature 1 and leaves the temperature open, unlike the probabilities that TinyViT keeps
    (https://arxiv.org/abs/2207.10666, section 3.1). Without: all logits in the order of their classes.

    int8 and int4 keep a logit as its distance from the record's largest one, in steps of a scale: the widest distance over 255 or 15.
    So the distance of the largest one, which weighs most in a softmax, is exact; its own value is rounded to fp16, which moves all logits
    alike and which no softmax sees.
    """

    classes: int
    top_k: int | None
    """Logits kept of each image, below `classes`. None: all."""
    precision: Precision
    """Of the logits kept. fp16 holds a bf16 teacher's logits without loss, from 6e-5 to 65504 in size."""
    features: FeatureFormat | None = None
    """Of the features that are kept beside the logits. None: there are none."""

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> RecordFormat:
        """That of a bank's records, by its manifest's `logits of`."""
        return cls(identity["classes"], identity["top_k"], identity["precision"], FeatureFormat.of(identity))

    def identity(self) -> dict[str, Any]:
        """What a manifest's `logits of` says of the records."""
        features = {} if self.features is None else self.features.identity()
        return {"classes": self.classes, "top_k": self.top_k, "precision": self.precision, **features}

    def about(self) -> str:
        """What is kept, for people."""
        logits = "all" if self.top_k is None else f"the {self.top_k} largest of"
        features = "" if self.features is None else f" and {self.features.about()}"
        return f"{logits} {self.classes:,} logits in {self.precision}{features}"

    @property
    def kept(self) -> int:
        """Logits in a record."""
        return self.classes if self.top_k is None else self.top_k

    @property
    def steps(self) -> int | None:
        """The largest code of a logit. None: logits are kept as numbers."""
        return 2 ** CODE_BITS[self.precision] - 1 if self.precision in CODE_BITS else None

    @property
    def class_bits(self) -> int:
        """Bits of a class number."""
        return max(1, (self.classes - 1).bit_length())

    @cached_property
    def fields(self) -> np.dtype:
        """A record's fields. `codes` and `classes` hold numbers of a few bits one after the other, the lowest bit first."""
        fields: list[tuple[str, str, tuple[int, ...]]]
        if self.steps is None:
            residual = "<f4"
            fields = [("logits", {"fp16": "<f2", "fp32": "<f4"}[self.precision], (self.kept,))]
        else:
            residual, code_bytes = "<f2", -(-self.kept * CODE_BITS[self.precision] // 8)
            fields = [("largest", "<f2", ()), ("scale", "<f2", ()), ("codes", "u1", (code_bytes,))]
        if self.top_k is not None:
            fields += [("residual", residual, ()), ("classes", "u1", (-(-self.top_k * self.class_bits // 8),))]
        fields += [] if self.features is None else self.features.fields
        unused = -np.dtype(fields).itemsize % WORD
        fields += [("unused", "u1", (unused,))] if unused else []
        return np.dtype([*fields, ("checksum", "<u4", ())])

    @property
    def size(self) -> int:
        """Bytes of a record with its checksum."""
        return self.fields.itemsize

    def description(self) -> dict[str, Any]:
        """The manifest's `record`: bytes, and each field's name, numpy type and shape."""
        fields = [[name, *_described(self.fields[name])] for name in self.fields.names or ()]
        return {"bytes": self.size, "class_bits": self.class_bits, "fields": fields}

    @property
    def width(self) -> int:
        """Bytes an image in what `encode` takes."""
        return self.number_bytes + (0 if self.features is None else self.features.size)

    @property
    def number_bytes(self) -> int:
        """Of these, those of the logits."""
        rest = self.top_k + 1 if self.top_k is not None else 0
        return 4 * (self.kept + rest + (2 if self.steps is not None else 0))

    def encode(self, content: np.ndarray) -> np.ndarray:
        """The content of records -> the records without checksums, uint8 (batch, size).

        Args:
            content: uint8 (batch, width). First numbers in float32: the logits, or their codes; with top_k their classes and the residual;
                with codes the largest logit and the scale, where the residual is less the largest logit. Then the features' fields.

        Raises:
            ValueError: a logit or a feature is not finite, or its precision cannot hold it.
        """
        records, kept = np.zeros((len(content), self.size), np.uint8), self.kept
        packed = np.ascontiguousarray(content[:, : self.number_bytes]).view("<f4")
        fields = self.fields_of(records)
        if self.features is not None:
            records[:, self.feature_bytes] = content[:, self.number_bytes :]
            self.features.require_finite(fields)
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
                "and where they are finite, the precision of teacher_cache or teacher_servers to fp32"
            )
        return records

    def logits_of(self, records: np.ndarray) -> KeptLogits:
        """What records, uint8 (batch, size), say of the logits. Those of damaged ones may be any."""
        fields = self.fields_of(records)
        classes = None if self.top_k is None else unpacked_bits(fields["classes"], self.top_k, self.class_bits)
        residual = None if self.top_k is None else fields["residual"].astype(np.float32)
        if self.steps is None:
            return KeptLogits(fields["logits"].astype(np.float32), classes, residual)
        codes = unpacked_bits(fields["codes"], self.kept, CODE_BITS[self.precision]).astype(np.float32)
        largest, scale = (fields[name].astype(np.float32)[:, None] for name in ("largest", "scale"))
        residual = None if residual is None else largest[:, 0] + residual
        return KeptLogits(largest - scale * codes, classes, residual)

    def features_of(self, records: np.ndarray) -> np.ndarray | None:
        """The features of records, uint8 (batch, size), float32 (batch, *features.shape). None: they are not kept."""
        return None if self.features is None else self.features.decode(self.fields_of(records))

    @cached_property
    def feature_bytes(self) -> slice:
        """Where a record's features are."""
        assert self.features is not None and self.fields.fields is not None, "they are kept"
        start = self.fields.fields[self.features.fields[0][0]][1]
        return slice(start, start + self.features.size)

    def fields_of(self, records: np.ndarray) -> np.ndarray:
        """The fields of records, uint8 (batch, size), as a structured array (batch,) of the same memory."""
        found: np.ndarray = records.view(self.fields)[:, 0]
        return found


class Seal:
    """Checksums that hold for the records of one bank only, each at its place.

    Multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961, section 3): over 32-bit words, with 64-bit
    weights drawn from the bank's key, h = ⌊(m₀ + Σ mᵢ wᵢ mod 2⁶⁴) / 2³²⌋. Any other record, or one of another bank or place,
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
            raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}: copy it again, or fill it anew")
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
            raise OSError(error.errno, f"no room for the label bank: {fix}", str(self.path)) from error
        self._written = True

    def sync(self) -> None:
        """Flush what was written to the disk."""
        if self._written:
            os.fsync(self._file)
            self._written = False

    def close(self) -> None:
        os.close(self._file)


def key_of(identity: Mapping[str, Any]) -> bytes:
    """What the checksums of a bank's records depend on: the SHA-256 of the manifest's `logits of`."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


def view_file(folder: Path, view: int) -> Path:
    """Where a view's records are, from view 1 on."""
    return folder / f"view-{view:04d}.bin"


def write_manifest(folder: Path, identity: Mapping[str, Any], records: RecordFormat, about: Mapping[str, Any]) -> None:
    """Write the manifest in one piece; another process of the run may write the same.

    Args:
        about: what else it says, for people; no record depends on it.
    """
    created = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "numpy": np.__version__,
        **about,
    }
    text = json.dumps({IDENTITY: dict(identity), "record": records.description(), "created": created}, indent=2)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".manifest", delete=False, encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote.

    Raises:
        ValueError: it holds something else.
        OSError: there is none.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for part in (manifest[IDENTITY], manifest.get("created", {})):
            part.items()
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / MANIFEST} is not a label bank's: delete {folder}, or name another folder (in a job: teacher_cache.where)"
        ) from error


def read_checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files of complete views, by name; empty where no view is complete.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    if not all(len(checksum) == 64 and name for name, checksum in found.items()):
        raise ValueError(f"{folder / CHECKSUMS} is damaged: delete it, and launcher label writes it anew")
    return found


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write the SHA-256 of the files of complete views, by name, in one piece."""
    temporary = folder / f".{CHECKSUMS}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / CHECKSUMS)


def sha256_of(file: Path) -> str:
    """Of a file's content."""
    found = hashlib.sha256()
    with open(file, "rb") as opened:
        while piece := opened.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def digest_of(folder: Path) -> str:
    """SHA-256 of all that a bank's complete views say: of the manifest's `logits of` and of their checksums."""
    identity = read_manifest(folder)[IDENTITY]
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(read_checksums(folder).items()))
    return hashlib.sha256(key_of(identity) + lines.encode()).hexdigest()


def _described(field: np.dtype) -> tuple[str, list[int]]:
    """A field's numpy type, and its shape."""
    base, shape = field.subdtype or (field, ())
    return base.str, [*shape]
