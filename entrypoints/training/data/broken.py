"""Images that cannot be read: a run goes on without them and names each once, or ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from training.data.decode.decoding import BrokenImage
from training.runtime.reporting import write_line

LISTING = "broken_images.txt"
"""In a host's output: one line per broken image, with what is wrong."""


IN_A_ROW = 1000
"""This many broken images in a row, by index, end a run whatever the settings say: the folder is gone."""

Read = TypeVar("Read")


class BrokenImages:
    """What a run does about broken images. Each is named once per host, whichever processes and workers meet it.

    Args:
        fail: end the run at the first one.
        output: this host's folder for the listing. None: each process names them, and no file does.
    """

    def __init__(self, fail: bool, output: Path | None = None):
        self.fail, self.listing = fail, output / LISTING if output is not None else None
        self._named: set[str] = set()

    def handle(self, error: BrokenImage) -> None:
        """Name a broken image, so that the run can go on without it.

        Raises:
            BrokenImage: `error` itself, if the run is to fail.
        """
        if self.fail:
            raise error
        line = " ".join(str(error).split())
        if line not in self._named and self._is_first(line):
            write_line(f"skipped a broken image: {line}")
        self._named.add(line)

    def _is_first(self, line: str) -> bool:
        """Whether no process on this host had listed it; this one then does."""
        if self.listing is None:
            return True
        try:
            self.listing.parent.mkdir(parents=True, exist_ok=True)
            with open(self.listing, "a+", encoding="utf-8", errors="surrogateescape") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0, os.SEEK_SET)
                if line in file.read().splitlines():
                    return False
                file.write(line + "\n")
        except OSError:  # a full disk: it is named in the log, by each process
            pass
        return True


class StandIns:
    """Replaces a broken image by the next readable one, in index order.

    Args:
        count: number of images.
        name: returns an image's path, for messages.
    """

    def __init__(self, broken: BrokenImages, count: int, name: Callable[[int], str]):
        self._broken, self._count, self._name = broken, count, name
        self._numbers: set[int] = set()

    def first(self, index: int, read: Callable[[int], Read]) -> tuple[int, Read]:
        """The first index from this one on whose image can be read, and what `read` returns for it.

        Raises:
            BrokenImage: what `read` raises, if the run is to fail; or IN_A_ROW consecutive images are broken.
        """
        problem, tried = None, min(self._count, IN_A_ROW)
        for candidate in ((index + step) % self._count for step in range(tried)):
            if candidate in self._numbers:
                continue
            try:
                return candidate, read(candidate)
            except BrokenImage as error:
                self._broken.handle(error)
                self._numbers.add(candidate)
                problem = error
        raise BrokenImage(f"{tried:,} images in a row cannot be read, starting at {self._name(index)}") from problem
