"""The teacher cache: reads and fills a label bank, so that each view of an image passes through the teacher once across all runs.

A record whose checksum fails counts as missing, whether unwritten, torn by a kill or damaged later, and is computed again. So there is no
index to repair and no write order to keep.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from training.data.batches import LabelledBatch, MaskedBatch
from training.distributed.world import World
from training.runtime import accelerator
from training.runtime.environment import processes_on_host
from training.runtime.reporting import write_line
from training.teacher.bank_identity import identity_of, require_same
from training.teacher.cache_filling import Filling
from training.teacher.label_bank import (
    MANIFEST,
    NO_ROOM,
    PIECE,
    Seal,
    ViewFile,
    key_of,
    read_checksums,
    read_manifest,
    sha256_of,
    view_file,
    write_checksums,
    write_manifest,
)
from training.teacher.logit_records import Output
from training.teacher.missing import MissingAnswers
from training.teacher.pixel_records import Layout

Batch = LabelledBatch | MaskedBatch

READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that are read-only or cannot write within a file, such as mounted S3 buckets."""


class TeacherCache:
    """One teacher's answers for one data set and one augmentation.

    Every process of a run holds an instance. In an epoch with missing records, all ranks exchange what their teachers compute, and
    one rank per folder writes it: `where` is each host's own folder, or one that all hosts share. An epoch that finds all its
    records runs no teacher and has no collective.
    """

    def __init__(
        self,
        where: Path,
        identity: Mapping[str, Any],
        layout: Layout,
        images: int,
        views: int,
        world: World,
        stand_in: Callable[[int], int],
        drawn: int,
    ):
        self.where, self.layout, self.images, self.views, self.world = where, layout, images, views, world
        self.drawn = drawn
        self._seal = Seal(key_of(identity), layout.size)
        self.missing = MissingAnswers(self._seal, stand_in)
        """Finds images without an answer in a view."""
        self._files: dict[int, ViewFile] = {}
        """Open files of the views that this epoch draws."""
        self._filling = Filling(layout, world)
        self._changed: set[int] = set()
        """Views that this process has written to, whose checksums were removed."""
        self.writable = self.complete = False
        self._writes = self._exchanged = self._lacks_room = False
        self.hits = self.misses = 0
        """Images of this rank whose records were found, and those that passed through the teacher."""

    @classmethod
    def open(
        cls,
        where: Path,
        *,
        parts: Mapping[str, str],
        images: int,
        layout: Layout,
        views: int,
        world: World,
        stand_in: Callable[[int], int] = int,
        drawn: int | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> TeacherCache:
        """Open the cache in a folder, or create one there. A collective.

        Args:
            where: this host's own folder, or one that all share; read-only is fine if it holds all `views`.
            parts: hashes or names of everything the logits depend on: "teacher weights", "transform", "data", "dtype".
            images: number of training images.
            drawn: how many of them one view draws. None: all.
            views: reproducible variations of each image.
            stand_in: maps a drawn image to the one used: itself, or another if it is broken.
            about: further entries of a new manifest; no record depends on them.
            layout: how an answer is stored.

        Raises:
            ValueError: the folder holds other logits, its disk is too small, or it is read-only and incomplete; the message names
                what differs or is missing, and the fix.
        """
        identity = identity_of(parts, images, layout)
        cache, problem = cls(where, identity, layout, images, views, world, stand_in, drawn or images), None
        try:
            cache._set_up(identity, {"torch": torch.__version__, "images a view": cache.drawn, **about})
        except (ValueError, OSError) as error:
            problem = error
        if world.any(problem is not None):  # together: no rank waits for one that has left
            raise problem or ValueError("another process cannot use its label bank; its own message says why")
        cache._exchanged, sees_the_first = world.any(cache.writable), cache._sees_the_first()
        cache._writes = cache.writable and world.is_first_on_host and (world.is_first or not sees_the_first)
        return cache

    @property
    def size_bytes(self) -> int:
        """Bytes of the cache with all its views."""
        return self.views * self.drawn * self.layout.size

    def summary(self) -> str:
        """Log line: what is kept, where, and its final size."""
        return (
            f"label bank {self.where}: {self.views} view{'s' if self.views > 1 else ''} of {self.drawn:,} images, {self.layout.about()}: "
            f"{self.layout.size:,} bytes each, {_readable(self.size_bytes)} in all; "
            + (
                f"{_readable(shutil.disk_usage(self.where).free)} are free there"
                if self.writable
                else "it is read-only: missing answers are computed on every pass and not stored"
            )
        )

    def begin_epoch(self, views: Sequence[int], indices: np.ndarray | torch.Tensor | list[int]) -> bool:
        """Open views and check whether they hold every record that an epoch will draw. A collective.

        Args:
            views: from 1 to `views`.
            indices: of the images for which this rank will draw these views, in any shape and order.

        Returns:
            Whether all ranks found all their records, so that the epoch needs no teacher.
        """
        assert views and all(1 <= view <= self.views for view in views), f"{[*views]} of {self.views} views"
        self.world.hosts_alone(self.sync)
        self.close()
        self.world.any(False)  # all writers are done
        size, self._changed = self.layout.size, set()
        for view in views:
            self._files[view] = ViewFile(view_file(self.where, view), self.images, size, self.writable)
        images = np.unique(np.asarray(indices, dtype=np.int64))
        missing = any(self.missing.any(self._files[view], view, images) for view in views)
        self.complete = self.world.all(not missing)
        return self.complete

    def answers(self, batch: Batch, teacher: Callable[[torch.Tensor], Output]) -> Output:
        """The teacher's answers for a batch, float32 on the device of its images, rounded as records are.

        Computed answers are rounded too, so that a killed run resumes with the same numbers. For the same reason, a batch with any
        missing record passes through the teacher whole: with another batch size, a library may sum in another order.

        If `complete` is false, this is a collective: every rank calls it equally often, with batches of one size.

        Args:
            batch: its indices and views are on the CPU; the views are among those of `begin_epoch`.
            teacher: uint8 images (batch, channels, height, width) -> what the layout packs.

        Returns:
            What the layout decodes.

        Raises:
            ValueError: the answers for an earlier batch are not finite.
            OSError: storage fails. A full disk does not raise: records are missing, and training goes on.
        """
        records, held = self._read(batch)
        missing, draws = ~held, self._draws(batch)
        absent = int(missing.sum())
        self.hits, self.misses = self.hits + len(draws) - absent, self.misses + absent
        device = batch.images.device
        if not absent:
            found = self.layout.decode(records, device)
            if not self.complete and self._exchanged:  # the others may have computed something
                nothing = torch.zeros((len(draws), self.layout.width), dtype=torch.uint8, device=device)
                self._filling.add(nothing, draws, missing, self._write_where_room if self._writes else None, True)
            return found
        packed = self.layout.pack(teacher(batch.images))
        if not self.complete and self._exchanged:
            self._filling.add(packed, draws, missing, self._write_where_room if self._writes else None, True)
        elif self.writable:  # damaged since the epoch began: the other ranks do not know
            self._filling.add(packed, draws, missing, self._write_where_room, False)
        computed = self.layout.rounded(packed)
        if absent == len(draws):
            return computed
        records[missing] = 0  # a damaged class number may be out of range
        is_missing = accelerator.pinned(torch.from_numpy(missing), device).to(device, non_blocking=True)
        return _chosen(is_missing, computed, self.layout.decode(records, device))

    def lacking(self, view: int, batches: np.ndarray) -> np.ndarray:
        """Which batches, int64 (batches, images), hold an image whose record of a view is missing in any host's folder: bool (batches,).

        A collective; each process of a host checks its share. A broken image has no record of its own, so its batch always counts.
        """
        step, here = max(1, PIECE // (self.layout.size * batches.shape[1])), processes_on_host()
        found, own = np.zeros(len(batches), np.float32), np.arange(self.world.local_rank % here, len(batches), here)
        for first in range(0, len(own), step):
            part = own[first : first + step]
            _, held = self._read_view(view, batches[part].ravel())
            found[part] = ~held.reshape(batches[part].shape).all(1)
        counts = torch.from_numpy(found).to(self.world.device)
        lacks: np.ndarray = (self.world.all_reduce_sum(counts) > 0).cpu().numpy()
        return lacks

    def fill(self, batch: Batch, teacher: Callable[[torch.Tensor], Output]) -> None:
        """Store the teacher's answers for a batch, replacing any there. A collective, like `answers` if `complete` is false.

        Raises:
            ValueError: as `answers`.
            OSError: storage fails or is full.
        """
        draws = self._draws(batch)
        packed = self.layout.pack(teacher(batch.images))
        all_of_them = np.ones(len(draws), np.bool_)
        self._filling.add(packed, draws, all_of_them, self._write if self._writes else None, True)
        self.misses += len(draws)

    def complete_view(self) -> None:
        """Record the SHA-256 of the open view's file, which will not change any more. A collective."""
        self.world.hosts_alone(self.sync)
        self.world.any(False)  # all writers are done
        self.world.hosts_alone(self._write_checksum)

    def _write_checksum(self) -> None:
        if self._writes:
            (file,) = self._files.values()
            write_checksums(self.where, {**read_checksums(self.where), file.path.name: sha256_of(file.path)})

    def sync(self) -> None:
        """Flush written records to disk, before a checkpoint relies on them."""
        self._filling.settle()
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the views' files; `begin_epoch` opens others."""
        self.sync()
        while self._files:
            self._files.popitem()[1].close()

    def _set_up(self, identity: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write or check the manifest; check whether this host can write here and has room.

        Raises:
            ValueError: as `open`.
        """
        if not (self.where / MANIFEST).is_file():
            with _cannot_begin(self.where):
                self.where.mkdir(parents=True, exist_ok=True)
                self._require_room()  # before the manifest, which would refuse a smaller top_k
                write_manifest(self.where, identity, self.layout, about)
        fix = "set another teacher_cache.where, or delete that folder"
        require_same(self.where, read_manifest(self.where), identity, about, fix)
        self.writable = _can_write(self.where, view_file(self.where, 1))
        if self.writable:
            self._require_room()
        else:
            self._require_views()

    def _require_views(self) -> None:
        lacking = [view for view in range(1, self.views + 1) if not view_file(self.where, view).is_file()]
        if lacking:
            raise ValueError(
                f"the label bank in {self.where} is read-only and holds {self.views - len(lacking)} of {self.views} views: "
                f"set teacher_cache.views to at most {lacking[0] - 1}, or fill one in a writable folder"
                if lacking[0] > 1
                else f"the label bank in {self.where} is read-only and empty: fill one in a writable folder"
            )

    def _require_room(self) -> None:
        each = self.drawn * self.layout.size
        needed = sum(max(0, each - _allocated(view_file(self.where, view))) for view in range(1, self.views + 1))
        free = shutil.disk_usage(self.where).free
        if needed > free:
            raise ValueError(
                f"the label bank will take {_readable(needed)} more in {self.where}, which has {_readable(free)} free: set a "
                "smaller teacher_cache.top_k or fewer views, another teacher_cache.where, or a larger compute.volume_gb"
            )

    def _draws(self, batch: Batch) -> np.ndarray:
        """A number for each image of a batch and its view: int64 (batch,)."""
        draws: np.ndarray = batch.views.numpy() * self.images + batch.indices.numpy()
        return draws

    def _read(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The records of a batch, uint8 (batch, record size), and which are valid: bool (batch,)."""
        indices, views = batch.indices.numpy(), batch.views.numpy()
        records, held = np.empty((len(indices), self.layout.size), np.uint8), np.empty(len(indices), np.bool_)
        for view in np.unique(views).tolist():
            places = np.flatnonzero(views == view)
            records[places], held[places] = self._read_view(view, indices[places])
        return records, held

    def _read_view(self, view: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The records of images in one view, uint8 (images, record size), and which are valid: bool (images,)."""
        assert view in self._files, f"view {view} is none that begin_epoch opened"
        records = self._files[view].read(indices)
        return records, self._seal.holds(records, indices, view)

    def _write(self, records: np.ndarray, draws: np.ndarray) -> None:
        """Seal and write records, in the thread that fills the cache."""
        views, indices = np.divmod(draws, self.images)
        for view in np.unique(views).tolist():
            file, places = self._files[view], np.flatnonzero(views == view)
            if view not in self._changed:
                self._forget_checksum(file)
                self._changed.add(view)
            own = np.ascontiguousarray(records[places])
            self._seal.close(own, indices[places], view)
            file.write(own, indices[places])

    def _write_where_room(self, records: np.ndarray, draws: np.ndarray) -> None:
        """`_write` during training, which can do without: the next epoch asks the teacher again. A checkpoint that is being written
        beside the bank may fill the disk for a moment."""
        try:
            self._write(records, draws)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._lacks_room:
                write_line(
                    f"WARNING: no room for the label bank in {self.where}: training continues, but those answers are not stored"
                )
            self._lacks_room = True

    def _forget_checksum(self, file: ViewFile) -> None:
        """Remove the checksum of a view's file that is about to change."""
        checksums = read_checksums(self.where)
        if checksums.pop(file.path.name, None) is not None:
            write_checksums(self.where, checksums)

    def _sees_the_first(self) -> bool:
        """Whether `where` is rank 0's folder too, as on FSx, where hosts that write to one file wait for each other. A collective."""
        name = b"-"
        with contextlib.ExitStack() as stack:
            if self.world.is_first and self.writable:
                token = stack.enter_context(tempfile.NamedTemporaryFile(dir=self.where, prefix=".shared-"))
                name = Path(token.name).name.encode()
            name = self.world.broadcast_bytes(name if self.world.is_first else None)
            sees = (self.where / name.decode()).exists()
            self.world.any(sees)  # all have looked
        return sees


def _chosen(first: torch.Tensor, one: Output, other: Output) -> Output:
    """`one`'s answers where `first`, bool (batch,), is true; elsewhere `other`'s."""

    def of(own: torch.Tensor, its: torch.Tensor) -> torch.Tensor:
        return torch.where(first.reshape(-1, *[1] * (own.ndim - 1)), own, its)

    if isinstance(one, tuple) and isinstance(other, tuple):
        return of(one[0], other[0]), of(one[1], other[1])
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor), "one layout made both"
    return of(one, other)


@contextlib.contextmanager
def _cannot_begin(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{where} holds no label bank, and none can be created there ({error.strerror or error}): set teacher_cache.where to "
            "a folder on a disk or FSx, or to one that holds a bank"
        ) from error


def _can_write(where: Path, path: Path) -> bool:
    """Whether a folder accepts new files and writes within `path`, which is created if needed."""
    try:
        with tempfile.TemporaryFile(dir=where):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        return False
    return True


def _allocated(path: Path) -> int:
    """Bytes that a file takes on disk; 0 if it does not exist."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
