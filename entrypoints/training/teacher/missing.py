"""Finds images that lack an answer that they need: those without a record, except broken images, which others replace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from training.teacher.label_bank import PIECE, Seal, ViewFile


class MissingAnswers:
    """Finds images without an answer in a view's file. If there is no such file, all are missing.

    Images are given as int64 (images,), distinct and ascending, which disks read fastest.

    Args:
        stand_in: maps a drawn image to the one used: itself, or another if it is broken. Called once per image, as it reads images.
    """

    def __init__(self, seal: Seal, stand_in: Callable[[int], int]):
        self._seal, self._stand_in = seal, functools.cache(stand_in)

    def any(self, file: ViewFile | None, view: int, images: np.ndarray) -> bool:
        """Whether any of these images needs an answer that is missing. Reads little of a file that lacks many."""
        return any(self._needing(file, view, missing, 1) for missing in self._by_piece(file, view, images))

    def count(self, file: ViewFile | None, view: int, images: np.ndarray, exactly: int) -> int:
        """How many of these images need an answer that is missing; approximate if more than `exactly` have no record."""
        return self._needing(file, view, self._without_record(file, view, images), exactly)

    def _needing(self, file: ViewFile | None, view: int, missing: np.ndarray, piece: int) -> int:
        """How many images without a record need one.

        Images are read in pieces, each twice as long as the last, until one holds an image that needs a record; all after that piece
        count too. So the first readable image ends the search, and many broken ones take few pieces.
        """
        done = 0
        while done < len(missing):
            read = missing[done : done + piece]
            done, piece = done + len(read), 2 * piece
            shown = np.unique([self._stand_in(index) for index in read.tolist()])
            needed = self._without_record(file, view, shown)
            if len(needed):
                return len(needed) + len(missing) - done
        return 0

    def _without_record(self, file: ViewFile | None, view: int, images: np.ndarray) -> np.ndarray:
        return np.concatenate([images[:0], *self._by_piece(file, view, images)])

    def _by_piece(self, file: ViewFile | None, view: int, images: np.ndarray) -> Iterator[np.ndarray]:
        """The images without a record, for each PIECE of the file."""
        if file is None:
            yield images
            return
        step = max(1, PIECE // file.record_size)
        for first in range(0, len(images), step):
            part = images[first : first + step]
            yield part[~self._seal.holds(file.read(part), part, view)]
