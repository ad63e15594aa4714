"""Images in tar shards of the WebDataset convention, TARGET/train/train-00000.tar …, with an index and the list of classes.

The contents of all shards are planned first, so any number of processes writes them in any order, and an interrupted
preparation continues with the missing ones. Each shard is read again after it is written.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import random
import re
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from pydantic import PositiveInt, TypeAdapter
from typing_extensions import TypedDict

from launcher.config.issues import UserError
from launcher.planner.made_folders import SPLITS
from launcher.prepare.entry_rules import entry_rules
from launcher.prepare.processes import Advance, spread
from launcher.prepare.samples import Encoding, Sample, encode, reason
from launcher.prepare.state import SHARDS, read_state
from launcher.record.checksum import sha256
from launcher.record.records import write_atomically, write_json

TRIED = 64
"""Images of a split encoded to estimate the mean size."""

HEADERS = 2 * 512
"""Bytes of the tar headers of an image and its class or mask."""

PlanShape = TypedDict("PlanShape", {"images of a shard": dict[str, PositiveInt]})


class RecordShape(TypedDict):
    """The record of a written shard."""

    size: int
    sha256: str
    offsets: list[int]
    lengths: list[int]
    labels: list[int]
    mask_offsets: list[int]
    mask_lengths: list[int]
    broken: dict[int, str]
    """Index in the split -> why it cannot be read. No names: the next call may spell the source differently."""


PLAN, RECORD = TypeAdapter(PlanShape), TypeAdapter(RecordShape)


@dataclass(frozen=True)
class _Shard:
    """A planned shard."""

    split: str
    name: str
    first: int
    """The index of its first image."""
    samples: list[Sample]


def write(
    samples: list[Sample], target: Path, encoding: Encoding, size: float, jobs: int, advance: Advance
) -> tuple[int, dict[str, str]]:
    """Write the shards that do not exist yet, then the indices.

    Args:
        size: approximate bytes of a shard.

    Returns:
        The number of images written, and source -> reason of broken ones.
    """
    classes = sorted({sample.label for sample in samples if sample.label is not None})
    (target / SHARDS).mkdir(exist_ok=True)
    shards = _plan(samples, target, encoding, size)
    missing = [shard for shard in shards if not _is_there(target, shard, encoding)]
    advance(len(samples) - sum(len(shard.samples) for shard in missing))
    for split in {shard.split for shard in shards}:
        (target / split).mkdir(exist_ok=True)
    written = sum(spread(partial(_write_shard, target, encoding, classes), missing, jobs, advance))
    broken: dict[str, str] = {}
    for split in SPLITS:
        own = [shard for shard in shards if shard.split == split]
        if own:
            for left_over in (target / split).glob(".*.part"):  # of a killed process
                left_over.unlink(missing_ok=True)
            broken |= _write_index(target, split, own, classes)
    return written, broken


def _plan(samples: list[Sample], target: Path, encoding: Encoding, size: float) -> list[_Shard]:
    """The images of each shard: shuffled, so that each is a fair sample of its split, and the same at every call for a target."""
    file = target / SHARDS / "plan.json"
    shards, images_of_shard = [], (read_state(file, target, PLAN) or {"images of a shard": {}})["images of a shard"]
    for split in SPLITS:
        own = [sample for sample in samples if sample.split == split]
        random.Random(f"shards/{split}").shuffle(own)
        if own and split not in images_of_shard:
            images_of_shard[split] = _images_of_shard(own, encoding, size)
        for index, first in enumerate(range(0, len(own), images_of_shard.get(split, 1))):
            inside = own[first : first + images_of_shard[split]]
            shards.append(_Shard(split, f"{split}-{index:05d}.tar", first, inside))
    write_json(file, {"images of a shard": images_of_shard})
    return shards


def _images_of_shard(samples: list[Sample], encoding: Encoding, size: float) -> int:
    """Images per shard of about `size` bytes, from the mean size of some. A split's shards have equally many images."""
    sizes = []
    for sample in samples[:TRIED]:
        try:
            files = encode(sample, encoding)
        except ValueError:
            continue
        sizes.append(HEADERS + sum(-(-len(data) // 512) * 512 for data in (files[0], files[1] or b"0")))
    if not sizes:
        return len(samples)
    shards = math.ceil(len(samples) * sum(sizes) / len(sizes) / size)
    return math.ceil(len(samples) / shards)


def _is_there(target: Path, shard: _Shard, encoding: Encoding) -> bool:
    """Whether a shard and its record are there. Both are written again if the record is damaged, or an image that was left out can be
    read now."""
    file = target / shard.split / shard.name
    try:
        record = read_state(_record(target, shard), target, RECORD)
    except UserError:
        return False
    if record is None or not file.is_file() or record["size"] != file.stat().st_size:
        return False
    places = [index - shard.first for index in record["broken"]]
    if not all(0 <= place < len(shard.samples) for place in places):
        return False
    return not any(_is_readable(shard.samples[place], encoding) for place in places)


def _is_readable(sample: Sample, encoding: Encoding) -> bool:
    try:
        encode(sample, encoding)
    except ValueError:
        return False
    return True


def _record(target: Path, shard: _Shard) -> Path:
    return target / SHARDS / f"{shard.name}.json"


def _write_shard(target: Path, encoding: Encoding, classes: list[str], shard: _Shard, advance: Advance) -> int:
    """Write a shard, read it again, and write its record.

    Returns:
        The number of its images.
    """
    file = target / shard.split / shard.name
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    columns: dict[str, list[int]] = {"offsets": [], "lengths": [], "labels": [], "mask_offsets": [], "mask_lengths": []}
    broken: dict[int, str] = {}
    temporary.unlink(missing_ok=True)  # of a killed process, or a link
    with open(temporary, "xb") as opened:
        hashed = _Hashed(opened)
        with tarfile.TarFile(
            temporary,
            "w",
            fileobj=hashed,  # type: ignore[arg-type]  # a sequential write needs write and tell only
            format=tarfile.USTAR_FORMAT,
        ) as tar:
            for index, sample in enumerate(shard.samples, start=shard.first):
                try:
                    image, mask = encode(sample, encoding)
                except ValueError as error:
                    broken[index] = reason(sample, error)
                else:
                    key = _key(index, sample)
                    columns["offsets"].append(_add(tar, key + sample.suffix, image))
                    columns["lengths"].append(len(image))
                    if sample.label is not None:
                        label = classes.index(sample.label)
                        columns["labels"].append(label)
                        _add(tar, f"{key}.cls", str(label).encode())
                    if mask is not None:
                        columns["mask_offsets"].append(_add(tar, f"{key}.mask.png", mask))
                        columns["mask_lengths"].append(len(mask))
                advance(1)
    size, checksum = temporary.stat().st_size, hashed.sha256.hexdigest()
    _read_again(temporary, size, checksum, columns)
    record = {"size": size, "sha256": checksum, **columns, "broken": broken}
    write_json(_record(target, shard), record)
    os.replace(temporary, file)
    return len(columns["offsets"])


class _Hashed:
    """A file that is written in sequence, with the checksum of the data passed to it."""

    def __init__(self, file: IO[bytes]):
        self.sha256, self._file = hashlib.sha256(), file
        self.tell = file.tell

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _key(index: int, sample: Sample) -> str:
    """A sample's key: unique in its split, sorted by index, with its source's name."""
    name = f"{sample.label or ''}-{sample.stem}"
    return f"{index:08d}-{re.sub(r'[^A-Za-z0-9_]+', '-', name).strip('-')[:60]}"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Append a member; returns the offset of its data."""
    member = tarfile.TarInfo(name)  # without date and owner, so that shards are reproducible
    member.size, member.mode = len(data), 0o644
    begins = tar.offset + 512
    tar.addfile(member, io.BytesIO(data))
    tar.members = []  # type: ignore[attr-defined]  # undocumented; otherwise it keeps every member
    return begins


def _read_again(file: Path, size: int, checksum: str, columns: dict[str, list[int]]) -> None:
    """Compare a shard on disk with what was written, and its scan with the index."""
    with open(file, "rb") as opened:
        on_disk = sha256(opened)
    index = entry_rules().shard_index.scan_shards(
        file.parent, {file.name: size}, None, labels=bool(columns["labels"] or columns["mask_offsets"])
    )
    if on_disk != checksum or any(getattr(index, name).tolist() != values for name, values in columns.items()):
        raise OSError(f"{file} does not hold what was written to it: the disk or the memory is faulty")


def _write_index(target: Path, split: str, shards: list[_Shard], classes: list[str]) -> dict[str, str]:
    """Write a split's index and classes from its shards' records. Returns source -> reason of broken images."""
    import numpy as np

    rules, folder = entry_rules().shard_index, target / split
    records = [RECORD.validate_json(_record(target, shard).read_bytes()) for shard in shards]
    columns = {
        name: np.array([value for record in records for value in record[name]], np.int64)
        for name in ("offsets", "lengths", "labels", "mask_offsets", "mask_lengths")
    }
    index = rules.ShardIndex(
        shards=np.array([shard.name.encode() for shard in shards]),
        sizes=np.array([record["size"] for record in records], np.int64),
        checksums=np.array([record["sha256"].encode() for record in records]),
        counts=np.array([len(record["offsets"]) for record in records], np.int64),
        **columns,
    )
    rules.write_index(folder / rules.INDEX, index)
    if classes:
        write_atomically(folder / rules.CLASSES[0], "".join(f"{name}\n" for name in classes))
    return {
        shard.samples[index - shard.first].source: why
        for shard, record in zip(shards, records)
        for index, why in record["broken"].items()
    }
