"""Image files: labelled ones in `<root>/<class>/<image>`, unlabelled ones in any tree of folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from training.data.decode.decoding import read_file
from training.data.orders import FreeOrder
from training.data.sources.file_trees import IMAGE_ENDINGS, masks_among, refuse_unlisted, walk
from training.data.storage import StorageError, read_with_retries

CALLS_AT_ONCE = 16
"""Threads that list folders or query file sizes: a network file system answers late, at no cost to the CPU."""

FILES_PER_CALL = 100
"""Files whose sizes a thread queries in a row: handing each over by itself takes many times longer than a local disk's answer."""


class FilePaths(Sequence[bytes]):
    """Many paths in two arrays: all their bytes, and the paths' ends.

    Worker processes that read a list of a million objects end up with a copy each, since reading counts references and so writes to the
    shared pages (https://github.com/pytorch/pytorch/issues/13246). A fixed-width array would have the longest path's width.
    """

    def __init__(self, paths: Iterable[str]):
        encoded = [os.fsencode(path) for path in paths]
        self._text = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        begin, end = self._ends[place], self._ends[place + 1]
        return self._text[begin:end].tobytes()

    def digest(self) -> bytes:
        """SHA-256 of all paths, in order."""
        found = hashlib.sha256(self._ends.astype("<i8").tobytes())
        found.update(self._text.data)
        return found.digest()


def digest_of_sizes(root: Path, files: Sequence[bytes]) -> str:
    """SHA-256 of files' paths below a root and their sizes in bytes, in order; for a missing file, a broken image, its path alone.

    No file is read. Threads query the sizes, since each answer may cross a network.

    Raises:
        StorageError: storage keeps failing.
    """
    found, folder = hashlib.sha256(), os.fsencode(root)

    def size(file: bytes) -> bytes:
        path = os.path.join(folder, file)
        try:
            return b"%d" % read_with_retries(partial(os.stat, path), os.fsdecode(path)).st_size
        except StorageError:
            raise
        except OSError:
            return b"-"

    def sizes(first: int) -> bytes:
        return b"".join(b"%b\0%b\0" % (file, size(file)) for file in files[first : first + FILES_PER_CALL])

    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        for part in pool.map(sizes, range(0, len(files), FILES_PER_CALL)):
            found.update(part)
    return found.hexdigest()


class ImageFolder:
    """Image files below a folder, numbered in the given order.

    Args:
        files: paths relative to the root.
    """

    def __init__(self, root: Path, files: Sequence[str]):
        self.root, self._files = root, FilePaths(files)
        self.order = FreeOrder(len(self._files))
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """An image's path, for messages."""
        return os.path.join(self.root, os.fsdecode(self._files[index]))

    def image(self, index: int) -> bytes:
        """An image file.

        Raises:
            ValueError: it cannot be read; the message names it.
        """
        return read_file(self.name(index))

    def digest(self) -> str:
        """SHA-256 of every image's path below the root, which begins with its class if it has one, and its size in bytes, in order."""
        return digest_of_sizes(self.root, self._files)

    def listing(self) -> str:
        """SHA-256 of every image's path below the root, in order."""
        return self._files.digest().hex()

    def announce(self) -> None:
        """Nothing is read ahead."""


class LabelledFolder(ImageFolder):
    """The images of a folder with one subfolder per class, numbered by class, then by path."""

    labelled_share = 1.0

    def __init__(self, root: Path, images_per_class: int | None = None):
        """List the images; none is opened.

        Args:
            images_per_class: only the first N of each class. None: all.

        Raises:
            ValueError: there is no class, or one without images.
        """
        found = {name: files[:images_per_class] for name, files in find_images(root).items()}
        super().__init__(root, [file for files in found.values() for file in files])
        self.classes = list(found)
        if len(found) == 1:
            self.notes.append(
                f"WARNING: {root} has one class only, {self.classes[0]}, so accuracy is always 1: images belong in "
                f"{root}/<class>/<image>, one folder per class"
            )
        self.labels = np.repeat(np.arange(len(found)), [len(files) for files in found.values()])
        """int64 (images,), class numbers."""


class UnlabelledFolder(ImageFolder):
    """All images below a folder, at any depth, numbered by path."""

    def __init__(self, root: Path):
        """List the images; none is opened.

        Raises:
            ValueError: there are none.
        """
        files = sorted(_images_below(root))
        if not files:
            raise ValueError(f"{root} has no images: put some there, in any folders ({' '.join(IMAGE_ENDINGS)})")
        super().__init__(root, files)


def find_images(root: Path) -> dict[str, list[str]]:
    """The images of each class: sorted paths from the root, at any depth below the class's folder, without hidden ones.

    Raises:
        ValueError: there is no class, or one without images.
    """
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{root} has no folders: images belong in {root}/<class>/<image>, one folder per class")
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        found = dict(zip(classes, pool.map(lambda name: sorted(_images_below(root, name)), classes)))
    empty = [name for name, files in found.items() if not files]
    if empty:
        others = f" (nor in {len(empty) - 1} other classes)" if empty[1:] else ""
        raise ValueError(
            f"{root / empty[0]} has no images{others}: put some there ({' '.join(IMAGE_ENDINGS)}), or remove the folder"
        )
    return found


def _images_below(root: Path, name: str = "") -> Iterator[str]:
    """Paths from the root of the images below it, or below one folder there, without hidden ones and masks beside their images."""
    for folder, subfolders, files in walk(root / name, refuse_unlisted):
        left_out = masks_among(subfolders)
        subfolders[:] = [each for each in subfolders if not each.startswith(".") and each not in left_out]
        inside = os.path.relpath(folder, root)
        for file in files:
            if file.lower().endswith(IMAGE_ENDINGS) and not file.startswith("."):
                yield os.path.normpath(os.path.join(inside, file))
