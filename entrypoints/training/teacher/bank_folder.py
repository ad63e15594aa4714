"""Finds a label bank's folder: the one that the settings name, or the one into which a run's archive was unpacked.

An unpacked folder is reused only if it is complete and came from this archive: SageMaker restores only those files of a checkpoint folder
that it had time to copy, and a channel may hold another bank than before.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from training.data.sources.shard_cache import host_folder, locked
from training.data.storage import read_with_retries
from training.distributed.world import World
from training.models.files import MAX_RATIO, SMALL, unpack
from training.runtime.environment import Environment
from training.settings.distillation import LabelBankSettings
from training.teacher.label_bank import CHECKSUMS, NO_ROOM

BANK_ARCHIVE = "model.tar.gz"
"""The label bank that a run of label_images.py left, as `inputs: {cache: {run: NAME}}` provides it."""

OWN = "teacher_cache"
"""In the checkpoint folder: the bank of a job that names no other."""

UNPACKED = "unpacked_bank"
"""In the checkpoint folder: an unpacked archive, which the run goes on filling. OWN may hold other answers and is left as it is."""

MARKER = ".unpacked.json"
"""In an unpacked folder: which archive it came from, and the sizes of its files. Written last."""

UNFINISHED = ".bank-*"
"""In the checkpoint folder: left by earlier versions that were killed while unpacking an archive there."""

GZIP_TRAILER = 8
"""Bytes at the end of a gzip file: CRC-32 and length of its content (RFC 1952, section 2.3.1)."""

Origin = dict[str, str | int]
"""What identifies an archive."""


def bank_folder(
    kept: LabelBankSettings, environment: Environment, world: World, full: int, *, read_only: bool = False
) -> Path:
    """The folder of the label bank. A collective.

    A bank that a run left comes as an archive, unpacked once per host: into the checkpoint folder, so that a restart finds what was added;
    or, if it is only read, onto the host's own disk, from which SageMaker copies nothing to S3, and where later runs find it.

    Args:
        full: bytes of a bank with a record of every image, the apparent size of its files.
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
        """The error that kept this process from unpacking, if any."""
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
        problem = unpacked()  # already there, unless host_folder gives each process its own folder
    if world.any(problem is not None):
        raise problem or ValueError("another process cannot unpack its label bank; its own message says why")
    return target


def _named_folder(kept: LabelBankSettings, environment: Environment) -> Path:
    """The channel, the named folder, or the one in the checkpoint folder: whichever the settings choose."""
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
    """Where to unpack an archive that the run adds answers to."""
    if environment.checkpoint_dir is None:
        raise ValueError(
            f"teacher_cache: {archive} is unpacked among the checkpoints, and the job keeps none: unpack it, and give the folder"
        )
    return environment.checkpoint_dir / UNPACKED


def _origin(archive: Path) -> Origin:
    """What identifies an archive, without reading it all: tar stores modification times, so no two runs leave the same archive."""
    size = archive.stat().st_size
    with open(archive, "rb") as file:
        file.seek(max(0, size - GZIP_TRAILER))
        return {"name": archive.name, "bytes": size, "gzip trailer": file.read().hex()}


def _is_whole(target: Path, origin: Origin) -> bool:
    """Whether a folder holds all of an archive's content. CHECKSUMS may differ: a run that repairs a record shortens it.

    Raises:
        OSError: storage kept failing: the folder may be complete, with answers that the archive lacks.
    """
    try:
        marker = json.loads(read_with_retries((target / MARKER).read_bytes, target / MARKER))
        return bool(marker["archive"] == origin) and all(
            (target / name).stat().st_size == size or name == CHECKSUMS for name, size in marker["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _unpack(archive: Path, target: Path, limit: int) -> None:
    """Unpack an archive, replacing any partial or other content.

    Raises:
        ValueError: as models.files.unpack, leaving nothing behind; or the disk is full.
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
    """Write the marker, once all of the folder's content is on disk."""
    sizes = {}
    for file in sorted(path for path in target.rglob("*") if path.is_file()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        sizes[file.relative_to(target).as_posix()] = file.stat().st_size
    (target / MARKER).write_text(json.dumps({"archive": origin, "files": sizes}, indent=2), encoding="utf-8")


def _remove_unfinished(environment: Environment) -> None:
    """Remove what interrupted unpackings left, which nobody will finish."""
    if environment.checkpoint_dir is not None:
        for folder in environment.checkpoint_dir.glob(UNFINISHED):
            shutil.rmtree(folder, ignore_errors=True)
