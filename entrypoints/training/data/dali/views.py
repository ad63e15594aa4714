"""Views of labelled images by DALI: drawn, erased and mixed as TrainingViews does, on the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from training.data.augmentation import Augmentation, Erasing
from training.data.batches import LabelledBatch, SampleKey
from training.data.dali import graph
from training.data.dali.graph import Operations
from training.data.dali.pipeline import ReadBatch
from training.data.mixing import Mix, Mixing
from training.data.sources.channels import Source
from training.data.threads import PerBatchMemo
from training.runtime import accelerator

Made = TypeVar("Made")


class Views(Protocol):
    """The draws for labelled images, as TrainingViews has them."""

    source: Source
    size: int
    channels: int
    augmentation: Augmentation
    mixing: Mixing

    def rng(self, view: int, index: int) -> random.Random:
        """The generator that draws first an image's augmentation, then its erasing."""

    def partner(self, view: int, index: int) -> tuple[int, random.Random] | None:
        """The image that this one is mixed with, and the generator that decides how. None: it is not mixed."""

    def readable(self, view: int, index: int, make: Callable[[int, int], Made]) -> tuple[int, Made]:
        """The first readable image from this one on, and what `make` returns for it."""


class ViewItem(NamedTuple):
    """An augmented image."""

    image_index: int
    prepared: graph.Prepared
    erasing: Erasing | None


class DrawnView(NamedTuple):
    """One draw of a batch."""

    view: int
    items: tuple[ViewItem, ...]
    """The image and, if it is mixed, its partner."""
    mix: Mix | None


class ViewsByDali:
    """What DaliBatches needs to make a LabelledBatch of `views`."""

    def __init__(self, views: Views):
        self.views = views
        augmentation = views.augmentation
        warped = bool(augmentation.max_shift_pixels or augmentation.max_rotation_degrees)
        self.operations = Operations((views.size, views.size), views.channels, augmentation.load, warped)
        self.items_per_draw = 2 if views.mixing.is_on else 1

    def begin_batch(self, fallback_indices: Collection[int]) -> Callable[[SampleKey], DrawnView]:
        item: Callable[[int, int], ViewItem] = partial(self._item, fallback_indices)
        if self.views.mixing.is_on:  # an image may be another's partner
            item = PerBatchMemo(item)
        return lambda draw: self._drawn(*draw, item)

    def _drawn(self, view: int, index: int, item: Callable[[int, int], ViewItem]) -> DrawnView:
        views = self.views
        index, own = views.readable(view, index, item)
        mixed = views.partner(view, index)
        if mixed is None:
            return DrawnView(view, (own,), None)
        partner, rng = mixed
        return DrawnView(
            view,
            (own, views.readable(view, partner, item)[1]),
            views.mixing.draw((views.size, views.size), rng),
        )

    def _item(self, fallback_indices: Collection[int], view: int, index: int) -> ViewItem:
        """Draws in the order of TrainingViews: first the variation, then the erasing."""
        views, rng = self.views, self.views.rng(view, index)
        encoded, size = graph.readable_file(
            views.source.image(index),
            views.source.name(index),
            views.channels,
            fallback=index in fallback_indices,
        )
        variation = views.augmentation.draw(size, views.size, rng)
        prepared = graph.prepare(encoded, size, variation, self.operations)
        shape = (views.channels, views.size, views.size)
        return ViewItem(index, prepared, views.augmentation.draw_erasing(shape, rng))

    def finish(self, batch: ReadBatch[ViewItem, DrawnView], pixels: torch.Tensor) -> LabelledBatch:
        erase(pixels, [item.erasing for item in batch.items])
        labels = torch.from_numpy(self.views.source.labels)
        own, others = ([one.items[which] for one in batch.drawn] for which in (0, -1))
        indices, partners = (torch.tensor([item.image_index for item in items]) for items in (own, others))
        mixes = [one.mix for one in batch.drawn]
        shares = torch.tensor([1.0 if mix is None else mix.lam for mix in mixes], dtype=torch.float32)
        own_labels, labels_b, lam = (
            accelerator.pinned(values, pixels.device) for values in (labels[indices], labels[partners], shares)
        )
        return LabelledBatch(
            mixed(pixels, batch.places(own), batch.places(others), mixes),
            own_labels,
            labels_b,
            lam,
            indices,
            torch.tensor([one.view for one in batch.drawn]),
        )


def erase(pixels: torch.Tensor, erasings: list[Erasing | None]) -> None:
    """Put each image's noise into its box, in place; all noise is copied to the device at once.

    Args:
        pixels: uint8 (n, channels, height, width).
        erasings: one per image. None: nothing is erased.
    """
    boxes = [(image, erasing) for image, erasing in enumerate(erasings) if erasing is not None]
    if not boxes:
        return
    noise = torch.from_numpy(np.concatenate([erasing.noise.ravel() for _, erasing in boxes]))
    parts = torch.split(_moved(noise, pixels.device), [erasing.noise.size for _, erasing in boxes])
    for (image, erasing), part in zip(boxes, parts):
        pixels[image][erasing.place] = part.view(erasing.noise.shape)


def mixed(pixels: torch.Tensor, own: list[int], others: list[int], mixes: list[Mix | None]) -> torch.Tensor:
    """Images mixed bit for bit as `mixing` mixes them, on their device, without waiting for its queue.

    Args:
        pixels: uint8 (n, channels, height, width).
        own, others: for each mix, the places of the image and of its partner.

    Returns:
        uint8 (len(mixes), channels, height, width).
    """
    rows = [_row(*row) for row in zip(own, others, mixes)]
    columns = _moved(torch.tensor(rows).T.contiguous(), pixels.device)  # one copy
    made = pixels.index_select(0, columns[0])
    if all(mix is None for mix in mixes):
        return made
    partners = pixels.index_select(0, columns[1])
    weight, top, bottom, left, right = columns[2:, :, None, None, None].int()
    if any(mix is not None and mix.weight < 256 for mix in mixes):
        blended = made * weight  # int32
        blended += partners * (256 - weight)
        blended += 128
        made = blended.bitwise_right_shift_(8).to(torch.uint8)
    if any(mix is not None and mix.weight == 256 for mix in mixes):
        y = torch.arange(pixels.shape[2], device=pixels.device)[:, None]
        x = torch.arange(pixels.shape[3], device=pixels.device)
        made = torch.where((top <= y) & (y < bottom) & (left <= x) & (x < right), partners, made)
    return made


def _row(own: int, other: int, mix: Mix | None) -> tuple[int, ...]:
    """Own and other image, the own one's weight in 256ths, and top, bottom, left and right of the box of the other one."""
    if mix is None:
        return own, other, 256, 0, 0, 0, 0
    return own, other, mix.weight, *(edge or 0 for side in (mix.rows, mix.columns) for edge in (side.start, side.stop))


def _moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return accelerator.pinned(values, device).to(device, non_blocking=True)
