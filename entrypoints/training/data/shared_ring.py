"""Batches in memory that two processes share: a batch's tensor values lie in a slot, and only a description of them is sent.

The memory is an anonymous file (memfd_create(2)), so it is not limited by the size of /dev/shm and does not outlive its processes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from training.data.batches import bytes_of, map_leaves, map_tensors

ALIGNMENT = 64
"""Bytes, as torch's own CPU allocator has it (c10/core/alignment.h)."""

SPARE = 1.25
"""Ratio of a slot's size to the first batch's, for later ones that are larger, such as with masks of other sizes."""


class Placed(NamedTuple):
    """Where in a slot the values of a tensor lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the slot's start."""


class Ring:
    """Slots of equal size in memory that another process can map too.

    Args:
        slots: number of slots.
        slot_bytes: size of each; a multiple of ALIGNMENT.
        file: the descriptor of a ring's memory that another process made. None: a new one.
    """

    def __init__(self, slots: int, slot_bytes: int, file: int | None = None):
        self.slots, self.slot_bytes = slots, slot_bytes
        if file is None:
            file = os.memfd_create("batches")
            os.ftruncate(file, slots * slot_bytes)
        self.file = file
        self.bytes = torch.frombuffer(mmap.mmap(file, slots * slot_bytes), dtype=torch.uint8)
        """All slots, uint8 (slots * slot_bytes,); mapped as long as a tensor refers to them."""

    def slot(self, number: int) -> torch.Tensor:
        """uint8 (slot_bytes,)."""
        return self.bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]


def slot_bytes_for(batch: Any) -> int:
    """Size of a slot with room for a batch, and for others like it."""
    tensors: list[torch.Tensor] = []
    map_tensors(batch, tensors.append)
    return _aligned(math.ceil(SPARE * (bytes_of(batch) + ALIGNMENT * len(tensors))))


class SlotWriter:
    """Fills a slot with the tensors of a batch, one after the other.

    Args:
        slot: uint8 (bytes,). None: there is none, and values are sent with their description.
    """

    def __init__(self, slot: torch.Tensor | None):
        self._slot, self._used = slot, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to fill, in the slot if it has room there."""
        offset = self._reserved(math.prod(shape) * _size(dtype))
        if offset is None or self._slot is None:
            return torch.empty(shape, dtype=dtype)
        return values_at(self._slot, Placed(dtype, tuple(shape), offset))

    def pack(self, batch: Any) -> Any:
        """A batch with each tensor replaced: by a Placed if it is in the slot or has room there, else by a numpy array."""
        return map_tensors(batch, self._packed)

    def _packed(self, values: torch.Tensor) -> Placed | np.ndarray:
        offset = self._offset_of(values)
        if offset is None:
            values = values.contiguous()
            offset = self._reserved(bytes_of(values))
            if offset is None or self._slot is None:
                return values.numpy()
            values_at(self._slot, Placed(values.dtype, tuple(values.shape), offset)).copy_(values)
        return Placed(values.dtype, tuple(values.shape), offset)

    def _offset_of(self, values: torch.Tensor) -> int | None:
        """Where in the slot a tensor lies already; None: elsewhere."""
        if self._slot is None or not values.is_contiguous():
            return None
        offset = values.data_ptr() - self._slot.data_ptr()
        return offset if offset >= 0 and offset + bytes_of(values) <= self._used else None

    def _reserved(self, size: int) -> int | None:
        """Reserve `size` bytes after those in use; their offset, or None if there is no room."""
        if self._slot is None or self._used + size > len(self._slot):
            return None
        offset, self._used = self._used, _aligned(self._used + size)
        return offset


def unpack(
    packed: Any,
    slot: torch.Tensor | None,
    of_slot: Callable[[torch.Tensor], torch.Tensor],
    on_its_own: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """The batch that SlotWriter packed.

    Args:
        slot: uint8 (bytes,), where it was packed. None: nowhere, and all values came with the description.
        of_slot: converts a tensor in the slot to the one that is wanted.
        on_its_own: the same, for a tensor that had no room there.
    """

    def found(value: Placed | np.ndarray) -> torch.Tensor:
        if isinstance(value, np.ndarray):
            return on_its_own(torch.from_numpy(value))
        assert slot is not None, "what lies in a slot comes with it"
        return of_slot(values_at(slot, value))

    return map_leaves(packed, (Placed, np.ndarray), found)


def values_at(slot: torch.Tensor, place: Placed) -> torch.Tensor:
    """The tensor at `place`, over the slot's own memory."""
    size = math.prod(place.shape) * _size(place.dtype)
    return slot[place.offset : place.offset + size].view(place.dtype).view(place.shape)


def _size(dtype: torch.dtype) -> int:
    """Bytes of an element; torch 2.0 has no `dtype.itemsize`."""
    return torch.empty((), dtype=dtype).element_size()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
