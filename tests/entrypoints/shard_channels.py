"""Channels of small shards, and a disk for copies of them."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image
from training.data.sources.shard_index import INDEX, find_shards, scan_shards, write_index
from training.distributed.world import World
from training.settings.scripts import LabelledImageSettings


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


def settings(**values) -> LabelledImageSettings:
    return LabelledImageSettings(**{"image_size": 8, "global_batch_size": 8, **values})


def picture(number: int, size: tuple[int, int] = (9, 8)) -> bytes:
    """A PNG of one grey, which tells its number."""
    file = io.BytesIO()
    Image.new("L", size, number % 256).save(file, "PNG")
    return file.getvalue()


def write_shard(file: Path, members: dict[str, bytes] | list[tuple[str, bytes | str]]) -> None:
    """A shard of some files; a text in place of bytes makes a hard link to another member."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.LNKTYPE, data
                tar.addfile(member)
                continue
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_channel(root: Path, *counts: int, classes: int = 3) -> Path:
    """Shards, each of a given number of pictures, numbered throughout; their class is their number modulo `classes`."""
    number = 0
    for shard, count in enumerate(counts):
        members = {}
        for _ in range(count):
            members[f"{number:04d}.png"], members[f"{number:04d}.cls"] = picture(number), b"%d" % (number % classes)
            number += 1
        write_shard(root / f"part-{shard:x}.tar", members)
    (root / "classes.txt").write_text("".join(f"class {label}\n" for label in range(classes)))
    return root


def disk_at(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(gettempdir=lambda: str(folder), TemporaryDirectory=tempfile.TemporaryDirectory)


def indexed(root: Path) -> Path:
    """A channel with its index beside it."""
    write_index(root / INDEX, scan_shards(root, find_shards(root), None))
    return root
