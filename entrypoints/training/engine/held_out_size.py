"""How many held-out images pass through a model at once where they are larger than what training sees of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from training.distributed.world import World
from training.engine.memory import Footprint
from training.engine.run import Run

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Images uint8 (batch, channels, height, width) -> logits, as an evaluation computes them, but not compiled."""


@dataclass(frozen=True)
class WholeImages:
    """Held-out images that are evaluated whole, where a training step sees crops."""

    image: torch.Tensor
    """One of them, on the device of the models: uint8 (1, channels, height, width)."""
    crop_size: tuple[int, int]
    """Height and width in pixels of what a training step sees of an image."""
    evaluated: Sequence[Forward]
    """The models that they pass through, one after the other."""

    def batch_size(self, crops: int, room: float, world: World, log: Callable[[str], None]) -> int:
        """Images that pass through a model at once: with no more pixels than a pass over N crops has and, by prediction, in no more
        memory than that takes; at least one. The same on every rank. A collective.

        Args:
            crops: in a pass.
            room: bytes that a pass over them takes, without what does not depend on their number.
        """
        high, wide = self.image.shape[-2:]
        by_pixels = crops * math.prod(self.crop_size) // (high * wide)
        bytes_per_image = max(evaluation_bytes(forward, self.image) for forward in self.evaluated)
        own = max(1, min(by_pixels, int(room // bytes_per_image)))
        size = int(world.gather_rows(torch.tensor([own])).min())
        log(
            f"evaluation: {size} of the held-out images at once, which are {high} × {wide} pixels; training passes {crops} crops of "
            f"{self.crop_size[0]} × {self.crop_size[1]}"
        )
        return size


def whole_at_once(whole: WholeImages | None, size: int, now: Footprint, run: Run) -> int:
    """Held-out images that pass through a model at once, beside training passes of N images. A collective.

    Args:
        whole: None: held-out images are no larger than what training sees, so that as many fit: they keep no activations.
        now: of a training step, or of a pass that labels.
    """
    if whole is None:
        return size
    room = now.step(size) - now.fixed - now.accumulated(size)
    return whole.batch_size(size, room, run.world, run.report.log)


@torch.no_grad()
def evaluation_bytes(forward: Forward, images: torch.Tensor) -> int:
    """The most bytes that an evaluation's pass over these images holds at once, beside weights and autocast's copies of them: its tensors,
    and the logits of the pass before, which are freed only after it. Kernels' workspaces are not known."""
    # the outermost autocast keeps its copies of the weights for the second pass
    with torch.autocast(images.device.type, enabled=False):
        forward(images)
        held = _HeldBytes()
        with held:
            output = forward(images)
            logits = output.float()
        at_once = held.most + held.now
    del output, logits
    return at_once


class _HeldBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate its own
        self.now = self.most = 0
        self._tensors: dict[int, int] = {}
        """By storage, its tensors that are alive."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
            if storage in self._tensors or storage not in given:  # else it is a view of what was there before
                self._holds(tensor, storage, size)
        return output

    def _holds(self, tensor: torch.Tensor, storage: int, size: int) -> None:
        if storage not in self._tensors:
            self._tensors[storage] = 0
            self.now += size
            self.most = max(self.most, self.now)
        self._tensors[storage] += 1
        weakref.finalize(tensor, self._freed, storage, size).atexit = False

    def _freed(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self.now -= size


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it is alive."""
    address: int = tensor.untyped_storage()._cdata
    return address
