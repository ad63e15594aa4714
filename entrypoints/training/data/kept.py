"""Held-out batches that are decoded once and cached: as uint8 they are small, and every evaluation needs the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from launcher_observer.system.host import available_memory

from training.data.batches import bytes_of, map_tensors
from training.runtime.environment import processes_on_host

SHARE = 0.05
"""Fraction of a process's share of its host's available memory; beside a GPU it is pinned memory, which is allocated in powers of two.
50,000 images of 224 pixels take 7.5 GB, over all processes."""


class KeptBatches:
    """A loader's batches, from memory from the second pass on if they take no more than `budget` bytes.

    Args:
        loader: yields the same batches in every pass: sequences of tensors, or None.
    """

    def __init__(self, loader: Iterable[Any], budget: int):
        self.loader, self._budget = loader, budget
        self._kept: list[Any] | None = None
        self._fits = True

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Any] = []
        room = self._budget
        for batch in self.loader:
            room -= bytes_of(batch)
            self._fits = self._fits and room >= 0
            if self._fits:
                kept.append(_own(batch))
            else:
                kept.clear()
            yield batch
        if self._fits:
            self._kept = kept


def budget() -> int:
    """Bytes that a process may keep."""
    return int(SHARE * available_memory() / processes_on_host())


def _own(batch: Any) -> Any:
    """A batch copied out of workers' shared memory, where each tensor keeps a file open."""
    return map_tensors(batch, lambda values: values.clone() if values.is_shared() else values)
