"""The index of images in tar shards of the WebDataset convention, `<key>.jpg` beside `<key>.cls`: from a file, or from the tars.

Standard library and numpy only: `launcher prepare` writes the same index.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

INDEX = "index.npz"

FORMAT = 1
"""Version of the index's format; any other is refused."""

CLASSES = ("classes.txt", "classes.json")

IMAGE_KINDS = ("jpg", "jpeg", "png", "webp")
OTHER_IMAGE_KINDS = ("bmp", "gif", "tif", "tiff", "ppm", "pgm")
"""Not read from shards, only from folders."""

LABEL_KINDS = ("cls", "json")

MAX_CLASSES = 1_000_000
"""Limit for a channel without class names: one wrong label must not make a model of any size."""

MASK_KIND = "mask.png"
READ = {*IMAGE_KINDS, *LABEL_KINDS, MASK_KIND}
"""Kinds of members that mean something."""

SCANS = 16
"""Shards whose headers are read concurrently: on a network file system most of it is waiting."""


Columns = tuple[list[int], list[int], list[int], list[int], list[int]]
"""A shard's columns: offset and length of each image; the labels; offset and length of each mask."""


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class ShardIndex:
    """Where each image lies; images are numbered through the shards in their order."""

    shards: np.ndarray
    """Bytes (shards,): file names, sorted."""
    sizes: np.ndarray
    """int64 (shards,): bytes of each file."""
    checksums: np.ndarray
    """Bytes (shards,): SHA-256 in hexadecimal; empty: not known."""
    counts: np.ndarray
    """int64 (shards,): images in each."""
    offsets: np.ndarray
    """int64 (images,): an image's first byte in its shard; the 512 bytes before are its tar header."""
    lengths: np.ndarray
    """int64 (images,): bytes of each image."""
    labels: np.ndarray = field(default_factory=_none)
    """int64 (images,): class numbers. Empty: the images have masks, or nothing."""
    mask_offsets: np.ndarray = field(default_factory=_none)
    """int64 (images,): as `offsets`. Empty: the images have no masks."""
    mask_lengths: np.ndarray = field(default_factory=_none)
    """int64 (images,)."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def names(self) -> list[str]:
        """The shards' file names."""
        return [os.fsdecode(name) for name in self.shards]

    def shard_of_image(self) -> np.ndarray:
        """int64 (images,): which shard each image lies in."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def only(self, indices: np.ndarray) -> ShardIndex:
        """The index of only these images, given by ascending indices."""
        counts = np.bincount(self.shard_of_image()[indices], minlength=len(self.counts))
        parts = {
            name: getattr(self, name)[indices]
            for name in ("offsets", "lengths", "labels", "mask_offsets", "mask_lengths")
            if len(getattr(self, name))
        }
        return replace(self, counts=counts, **parts)


def find_shards(root: Path) -> dict[str, int]:
    """The *.tar files of a folder, sorted by name, with sizes in bytes; hidden ones are left out."""
    found = [entry for entry in os.scandir(root) if entry.name.endswith(".tar") and not entry.name.startswith(".")]
    return {entry.name: entry.stat().st_size for entry in sorted(found, key=lambda entry: entry.name)}


def write_index(file: Path, index: ShardIndex) -> None:
    """Write an index; an interruption leaves no partial one under its name."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # of a killed process
    with open(temporary, "xb") as opened:
        np.savez(opened, format=FORMAT, **{part.name: getattr(index, part.name) for part in fields(index)})
    os.replace(temporary, file)


def read_index(file: Path) -> ShardIndex:
    """An index that `write_index` wrote.

    Raises:
        ValueError: it is not an index, or of another format; the message names it and the fix.
    """
    try:
        with np.load(file, allow_pickle=False) as opened:
            values = {name: opened[name] for name in opened.files}
        found = int(values.pop("format"))
        if found == FORMAT:
            return ShardIndex(**values)
        problem = f"it is of format {found}, not {FORMAT}"
    except Exception as error:  # zipfile's, numpy's and zlib's errors, KeyError, TypeError
        problem = str(error) or type(error).__name__
    raise ValueError(
        f"{file} cannot be read as an index of shards: {problem}. Remove it: the next start makes a new one from the shards"
    )


def read_classes(root: Path) -> list[str] | None:
    """The class names: classes.txt beside the shards, one per line, or classes.json, a list. None: there is neither.

    Raises:
        ValueError: the file holds no such list.
    """
    file = next((root / name for name in CLASSES if (root / name).is_file()), None)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
        # str.splitlines also divides at U+0085 and U+2028, which a name may hold
        names = text.removesuffix("\n").split("\n") if file.suffix == ".txt" else json.loads(text)
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError too
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{file}: it must list the class names in the order of their numbers, with no empty name")
    return names


def scan_shards(root: Path, shards: dict[str, int], classes: list[str] | None, *, labels: bool = True) -> ShardIndex:
    """The index of shards, from their tar headers; no image is read.

    Args:
        labels: each image has a label or a mask. False: there may be none, and none is read.

    Raises:
        ValueError: a shard is broken, or a sample lacks its label; the message names them.
    """
    # the first of equal names counts
    numbers = {name: number for number, name in reversed([*enumerate(classes or ())])}
    with ThreadPoolExecutor(SCANS) as pool:
        scanned = list(pool.map(lambda name: _scan(root / name, numbers, labels), shards))
    columns = [np.concatenate([np.array(one[part], np.int64) for one in scanned]) for part in range(5)]
    offsets, lengths, classes_of, mask_offsets, mask_lengths = columns
    counts = np.array([len(one[0]) for one in scanned], np.int64)
    if len(classes_of) and len(mask_offsets):
        name = next(name for name, one in zip(shards, scanned) if one[3])
        raise ValueError(f"{root / name} has masks (*.{MASK_KIND}), other shards have labels: keep them in two folders")
    return ShardIndex(
        shards=np.array([os.fsencode(name) for name in shards]),
        sizes=np.array(list(shards.values()), np.int64),
        checksums=np.array([b""] * len(shards)),
        counts=counts,
        offsets=offsets,
        lengths=lengths,
        labels=classes_of,
        mask_offsets=mask_offsets,
        mask_lengths=mask_lengths,
    )


def key_and_kind(member: str) -> tuple[str, str]:
    """A member's key, its path up to the first dot of its file name, and the rest in lower case.

    The convention: https://github.com/webdataset/webdataset#the-webdataset-format
    """
    folder, slash, name = member.rpartition("/")
    key, _, kind = name.partition(".")
    return folder + slash + key, kind.lower()


def _scan(file: Path, classes: Mapping[str, int], labels: bool) -> Columns:
    """The places of a shard's images."""
    columns: Columns = ([], [], [], [], [])
    sample: dict[str, tarfile.TarInfo] = {}
    current = ""  # no key of a sample
    try:
        with open(file, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:

            def close() -> None:
                if sample:
                    _add(columns, file, current, sample, opened.fileno(), classes, labels)
                sample.clear()

            for member in tar:
                key, kind = key_and_kind(member.name)
                tar.members = []  # type: ignore[attr-defined]  # not in its annotations; without it, all stay in memory
                if key.rpartition("/")[2] == "" or not (member.isreg() or kind in READ):
                    continue
                if member.islnk() or member.issym():
                    raise ValueError(
                        f"{file}: {member.name} is a link to content elsewhere: make the tar of whole files "
                        "(tar --dereference --hard-dereference)"
                    )
                if not member.isreg():
                    continue
                if key != current:
                    close()
                    current = key
                if kind in sample and kind in READ:
                    raise ValueError(f"{file}: {member.name} occurs twice: each sample needs a key of its own")
                sample[kind] = member
            close()
            _require_end(file, opened, tar.offset)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ValueError(
            f"{file} is not a complete tar: {error or type(error).__name__}. Copy or make it again"
        ) from error
    return columns


def _require_end(file: Path, opened: Any, end: int) -> None:
    """Raise a ValueError for a tar cut between members or in the last one, which tarfile takes for whole."""
    opened.seek(end)
    if opened.read(512) != bytes(512):
        raise ValueError(f"{file} is truncated: it lacks the zeros that end a tar. Copy or make it again")


def _add(
    columns: Columns,
    file: Path,
    key: str,
    sample: dict[str, tarfile.TarInfo],
    descriptor: int,
    classes: Mapping[str, int],
    labels: bool,
) -> None:
    """Append a sample, given by its members' kinds, to a shard's columns."""
    image = next((sample[kind] for kind in IMAGE_KINDS if kind in sample), None)
    if image is None and any(
        kind in (MASK_KIND, *LABEL_KINDS) or kind.rpartition(".")[2] in OTHER_IMAGE_KINDS for kind in sample
    ):
        raise ValueError(
            f"{file}: {key} has no image, only {', '.join(sample)}. Images are {', '.join('.' + kind for kind in IMAGE_KINDS)}; "
            "`launcher prepare` converts others"
        )
    dotted = _dotted_image(sample)
    if dotted is not None:
        name, _, ending = dotted.rpartition(".")
        raise ValueError(
            f"{file}: {key}.{dotted} is not an image in WebDataset, where a key ends at the first dot of its file name: rename it, "
            f"for example to {key}-{name.replace('.', '-')}.{ending}, and its label likewise"
        )
    if image is None:
        return  # no sample, such as a readme
    if labels and MASK_KIND in sample:
        columns[3].append(sample[MASK_KIND].offset_data)
        columns[4].append(sample[MASK_KIND].size)
    elif labels:
        label = next(((kind, sample[kind]) for kind in LABEL_KINDS if kind in sample), None)
        if label is None:
            raise ValueError(
                f"{file}: {key} has no label: {key}.cls with a class number, {key}.json with a label, or {key}.{MASK_KIND}. Images that "
                "nobody labelled belong in the channel unlabelled of train_kd.py"
            )
        kind, member = label
        columns[2].append(_label(file, key, kind, os.pread(descriptor, member.size, member.offset_data), classes))
    columns[0].append(image.offset_data)
    columns[1].append(image.size)


def _dotted_image(sample: dict[str, tarfile.TarInfo]) -> str | None:
    """The kind of a member meant as an image of its own, `1.jpg` of photo.1.jpg: it has a label, or the sample has no image.

    Any other, such as seg.png, is a field of the sample.
    """
    alone = not any(kind in sample for kind in IMAGE_KINDS)
    for kind in sample:
        name, dot, ending = kind.rpartition(".")
        if not dot or ending not in IMAGE_KINDS or kind == MASK_KIND:
            continue
        if alone or any(f"{name}.{label}" in sample for label in (*LABEL_KINDS, MASK_KIND)):
            return kind
    return None


def _label(file: Path, key: str, kind: str, text: bytes, classes: Mapping[str, int]) -> int:
    """A class number, from a .cls or .json member."""
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            value = value["label"]
    except (ValueError, KeyError, RecursionError):  # a class's name, in .cls without quotes
        value = text.decode("utf-8", "replace").strip() if kind == "cls" else None
    if isinstance(value, str) and value in classes:
        return classes[value]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CLASSES:
        return value
    valid = f"a class number below {MAX_CLASSES:,}, or a name of {' or '.join(CLASSES)} beside the shards"
    shape = ' as {"label": …}' if kind == "json" else ""
    raise ValueError(f"{file}: {key}.{kind} holds {text[:60]!r}, not {valid}{shape}")
