"""Images with masks by DALI: it crops and scales the images, the CPU their masks, both from one draw."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from training.data.batches import MaskedBatch, SampleKey
from training.data.crops import Cut, RandomCrop
from training.data.dali import graph
from training.data.dali.graph import Operations, Prepared
from training.data.dali.pipeline import ReadBatch
from training.data.pairs import Pairs
from training.runtime import accelerator

Made = TypeVar("Made")


class MaskedViews(Protocol):
    """The draws for images with masks, as MaskedImages has them."""

    pairs: Pairs
    channels: int
    variation: RandomCrop | None

    def readable(self, view: int, index: int, make: Callable[[int, int], Made]) -> Made:
        """What `make` returns for the first readable image from this one on."""

    def cut(self, view: int, index: int, mask: np.ndarray) -> tuple[Cut, np.ndarray]:
        """The part of an image that a view shows, and its mask, uint8 (*crop_size), cut from the given whole mask."""

    def mask(self, index: int, image_size: tuple[int, int]) -> np.ndarray:
        """The mask of an image of that height and width, uint8 (height, width)."""


class DrawnPair(NamedTuple):
    """One image of a batch, and its mask."""

    image_index: int
    view: int
    prepared: Prepared
    mask: np.ndarray
    """uint8 (height, width), as the batch has it."""

    @property
    def items(self) -> tuple[DrawnPair]:
        return (self,)


class PairsByDali:
    """What DaliBatches needs to make a MaskedBatch of training images."""

    items_per_draw = 1

    def __init__(self, images: MaskedViews):
        self.images = images
        assert images.variation is not None, "DALI makes training images"
        self.operations = Operations(images.variation.crop_size, images.channels, pasted=True)

    def begin_batch(self, fallback_indices: Collection[int]) -> Callable[[SampleKey], DrawnPair]:
        item = partial(self._item, fallback_indices)
        return lambda draw: self.images.readable(*draw, item)

    def _item(self, fallback_indices: Collection[int], view: int, index: int) -> DrawnPair:
        images = self.images
        encoded, (width, height) = graph.readable_file(
            images.pairs.image(index),
            images.pairs.name(index),
            images.channels,
            fallback=index in fallback_indices,
        )
        cut, mask = images.cut(view, index, images.mask(index, (height, width)))
        begin = cut.begin(self.operations.size)
        prepared = graph.prepare_part(encoded, cut.box, cut.size, begin, mirrored=cut.mirrored)
        return DrawnPair(index, view, prepared, mask)

    def finish(self, batch: ReadBatch[DrawnPair, DrawnPair], pixels: torch.Tensor) -> MaskedBatch:
        masks = torch.from_numpy(np.stack([one.mask for one in batch.drawn]))
        indices, views = (
            torch.tensor(numbers) for numbers in zip(*((one.image_index, one.view) for one in batch.drawn))
        )
        return MaskedBatch(pixels, accelerator.pinned(masks, pixels.device), indices, views)
