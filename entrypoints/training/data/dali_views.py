"""Views of labelled images by DALI: drawn, erased and mixed as TrainingViews does, on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.data import dali_graph
from training.data.augmentation import Erasing
from training.data.batches import Draw, LabelledBatch
from training.data.dali import Read
from training.data.dali_graph import Operations
from training.data.mixing import Mix
from training.data.threads import Once

if TYPE_CHECKING:
    from training.data.views import TrainingViews


class ViewItem(NamedTuple):
    """A varied image."""

    number: int
    prepared: dali_graph.Prepared
    erasing: Erasing | None


class DrawnView(NamedTuple):
    """One draw of a batch."""

    view: int
    items: tuple[ViewItem, ...]
    """The image, and where it is mixed its partner."""
    mix: Mix | None


class ViewsByDali:
    """What DaliBatches needs to make a LabelledBatch of `views`."""

    def __init__(self, views: TrainingViews):
        self.views = views
        augmentation = views.augmentation
        warped = bool(augmentation.max_shift_pixels or augmentation.max_rotation_degrees)
        self.operations = Operations((views.size, views.size), views.channels, augmentation.load, warped)
        self.items_a_draw = 2 if views.mixing.mixup > 0 or views.mixing.cutmix > 0 else 1

    def begin_batch(self, by_reference: Collection[int]) -> Callable[[Draw], DrawnView]:
        item = Once(partial(self._item, by_reference))
        return lambda draw: self._drawn(*draw, item)

    def _drawn(self, view: int, number: int, item: Callable[[int, int], ViewItem]) -> DrawnView:
        views = self.views
        number, own = views.readable(view, number, item)
        mixed = views.partner(view, number)
        if mixed is None:
            return DrawnView(view, (own,), None)
        partner, chance = mixed
        return DrawnView(
            view,
            (own, views.readable(view, partner, item)[1]),
            views.mixing.draw((views.size, views.size), chance),
        )

    def _item(self, by_reference: Collection[int], view: int, number: int) -> ViewItem:
        """Draws in the order of TrainingViews: first the variation, then what is erased."""
        views, chance = self.views, self.views.chance(view, number)
        encoded, size = dali_graph.readable_file(
            views.source.encoded(number),
            views.source.name(number),
            views.channels,
            by_reference=number in by_reference,
        )
        variation = views.augmentation.draw(size, views.size, chance)
        prepared = dali_graph.prepare(encoded, size, variation, self.operations)
        shape = (views.channels, views.size, views.size)
        return ViewItem(number, prepared, views.augmentation.draw_erasing(shape, chance))

    def finish(self, batch: Read, pixels: torch.Tensor) -> LabelledBatch:
        for image, item in zip(pixels, batch.items):
            if item.erasing is not None:
                image[item.erasing.place] = torch.from_numpy(item.erasing.noise.copy()).to(pixels.device)
        labels = torch.from_numpy(self.views.source.labels)
        own, others = ([one.items[which] for one in batch.drawn] for which in (0, -1))
        numbers, partners = (torch.tensor([item.number for item in items]) for items in (own, others))
        mixes = [one.mix for one in batch.drawn]
        return LabelledBatch(
            mixed(pixels, batch.places(own), batch.places(others), mixes),
            labels[numbers],
            labels[partners],
            torch.tensor([1.0 if mix is None else mix.own_share for mix in mixes], dtype=torch.float32),
            numbers,
            torch.tensor([one.view for one in batch.drawn]),
        )


def mixed(pixels: torch.Tensor, own: list[int], others: list[int], mixes: list[Mix | None]) -> torch.Tensor:
    """Images mixed as `mixing` mixes them, to the bit, on their device.

    Args:
        pixels: uint8 (n, channels, height, width).
        own, others: for each mix, which of them is mixed with which.

    Returns:
        uint8 (len(mixes), channels, height, width).
    """
    made, device = pixels[own], pixels.device
    blended = [place for place, mix in enumerate(mixes) if mix is not None and mix.weight < 256]
    if blended:
        weights = torch.tensor([mixes[place].weight for place in blended], dtype=torch.int32).view(-1, 1, 1, 1)
        weights, places = weights.to(device), torch.tensor(blended).to(device)
        partners = pixels[torch.tensor([others[place] for place in blended]).to(device)]
        made[places] = ((made[places] * weights + partners * (256 - weights) + 128) >> 8).to(torch.uint8)
    for place, mix in enumerate(mixes):
        if mix is not None and mix.weight == 256:
            box = (slice(None), mix.rows, mix.columns)
            made[place][box] = pixels[others[place]][box]
    return made
