"""Image files that are decoded once for several views."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from training.data.decode.jpeg import JpegHeader, read_header

Decoded = TypeVar("Decoded")


class ImageFile:
    """An image file, read and decoded once for all that ask; thread-safe."""

    def __init__(self, read: Callable[[], bytes], name: Callable[[], str]):
        """
        Args:
            read: returns the whole file.
            name: returns its path, for messages; for an image in a shard that may take a read.
        """
        self._name, self._read = name, read
        self._lock = threading.RLock()
        self._encoded: bytes | None = None
        self._decoded: dict[Hashable, Any] = {}

    @property
    def name(self) -> str:
        return self._name()

    @property
    def encoded(self) -> bytes:
        """The whole file.

        Raises:
            BrokenImage: it cannot be read.
        """
        # functools.cached_property would do, but before Python 3.12 its one lock per class makes threads read one by one.
        with self._lock:
            if self._encoded is None:
                self._encoded = self._read()
            return self._encoded

    @property
    def header(self) -> JpegHeader | None:
        """As jpeg.read_header returns it."""
        return self.decoded("header", lambda: read_header(self.encoded))

    def decoded(self, how: Hashable, decode: Callable[[], Decoded]) -> Decoded:
        """The result of `decode`, called once for all views that are decoded alike. Nobody may write into it."""
        with self._lock:
            if how not in self._decoded:
                self._decoded[how] = decode()
            found: Decoded = self._decoded[how]
            return found


class OpenFiles:
    """The image files of a batch, each kept from its first view to its last; thread-safe."""

    def __init__(self, open_file: Callable[[int], ImageFile], images: Iterable[int]):
        """
        Args:
            open_file: returns an image's file, which is not read yet.
            images: an index for each view that will be requested. Others, such as the stand-in for a broken one, are kept.
        """
        self._open, self._left = open_file, Counter(images)
        self._lock = threading.Lock()
        self._files: dict[int, ImageFile] = {}

    @contextmanager
    def opened(self, index: int) -> Iterator[ImageFile]:
        """An image's file, to make one view of it."""
        with self._lock:
            file = self._files.get(index)
            if file is None:
                file = self._files[index] = self._open(index)
        try:
            yield file
        finally:
            with self._lock:
                if index in self._left:
                    self._left[index] -= 1
                    if not self._left[index]:
                        del self._left[index], self._files[index]
