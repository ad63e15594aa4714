"""Mixup and cutmix: an image's partner and mix depend only on seed, view and image, so that they can be replayed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from training.data.orders import Order, of_view


class Mix(NamedTuple):
    """The draw for one mixed image: either blended, with an empty box, or pasted on, with weight 256."""

    weight: int
    """The image's own share of every pixel, in 256ths."""
    rows: slice
    columns: slice
    """The box that the other image fills."""
    lam: float
    """The image's own share, in 0…1."""


@dataclass(frozen=True)
class Mixing:
    """How often and how training images are mixed. Both zero: never."""

    mixup: float = 0.0
    """Alpha of the beta distribution of an image's own share of every pixel (https://arxiv.org/abs/1710.09412, equation 2)."""
    cutmix: float = 0.0
    """Alpha of the beta distribution of an image's own share of the area (https://arxiv.org/abs/1905.04899, section 3.1)."""
    probability: float = 1.0
    """Share of the images that are mixed; with both, half of these by each."""

    @property
    def is_on(self) -> bool:
        """Whether any image is mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def happens(self, rng: random.Random) -> bool:
        """Draw whether an image is mixed."""
        return self.is_on and rng.random() < self.probability

    def draw(self, size: tuple[int, int], rng: random.Random) -> Mix:
        """Draw how an image of that height and width is mixed."""
        if self.mixup > 0 and (self.cutmix == 0 or rng.random() < 0.5):
            weight = round(rng.betavariate(self.mixup, self.mixup) * 256)
            return Mix(weight, slice(0), slice(0), weight / 256)
        return draw_paste(size, rng.betavariate(self.cutmix, self.cutmix), rng)

    def __call__(self, own: np.ndarray, other: np.ndarray, rng: random.Random) -> tuple[np.ndarray, float]:
        """Mix two images, uint8 (channels, height, width).

        Returns:
            The mixed pixels, a new array, and the own image's share of them in 0…1.
        """
        mix = self.draw(own.shape[1:], rng)
        mixed = blend(own, other, mix.lam)[0] if mix.weight < 256 else own.copy()
        mixed[:, mix.rows, mix.columns] = other[:, mix.rows, mix.columns]
        return mixed, mix.lam


def blend(own: np.ndarray, other: np.ndarray, share: float) -> tuple[np.ndarray, float]:
    """Mixup: every pixel is `share` × own + the rest × other, rounded.

    The share is first rounded to 256ths, so that integers suffice: fast, and the same bytes on every machine.
    """
    weight = round(share * 256)
    mixed = np.multiply(own, weight, dtype=np.uint16)
    mixed += np.multiply(other, 256 - weight, dtype=np.uint16)  # at most 255 × 256, which leaves room for the 128
    mixed += 128
    mixed >>= 8
    return mixed.astype(np.uint8), weight / 256


def draw_paste(size: tuple[int, int], share: float, rng: random.Random) -> Mix:
    """Cutmix: a box of 1 - `share` of the area around a random pixel, cut off at the image's edges.

    Args:
        size: height and width.
    """
    height, width = size
    high, wide = (int(side * (1 - share) ** 0.5) for side in size)
    top, left = rng.randrange(height) - high // 2, rng.randrange(width) - wide // 2
    rows, columns = slice(max(top, 0), min(top + high, height)), slice(max(left, 0), min(left + wide, width))
    pasted = (rows.stop - rows.start) * (columns.stop - columns.start)  # what is cut off at the edges does not count
    return Mix(256, rows, columns, 1 - pasted / (height * width))


@functools.lru_cache(maxsize=2)  # at an epoch boundary, a worker draws from two views
def partners(order: Order, seed: int, view: int) -> np.ndarray:
    """Each image's mixing partner in a view: images pair up, and a left-over one takes the first.

    Neighbours in the view's order are partners, so that they come in the same batch and each is decoded only once.

    Returns:
        int32 (images,), read-only.
    """
    indices = of_view(order, seed, view)
    found = np.empty(len(indices), np.int32)
    found[indices] = np.roll(indices, -1)
    second = indices[1::2]
    found[second] = indices[0 : 2 * len(second) : 2]
    found.flags.writeable = False
    return found
