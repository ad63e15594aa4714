"""Labelled images in tar shards of the WebDataset convention, read at any place, so that a run can resume within an epoch.

The webdataset library streams: it neither resumes within an epoch nor keeps an order at another number of processes
(https://github.com/webdataset/webdataset/issues/271). MosaicML's and Lightning's readers need formats of their own. So shards
follow the convention, and are read here.
"""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from training.data.batches import Announce
from training.data.orders import ShardOrder
from training.data.sources.shard_cache import ReadAhead, ShardCache, host_folder, locked
from training.data.sources.shard_index import (
    CLASSES,
    INDEX,
    MAX_CLASSES,
    ShardIndex,
    find_shards,
    read_classes,
    read_index,
    scan_shards,
    write_index,
)
from training.data.storage import StorageError, read_with_retries

HEADER = 512
"""Bytes of a member's header, which precedes it (POSIX ustar)."""

MAX_HEADERS = 1000
"""Headers that are kept, for messages about images that were just read."""


MAX_OPEN = 256
"""Shards that a channel keeps open: three channels fit into the 1,024 files of a usual limit (RLIMIT_NOFILE)."""


@dataclass(frozen=True)
class ShardReading:
    """How shards are read."""

    window: int = 32
    """Shards among which images are shuffled."""
    streamed: bool = False
    """Whether each read goes to S3, so that whole shards are copied to the disk first."""
    cache_bytes: int | None = None
    """Limit of all copies on a host. None: half of what is free."""
    sharing: int = 1
    """Channels that share this limit."""


class ShardFiles:
    """Shards and their index, with random access for any number of threads and processes.

    Attributes:
        asks_for_labels: whether each image has a label or a mask.
        index: where each image lies.
        order: how images are shuffled.
        notes: the choices made in opening them, with reasons.
    """

    asks_for_labels = True

    def __init__(self, root: Path, reading: ShardReading):
        """Open the index; no image is read.

        Raises:
            ValueError: a shard is missing, broken or not in the index, or there are no images.
        """
        self.root, self._reading = root, reading
        sizes = find_shards(root)
        self.notes: list[str] = []
        self.index = self._open_index(sizes)
        self.order = ShardOrder(self.index.counts, reading.window)
        self._names = self.index.names
        self._files: dict[int, _OpenFile] = {}
        self._headers: dict[tuple[int, int], bytes] = {}
        """Headers of recently read members, by shard and offset."""
        self._starts = np.cumsum(self.index.counts).tolist()
        self._cache = ShardCache(root, sizes, reading.cache_bytes, reading.sharing) if reading.streamed else None
        self._describe(sizes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}, "_headers": {}}

    def __len__(self) -> int:
        return len(self.index)

    def image(self, index: int) -> bytes:
        """An image file.

        Raises:
            ValueError: it cannot be read; the message names it.
            StorageError: storage keeps failing.
        """
        return self._read(index, int(self.index.offsets[index]), int(self.index.lengths[index]))

    def mask(self, index: int) -> bytes:
        """A mask file, as `image`."""
        return self._read(index, int(self.index.mask_offsets[index]), int(self.index.mask_lengths[index]))

    def name(self, index: int) -> str:
        """Shard and member of an image, from its tar header."""
        return self._member(index, int(self.index.offsets[index]))

    def mask_name(self, index: int) -> str:
        """Shard and member of a mask."""
        return self._member(index, int(self.index.mask_offsets[index]))

    def digest(self) -> str:
        """SHA-256 of the shards' names, sizes and checksums, and of the places of their images."""
        found = hashlib.sha256()
        for name in ("shards", "sizes", "checksums", "counts", "offsets", "lengths", "labels", "mask_offsets"):
            found.update(np.ascontiguousarray(getattr(self.index, name)).tobytes())
        return found.hexdigest()

    def listing(self) -> str:
        """As `digest`, which reads no shard."""
        return self.digest()

    def announce(self) -> Announce | None:
        """A function that takes the images that an epoch will draw and copies their shards ahead. None: shards are read in place."""
        if self._cache is None:
            return None
        return ReadAhead(self._cache, self._names, self.index.shard_of_image())

    def _member(self, index: int, offset: int) -> str:
        shard = bisect_right(self._starts, index)
        header = self._headers.get((shard, offset))
        if header is None:
            try:
                header = self._pread(shard, offset - HEADER, HEADER)
            except OSError:
                header = b""
        folder, name = (os.fsdecode(part.split(b"\0")[0]) for part in (header[345:500], header[:100]))
        inside = f"{folder}/{name}" if folder and header[257:263] == b"ustar\0" else name
        return f"{self.root / self._names[shard]}: {inside or f'image {index}'}"

    def _read(self, index: int, offset: int, length: int) -> bytes:
        shard = bisect_right(self._starts, index)
        try:
            # with the name in the header before it, which then costs no read of its own
            found = self._pread(shard, offset - HEADER, HEADER + length)
        except StorageError:
            raise
        except OSError as error:
            raise ValueError(f"{self._member(index, offset)} cannot be read: {error.strerror or error}") from error
        if len(found) < HEADER + length:
            raise ValueError(
                f"{self.root / self._names[shard]} ends within image {index}: it has changed since the start. Copy it again"
            )
        if len(self._headers) >= MAX_HEADERS:
            self._headers.clear()
        self._headers[shard, offset] = found[:HEADER]
        return found[HEADER:]

    def _pread(self, shard: int, offset: int, length: int) -> bytes:
        return read_with_retries(partial(self._pread_once, shard, offset, length), self.root / self._names[shard])

    def _pread_once(self, shard: int, offset: int, length: int) -> bytes:
        file, found = self._opened(shard), b""
        try:
            while len(found) < length:  # a file system in user space may return less
                part = os.pread(file.descriptor, length - len(found), offset + len(found))
                if not part:
                    break
                found = found + part if found else part
        except OSError:
            self._files.pop(shard, None)  # a mount that is back has new handles (ESTALE)
            raise
        return found

    def _opened(self, shard: int) -> _OpenFile:
        """A shard's file, opened once. No lock: a fork can come at any time, and a dict needs none."""
        file = self._files.get(shard)
        if file is None:
            file, most = self._open(self._names[shard]), min(2 * self._reading.window, MAX_OPEN)
            for other, opened in list(self._files.items()):
                if len(self._files) >= most or _is_gone(opened.descriptor):
                    self._files.pop(other, None)
            self._files[shard] = file
        return file

    def _open(self, name: str) -> _OpenFile:
        if self._cache is not None:
            for _ in range(3):
                try:
                    return _OpenFile(self._cache.copy_of(name))
                except FileNotFoundError:  # removed before it was opened
                    continue
        return _OpenFile(self.root / name)

    def _open_index(self, sizes: dict[str, int]) -> ShardIndex:
        """The index beside the shards, or one made from them."""
        if not (self.root / INDEX).is_file():
            return self._made_index(sizes)
        index = read_index(self.root / INDEX)
        expected = dict(zip(index.names, index.sizes.tolist()))
        problems = [f"{name} is missing" for name in expected if name not in sizes]
        problems += [f"{name} is not in the index" for name in sizes if name not in expected]
        problems += [
            f"{name} has {sizes[name]:,} bytes, not {size:,}"
            for name, size in expected.items()
            if sizes.get(name, size) != size
        ]
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the shards in {self.root} do not match {INDEX} there: {'; '.join(problems[:5])}{more}. Copy them again, or, "
                f"if they are right, remove {INDEX}: the next start makes a new one"
            )
        return index

    def _made_index(self, sizes: dict[str, int]) -> ShardIndex:
        """An index made by the first process of this host, while the others wait; kept for the next run."""
        classes = read_classes(self.root)
        times = [os.stat(self.root / name).st_mtime_ns for name in sizes]
        kind = () if self.asks_for_labels else ("without labels",)
        folder = host_folder(INDEX, self.root.absolute(), *sizes.items(), *times, *(classes or ()), *kind)
        started = time.monotonic()
        with locked(folder / "lock"):
            if not (folder / INDEX).is_file():
                write_index(folder / INDEX, scan_shards(self.root, sizes, classes, labels=self.asks_for_labels))
        self.notes.append(
            f"{self.root} has no {INDEX}, which `launcher prepare` writes beside shards: the headers of {len(sizes)} shards were "
            f"read instead in {time.monotonic() - started:.1f} s; their index is kept in {folder}"
        )
        return read_index(folder / INDEX)

    def _describe(self, sizes: dict[str, int]) -> None:
        if not len(self.index):
            raise ValueError(f"{self.root}: its {len(sizes)} shards hold no images")
        window, order = self._reading.window, self.order
        self.notes.append(
            f"{self.root}: {len(self.index):,} images in {len(sizes)} shards of {max(sizes.values()) / 1e6:,.0f} MB at most; "
            f"shuffled among {min(window, len(sizes))} shards (shuffle_window_shards), in {order.lanes} lanes, so that each of "
            f"up to {order.lanes} hosts reads only a part"
        )
        if self._cache is None:
            return
        needed = 2 * min(window, len(sizes)) * max(sizes.values())
        small = (
            f"; less than twice the window, {needed / 1e9:.1f} GB: raise shard_cache_gb, or lower shuffle_window_shards"
        )
        self.notes.append(
            f"{self.root} is streamed (FastFile): shards are copied ahead to {self._cache.folder}, up to "
            f"{self._cache.limit / 1e9:.1f} GB (shard_cache_gb){small if self._cache.limit < min(needed, sum(sizes.values())) else ''}"
        )


class LabelledShards(ShardFiles):
    """Shards of `<key>.jpg` beside `<key>.cls` or `<key>.json`; images are numbered through them in the order of their names."""

    labelled_share = 1.0

    def __init__(self, root: Path, images_per_class: int | None = None, reading: ShardReading | None = None):
        """Open the index; no image is read.

        Args:
            images_per_class: only the first N of each class. None: all.

        Raises:
            ValueError: as ShardFiles; or the shards hold masks, or a label is of no class.
        """
        super().__init__(root, reading or ShardReading())
        if len(self.index.mask_offsets):
            raise ValueError(f"{root}: its shards hold masks, not labels: train_segmentation.py reads them")
        if not len(self.labels):
            raise ValueError(
                f"{root}: its shards hold no labels: give them as the channel unlabelled, beside labelled images"
            )
        named = read_classes(root)
        self._require_classes(named)
        self.classes = named or [str(number) for number in range(int(self.labels.max()) + 1)]
        if images_per_class is not None:
            self._keep(_first_of_each(self.labels, images_per_class))

    @property
    def labels(self) -> np.ndarray:
        """int64 (images,), class numbers."""
        return self.index.labels

    def digest(self) -> str:
        """SHA-256 of what ShardFiles' digest covers, and of the classes."""
        found = hashlib.sha256(super().digest().encode())
        for name in self.classes:
            found.update(b"%b\0" % name.encode())
        return found.hexdigest()

    def _keep(self, indices: np.ndarray) -> None:
        """Keep only the images with these ascending indices, and renumber them."""
        self.index = self.index.only(indices)
        self.order = ShardOrder(self.index.counts, self._reading.window)
        self._starts = np.cumsum(self.index.counts).tolist()

    def _require_classes(self, named: list[str] | None) -> None:
        most = len(named) if named else MAX_CLASSES
        wrong = (self.labels < 0) | (self.labels >= most)
        if not wrong.any():
            return
        first = int(np.argmax(wrong))
        why = f"{most} class names" if named else f"no class names, so the limit is {most:,} classes"
        raise ValueError(
            f"{self.name(first)} has class {self.labels[first]}, and {self.root} has {why}: 0 to {most - 1} are valid. "
            f"Correct the label, or {' or '.join(CLASSES)}"
        )


class UnlabelledShards(ShardFiles):
    """Shards of `<key>.jpg`, with images numbered through them in the order of their names; any labels are ignored."""

    asks_for_labels = False


class _OpenFile:
    """A file descriptor, closed when its last reader in any thread is done."""

    def __init__(self, file: Path):
        self.descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _is_gone(descriptor: int) -> bool:
    """Whether an open file was removed, such as a copy that takes room until it is closed, or its mount is gone."""
    try:
        return not os.fstat(descriptor).st_nlink
    except OSError:
        return True


def _first_of_each(labels: np.ndarray, count: int) -> np.ndarray:
    """The ascending indices of the first N images of each class."""
    by_class = np.argsort(labels, kind="stable")
    firsts = np.searchsorted(labels[by_class], labels[by_class])
    return np.sort(by_class[np.arange(len(labels)) - firsts < count])
