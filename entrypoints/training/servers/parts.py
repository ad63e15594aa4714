"""Pending batches, and the parts in which they are requested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from training.data.batches import SampleKey, parts_of
from training.runtime import accelerator
from training.servers.actor import Part

PART = 16
"""Images per request, and a few more if their views come together. Even, since mixing pairs neighbours, which are then
decoded once."""


@dataclass(eq=False)
class PendingPart:
    """A part of a batch that has not arrived yet."""

    batch: PendingBatch
    first: int
    """Its place in the batch."""
    draws: list[SampleKey]
    at: set[str] = field(default_factory=set)
    """The servers that were asked for it."""
    there: bool = False


class PendingBatch:
    """A batch that is being made.

    Args:
        device: gets the batch; if it is a GPU, the tensors are pinned.
    """

    def __init__(self, draws: list[SampleKey], device: torch.device):
        self.parts = [PendingPart(self, part[0], draws[part[0] : part[-1] + 1]) for part in parts_of(draws, PART)]
        self.missing = len(self.parts)
        self._images, self._device = len(draws), device
        self._fields: list[torch.Tensor] = []
        self._kind: Any = None

    def receive(self, part: PendingPart, found: Part) -> None:
        """Put a part into its place."""
        if not self._fields:
            self._kind = found.batch
            self._fields = [
                torch.empty(
                    (self._images, *one.shape[1:]),
                    dtype=torch.from_numpy(np.empty(0, one.dtype)).dtype,
                    pin_memory=accelerator.is_gpu(self._device),
                )
                for one in found.fields
            ]
        for target, source in zip(self._fields, found.fields):
            np.copyto(target.numpy()[part.first : part.first + len(source)], source)
        part.there = True
        self.missing -= 1

    def whole(self) -> Any:
        """The batch, when no part is missing."""
        return self._kind._make(self._fields)
