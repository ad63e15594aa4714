"""Which images lack an answer that they need: of those without a record all but broken images, for which others come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from training.teacher.label_bank import PIECE, Seal, ViewFile


class MissingAnswers:
    """Finds images without an answer in a view's file. Where there is no such file, it lacks all.

    Images are given as int64 (images,), each once and rising, as disks read fastest.

    Args:
        stand_in: the image that comes for a drawn one: itself, or another if it is broken. It is asked once for each, as it reads images.
    """

    def __init__(self, seal: Seal, stand_in: Callable[[int], int]):
        self._seal, self._stand_in = seal, functools.cache(stand_in)

    def any(self, file: ViewFile | None, view: int, images: np.ndarray) -> bool:
        """Whether one of these images needs an answer that is not there. Little is read of a file that lacks much."""
        return any(self._needing(file, view, missing, 1) for missing in self._by_piece(file, view, images))

    def count(self, file: ViewFile | None, view: int, images: np.ndarray, exactly: int) -> int:
        """How many of these images need an answer that is not there; about, where more than `exactly` have no record."""
        return self._needing(file, view, self._without_record(file, view, images), exactly)

    def _needing(self, file: ViewFile | None, view: int, missing: np.ndarray, piece: int) -> int:
        """How many images without a record need one.

        They are read in pieces, each twice as long as the one before, until the first piece with one that needs a record; the rest count
        too. So the first readable image ends it, and many broken ones take few pieces.
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
        """Of each PIECE of the file the images without a record."""
        if file is None:
            yield images
            return
        step = max(1, PIECE // file.record_size)
        for first in range(0, len(images), step):
            part = images[first : first + step]
            yield part[~self._seal.holds(file.read(part), part, view)]
