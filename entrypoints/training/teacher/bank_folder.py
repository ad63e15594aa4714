"""Where a label bank lies: in the folder that the settings name, or where the archive that a run left was unpacked.

What an archive was unpacked to is used again only where it is whole, and of that archive: SageMaker restores the files of a checkpoint
folder that it had time to copy, and a channel may hold another bank than before.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from training.data.sources.shard_cache import host_folder, locked
from training.data.storage import read_patiently
from training.distributed.world import World
from training.models.files import MAX_RATIO, SMALL, unpack
from training.runtime.environment import Environment
from training.settings.distillation import LabelBankSettings
from training.teacher.label_bank import CHECKSUMS, NO_ROOM

BANK_ARCHIVE = "model.tar.gz"
"""The label bank that a run of label_images.py left, as `inputs: {cache: {run: NAME}}` brings it."""

OWN = "teacher_cache"
"""Among the checkpoints: the bank of a job that names no other."""

UNPACKED = "unpacked_bank"
"""Among the checkpoints: the content of an archive, which the run goes on filling. OWN may hold other answers, and is left as it is."""

MARKER = ".unpacked.json"
"""In a folder with an archive's content: which archive it is of, and the sizes of its files. It is written last."""

UNFINISHED = ".bank-*"
"""Among the checkpoints: what a kill left of an archive that earlier versions were unpacking there."""

GZIP_TRAILER = 8
"""Bytes at the end of a gzip file: CRC-32 and length of its content (RFC 1952, section 2.3.1)."""

Origin = dict[str, str | int]
"""What tells an archive from others."""


def bank_folder(
    kept: LabelBankSettings, environment: Environment, world: World, full: int, *, read_only: bool = False
) -> Path:
    """The folder of the label bank. A collective.

    One that a run left comes as an archive. It is unpacked once a host: among the checkpoints, so that a restart finds what was added; or
    where it is only read, on the host's own disk, from where SageMaker copies nothing to S3, and where later runs find it.

    Args:
        full: bytes of a bank with a record of every image, for which its files have room.
        read_only: nothing will be added to the bank.

    Raises:
        ValueError: there is none, the archive is damaged, or the disk has no room for its content.
    """
    archive = None if kept.channel is None else environment.channel(kept.channel) / BANK_ARCHIVE
    if archive is None or not archive.is_file():
        return _named_folder(kept, environment)
    origin = _origin(archive)
    place = host_folder("label bank", *origin.values())
    target = place / "bank" if read_only else _folder_to_fill(archive, environment)
    limit = max(SMALL + full, MAX_RATIO * archive.stat().st_size)  # it may hold views that this run does not take

    def unpacked() -> Exception | None:
        """What kept this process from it."""
        try:
            with locked(place / "lock"):
                _remove_unfinished(environment)
                if not _is_whole(target, origin):
                    _unpack(archive, target, limit)
                    _mark(target, origin)
        except (ValueError, OSError) as error:
            return error
        return None

    problem = world.hosts_alone(unpacked)
    if not world.any(problem is not None):
        problem = unpacked()  # by now it is there, but where host_folder gives each process one of its own
    if world.any(problem is not None):
        raise problem or ValueError("another process cannot unpack its label bank; its own message says why")
    return target


def _named_folder(kept: LabelBankSettings, environment: Environment) -> Path:
    """The channel, the folder, or the one among the checkpoints: whichever the settings name."""
    if kept.channel is not None:
        return environment.channel(kept.channel)
    if kept.where is not None:
        return Path(kept.where)
    if environment.checkpoint_dir is None:
        raise ValueError(
            "teacher_cache: the job keeps no checkpoints, so set teacher_cache.where to a folder or a channel"
        )
    return environment.checkpoint_dir / OWN


def _folder_to_fill(archive: Path, environment: Environment) -> Path:
    """Where an archive is unpacked that a run adds answers to."""
    if environment.checkpoint_dir is None:
        raise ValueError(
            f"teacher_cache: {archive} is unpacked among the checkpoints, and the job keeps none: unpack it, and give the folder"
        )
    return environment.checkpoint_dir / UNPACKED


def _origin(archive: Path) -> Origin:
    """What tells an archive from others, without reading it: tar notes when files were written, so that no two runs leave the same."""
    size = archive.stat().st_size
    with open(archive, "rb") as file:
        file.seek(max(0, size - GZIP_TRAILER))
        return {"name": archive.name, "bytes": size, "gzip trailer": file.read().hex()}


def _is_whole(target: Path, origin: Origin) -> bool:
    """Whether a folder has all of an archive's content. A run that repairs a record shortens the list of checksums.

    Raises:
        OSError: storage failed for long: the folder may be whole, with answers that the archive has not.
    """
    try:
        marker = json.loads(read_patiently((target / MARKER).read_bytes, target / MARKER))
        return bool(marker["archive"] == origin) and all(
            (target / name).stat().st_size == size or name == CHECKSUMS for name, size in marker["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _unpack(archive: Path, target: Path, limit: int) -> None:
    """Unpack an archive in place of whatever part, or other archive's content, there is.

    Raises:
        ValueError: as models.files.unpack, which nothing is left of; or the disk is full.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        unpack(archive, target, limit)
    except ValueError as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM:
            fix = "free some space there, or give the job a larger compute.volume_gb"
            raise ValueError(f"no room to unpack the label bank {archive} to {target}: {fix}") from error
        raise


def _mark(target: Path, origin: Origin) -> None:
    """Note whose content a folder has, once all of it is on the disk."""
    sizes = {}
    for file in sorted(path for path in target.rglob("*") if path.is_file()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        sizes[file.relative_to(target).as_posix()] = file.stat().st_size
    (target / MARKER).write_text(json.dumps({"archive": origin, "files": sizes}, indent=2), encoding="utf-8")


def _remove_unfinished(environment: Environment) -> None:
    """Free the room of an archive that nobody goes on unpacking."""
    if environment.checkpoint_dir is not None:
        for folder in environment.checkpoint_dir.glob(UNFINISHED):
            shutil.rmtree(folder, ignore_errors=True)
