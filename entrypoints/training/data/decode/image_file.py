"""An image file of which several views are made from one decoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

from training.data.decode.jpeg import JpegHeader, read_header

Decoded = TypeVar("Decoded")


class ImageFile:
    """An image file's bytes, and what it was decoded to, until the last of its views is made; for several threads at once."""

    def __init__(self, encoded: bytes, name: str, views: int = 1):
        """
        Args:
            encoded: the whole file.
            name: its path, for messages.
            views: that are made of it; `made` is called after each.
        """
        self.encoded, self.name = encoded, name
        self._lock, self._left = threading.Lock(), views
        self._decoded: dict[Hashable, Any] = {}

    @cached_property
    def header(self) -> JpegHeader | None:
        """As jpeg.read_header gives it."""
        return read_header(self.encoded)

    def decoded(self, how: Hashable, decode: Callable[[], Decoded]) -> Decoded:
        """What `decode` gives, called once for all views that are decoded alike. Nobody may write into it."""
        with self._lock:
            if how not in self._decoded:
                self._decoded[how] = decode()
            found: Decoded = self._decoded[how]
            return found

    def made(self) -> None:
        """A view is made; after the last nothing decoded is kept."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self._decoded.clear()
