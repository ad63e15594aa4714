"""Whole shards prefetched from slow storage, such as S3 through a FastFile channel, to this host's disk, and evicted again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from training.runtime.environment import processes_on_host

PIECE = 8 << 20
"""Bytes per read. FastFile prefetches a file that is read sequentially."""

NO_COPY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOENT)
"""Errors of a full disk; the last: another process made room and removed the unfinished copy."""


def host_folder(*identity: object) -> Path:
    """A folder of this user on this host's disk (TMPDIR, or /tmp): one for all processes that give the same identity.

    What lies there is trusted, so no other user may write there. If the usual place is another's, each process makes a new one.
    """
    name = hashlib.sha256("\0".join(map(str, identity)).encode(errors="surrogateescape")).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"vision-shards-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        folder = Path(_new_folder(folder).name)
    folder = folder / name
    folder.mkdir(exist_ok=True)
    return folder


def _is_own(folder: Path) -> bool:
    """Whether a path is a folder, not a link to one, that only this user can write to."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


@functools.cache
def _new_folder(usual: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder that this process keeps until it ends."""
    made = tempfile.TemporaryDirectory(prefix=f"{usual.name}-", dir=usual.parent)
    warnings.warn(
        f"{usual} is not a folder that only this user can write to, so this process keeps its index and copies of shards in "
        f"{made.name}: remove the first, or set TMPDIR to a folder of your own",
        stacklevel=3,
    )
    return made


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a host-wide lock; a process that dies releases it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        os.close(descriptor)


class ShardCache:
    """Copies of shards that all processes of a host share. The first that needs a shard copies it, while the others wait.

    A copy that would exceed the limit evicts those made or announced earliest. A process with an evicted copy open reads on; any
    other copies the shard again.

    Args:
        root: the slow folder.
        sizes: bytes of each shard, by file name.
        limit: bytes of all copies. None: half of the sum of these copies and that disk's free space.
        sharing: number of caches that share this limit in equal parts.
    """

    def __init__(self, root: Path, sizes: dict[str, int], limit: int | None = None, sharing: int = 1):
        self.root, self.sizes = root, sizes
        # a shard that is made again may keep its size, since tars are padded
        times = [os.stat(root / name).st_mtime_ns for name in sizes]
        self.folder = host_folder("copies", root.absolute(), *sizes.items(), *times)
        free = shutil.disk_usage(self.folder).free + sum(size for _, _, size in self._copies())
        self.limit = (free // 2 if limit is None else limit) // sharing

    def copy_of(self, name: str) -> Path:
        """A shard's copy; the shard itself if the disk has no room.

        Raises:
            OSError: the shard cannot be read.
        """
        copy = self.folder / name
        return copy if copy.exists() or self._fetch(name) else self.root / name

    def make_ready(self, name: str) -> None:
        """Copy a shard that will be read soon, and make it the last to be removed."""
        copy = self.copy_of(name)
        if copy.parent == self.folder:
            with contextlib.suppress(FileNotFoundError):  # removed since
                _touch(copy)

    def _fetch(self, name: str) -> bool:
        """Copy a shard; whether there is a copy now."""
        copy, part = self.folder / name, self.folder / f".{name}.part"
        if self.sizes[name] > self.limit:
            return False
        with locked(self.folder / f".{name}.lock"):
            if copy.exists():
                return True
            with locked(self.folder / ".room.lock"):
                self._make_room(self.sizes[name])
                part.unlink(missing_ok=True)  # of a killed process
                opened = open(part, "xb")  # noqa: SIM115 - others count it from now on
            try:
                with opened as target, open(self.root / name, "rb", buffering=0) as source:
                    shutil.copyfileobj(source, target, PIECE)
                if part.stat().st_size != self.sizes[name]:
                    raise OSError(f"{part.stat().st_size} bytes arrived instead of {self.sizes[name]}")
                _touch(part)
                os.replace(part, copy)
            except OSError as error:
                part.unlink(missing_ok=True)
                if error.errno in NO_COPY:
                    return False
                raise
        return True

    def _make_room(self, size: int) -> None:
        copies = self._copies()
        total = sum(size for _, _, size in copies)
        for _, file, taken in sorted(copies):
            if total + size <= self.limit:
                return
            file.unlink(missing_ok=True)
            total -= taken

    def _copies(self) -> list[tuple[int, Path, int]]:
        """Time made or announced (ns), path and size of every copy, unfinished ones included.

        One that a killed process left unfinished is the first to be removed, as its time stands still.
        """
        found = []
        for entry in os.scandir(self.folder):
            name = entry.name[1 : -len(".part")] if entry.name.endswith(".part") else entry.name
            with contextlib.suppress(FileNotFoundError):
                if name in self.sizes:
                    found.append((entry.stat().st_mtime_ns, Path(entry.path), self.sizes[name]))
        return found


class ReadAhead:
    """Copies the shards that an epoch will read, in order, in a thread of this process.

    Together, a host's training processes stay within half of the cache, each with at least one shard ahead that fits there;
    the other half is for the shards being read.

    Args:
        names: the shards' file names.
        shard_of_image: int, (images,): which shard each image lies in.
    """

    def __init__(self, cache: ShardCache, names: list[str], shard_of_image: np.ndarray):
        self._cache, self._names, self._shard_of_image = cache, names, shard_of_image
        self._changed = threading.Condition()
        self._epoch = self._asked_for = 0

    def __call__(self, indices: np.ndarray) -> Callable[[int], None]:
        """Begin an epoch, given its images, int64 (images,), in order, and abandon the one before.

        Returns:
            A function to call with the number of images asked for so far.
        """
        drawn = self._shard_of_image[indices]
        shards, firsts = np.unique(drawn, return_index=True)
        lasts = len(drawn) - 1 - np.unique(drawn[::-1], return_index=True)[1]
        with self._changed:
            self._epoch, self._asked_for = self._epoch + 1, 0
            epoch = self._epoch
            self._changed.notify_all()
        plan = sorted(zip(firsts.tolist(), lasts.tolist(), (self._names[shard] for shard in shards)))
        threading.Thread(target=self._copy, args=(plan, epoch), daemon=True, name="shards ahead").start()

        def asked_for(count: int) -> None:
            with self._changed:
                if epoch == self._epoch:
                    self._asked_for = count
                    self._changed.notify_all()

        return asked_for

    def _copy(self, plan: list[tuple[int, int, str]], epoch: int) -> None:
        """Copy shards: (place of the first image, place of the last, name) each."""
        sizes, most = self._cache.sizes, self._cache.limit // 2
        share = most // processes_on_host()
        for place, (_, last, name) in enumerate(plan):

            def is_due(place: int = place) -> bool:
                ahead = sum(sizes[other] for first, _, other in plan[: place + 1] if first >= self._asked_for)
                allowed = max(share, min(most, sizes[plan[place][2]]))
                return epoch != self._epoch or plan[place][0] <= self._asked_for or ahead <= allowed

            with self._changed:
                self._changed.wait_for(is_due)
                if epoch != self._epoch:
                    return
                if last < self._asked_for:  # already read
                    continue
            with contextlib.suppress(OSError):  # the shard's reader meets the same error and reports it
                self._cache.make_ready(name)


def _touch(copy: Path) -> None:
    """Make a copy the newest. The system's own times are equal for some milliseconds."""
    now = time.time_ns()
    os.utime(copy, ns=(now, now))
