"""One checkpoint as a folder: it appears whole or not at all, is on the disk when it does, and is verified when it is read.

step-00001200/shared.pt       what all ranks have in common
              own.pt          what each rank has of its own, one row a rank
              manifest.json   step, world size, fingerprint, and the SHA-256 of both files
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from training.data.storage import read_with_retries

SHARED, OWN, MANIFEST = "shared.pt", "own.pt", "manifest.json"

WRITING, REPLACED = ".writing", ".replaced"
"""Folders that are no checkpoints: one that is being written, and one that another has replaced. A kill may leave them."""

PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter)
"""What torch.load(weights_only=True) of every version since 2.0 takes, beside dict, OrderedDict, list and tuple."""


class Damaged(Exception):
    """Why a checkpoint is not whole."""


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def step_of(place: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(place.name.removeprefix("step-"))


def places(folder: Path | None) -> list[Path]:
    """The folders that are named as checkpoints, newest first."""
    found = folder.iterdir() if folder is not None and folder.is_dir() else ()
    return sorted((place for place in found if re.fullmatch(r"step-\d{8,}", place.name)), key=step_of, reverse=True)


def write(folder: Path, step: int, files: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Write a checkpoint beside the others, then move it to its place.

    Args:
        files: trees of tensors, by file name.
        manifest: JSON-ready; it gets the size and checksum of each file besides.

    Raises:
        OSError: the disk failed; the other checkpoints are as they were.
    """
    partial, replaced, place = folder / WRITING, folder / REPLACED, place_of(folder, step)
    for left in (partial, replaced):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    written = {name: _write_hashed(partial / name, content) for name, content in files.items()}
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "files": written}, file, indent=1)
        _to_disk(file)
    _folder_to_disk(partial)
    if place.exists():  # damaged, or the run would have gone on from it
        os.replace(place, replaced)
    os.replace(partial, place)
    _folder_to_disk(folder)


def remove(place: Path) -> None:
    """Remove a checkpoint, or what a kill left of one, as far as the disk lets us."""
    shutil.rmtree(place, ignore_errors=True)


def read_manifest(place: Path) -> Any:
    """What a checkpoint's manifest holds.

    Raises:
        Damaged: there is none, or it is no JSON.
        OSError: storage failed for long, or the file may not be read.
    """
    try:
        return json.loads(_content(place / MANIFEST))
    except ValueError as error:
        raise Damaged(f"{MANIFEST}: {error!r}") from None


def read(place: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A checkpoint's manifest, and what each of its files holds.

    Raises:
        Damaged: a file is missing, or not as it was written.
        OSError: storage failed for long, or a file may not be read. It may be whole: who took an older one would remove it.
    """
    manifest = read_manifest(place)
    try:
        files = {name: (manifest["files"][name]["sha256"], manifest["files"][name]["bytes"]) for name in (SHARED, OWN)}
        known = manifest["step"] == step_of(place) and {"world_size", "fingerprint"} <= set(manifest)
    except (KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST}: {error!r}") from None
    if not known:
        raise Damaged(f"{MANIFEST}: not for this step")
    contents = {}
    for name, (checksum, size) in files.items():
        contents[name] = _content(place / name)
        if len(contents[name]) != size:
            raise Damaged(f"{name}: {len(contents[name])} of {size} bytes")
        if hashlib.sha256(contents[name]).hexdigest() != checksum:
            raise Damaged(f"{name}: checksum")
    return manifest, contents


def refuse_unreadable(value: Any, where: str) -> None:
    """Refuse what torch.load(weights_only=True) would not read: now, not when the run is lost.

    Args:
        value: a tree of dicts, lists and tuples.
        where: its name in the message.

    Raises:
        TypeError: the tree holds something else than `PLAIN` values.
    """
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            refuse_unreadable(key, f"{where} (a key)")
            refuse_unreadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            refuse_unreadable(item, f"{where}[{number}]")
    elif type(value) not in PLAIN:
        fix = "make it a tensor, a number or a string"
        raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: {fix}")


def _content(file: Path) -> bytes:
    try:
        return read_with_retries(file.read_bytes, file)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Damaged(f"no {file.name}" if file.name == MANIFEST else f"{file.name}: {error.strerror}") from None


class _HashedFile:
    """A file for torch.save, hashed while it is written."""

    def __init__(self, file: BinaryIO):
        self._file, self.hash, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


def _write_hashed(path: Path, content: Any) -> dict[str, Any]:
    """Write a tree by torch.save until it is on the disk; its checksum and size."""
    with open(path, "wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(content, hashed)  # type: ignore[arg-type]  # torch.save calls no more of a file than write and flush
        except RuntimeError:  # PyTorch's own, which hides what the disk said
            if hashed.error is None:
                raise
            raise hashed.error from None
        _to_disk(file)
    return {"sha256": hashed.hash.hexdigest(), "bytes": hashed.size}


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    """Make the names in a folder as lasting as its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
