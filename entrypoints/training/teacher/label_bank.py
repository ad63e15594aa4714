"""The label bank: a folder with a teacher's answers for the views of a data set. Written and read with numpy alone.

manifest.json says whose answers they are and how a record is laid out. Each view has one file, with a record for every training image at
the image's index. docs/label-bank.md has the format. The launcher's `labels` commands import this module, so it imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from training.data.storage import read_with_retries
from training.teacher.pixel_format import GRID, PixelFormat
from training.teacher.record_format import WORD, RecordFormat, Records

FORMAT = 2
"""Version of the record format; folders of other versions are refused."""

MANIFEST = "manifest.json"

IDENTITY = "logits of"
"""The manifest entry that all records depend on: their checksums are valid only for it."""

CHECKSUMS = "SHA256SUMS"
"""The SHA-256 of every complete view's file, as `sha256sum --check` reads them."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a used-up quota."""

PIECE = 1 << 24
"""Bytes of records that are read at once."""


def record_format(identity: Mapping[str, Any]) -> RecordFormat | PixelFormat:
    """The format of a bank's records, from its manifest's `logits of`."""
    return PixelFormat.of(identity) if GRID in identity else RecordFormat.of(identity)


class Seal:
    """Checksums that are valid only for the records of one bank, each at its place.

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
    """The records of one view, one per image, at the image's index. Unwritten ones are zeros and take no disk space."""

    def __init__(self, path: Path, images: int, record_size: int, writable: bool):
        """
        Raises:
            ValueError: a read-only file has another size.
            OSError: it does not exist, or cannot be opened.
        """
        self.path, self.record_size = path, record_size
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._file = os.open(path, self._flags | (os.O_CREAT if writable else 0), 0o644)
        self._written = False
        size, expected = os.fstat(self._file).st_size, images * record_size
        if size != expected and writable:
            os.ftruncate(self._file, expected)
        elif size != expected:
            os.close(self._file)
            raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}: copy it again, or fill it anew")

    def read(self, indices: np.ndarray) -> np.ndarray:
        """The records of images, uint8 (batch, record size); unwritten ones are zeros.

        Read, not mapped: storage that fails under a mapping kills the process (SIGBUS), which leaves no chance to retry.

        Raises:
            StorageError: storage kept failing, as in `read_with_retries`.
        """
        return read_with_retries(lambda: self._read(indices), self.path)

    def _read(self, indices: np.ndarray) -> np.ndarray:
        records = np.empty((len(indices), self.record_size), np.uint8)
        try:
            for record, index in zip(records, indices.tolist()):
                done = 0
                while done < self.record_size:  # a file system in user space may return less
                    read = os.preadv(self._file, [record.data[done:]], index * self.record_size + done)
                    if not read:
                        raise OSError(errno.EIO, "the file ends before this record", str(self.path))
                    done += read
        except OSError:
            renewed = os.open(self.path, self._flags)  # after a lost mount, the old descriptor is stale
            os.dup2(renewed, self._file, inheritable=False)
            os.close(renewed)
            raise
        return records

    def write(self, records: np.ndarray, indices: np.ndarray) -> None:
        """Write images' records, uint8 (batch, record size), at their indices.

        Raises:
            OSError: the disk is full.
        """
        try:
            for record, index in zip(records, indices.tolist()):
                os.pwrite(self._file, record.data, index * self.record_size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            fix = "free some space, or set another teacher_cache.where, and resume"
            raise OSError(error.errno, f"no room for the label bank: {fix}", str(self.path)) from error
        self._written = True

    def sync(self) -> None:
        """Flush written records to disk."""
        if self._written:
            os.fsync(self._file)
            self._written = False

    def close(self) -> None:
        os.close(self._file)


def key_of(identity: Mapping[str, Any]) -> bytes:
    """The key of a bank's checksums: the SHA-256 of the manifest's `logits of`."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


def view_file(folder: Path, view: int) -> Path:
    """The file of a view's records; views count from 1."""
    return folder / f"view-{view:04d}.bin"


def write_manifest(folder: Path, identity: Mapping[str, Any], records: Records, about: Mapping[str, Any]) -> None:
    """Write the manifest atomically; another process of the run may write the same.

    Args:
        about: further entries, for people; no record depends on them.
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
    """Read what `write_manifest` wrote.

    Raises:
        ValueError: the file holds something else.
        OSError: there is no manifest.
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
    """The SHA-256 of complete views' files, by file name; empty if no view is complete.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    if not all(len(checksum) == 64 and name for name, checksum in found.items()):
        raise ValueError(f"{folder / CHECKSUMS} is damaged: delete it, and launcher label rewrites it")
    return found


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write the SHA-256 of complete views' files, by file name, atomically."""
    temporary = folder / f".{CHECKSUMS}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / CHECKSUMS)


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with open(file, "rb") as opened:
        while piece := opened.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def digest_of(folder: Path) -> str:
    """SHA-256 that identifies a bank's complete views: over the manifest's `logits of` and the views' checksums."""
    identity = read_manifest(folder)[IDENTITY]
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(read_checksums(folder).items()))
    return hashlib.sha256(key_of(identity) + lines.encode()).hexdigest()
