"""Batches of any kind, as an iterator whose waits the observer's hooks can measure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Batches(Generic[Batch]):
    """One pass over a source of batches."""

    def __init__(self, batches: Iterable[Batch]):
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)
