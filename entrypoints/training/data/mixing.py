"""Two images made one, mixup and cutmix: with whom and how depends on seed, view and image alone, so that it can be replayed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np

from training.data.orders import Order


@dataclass(frozen=True)
class Mixing:
    """How often and how training images are mixed. Both zero: never."""

    mixup: float = 0.0
    """Alpha of the beta distribution of an image's own share of every pixel (https://arxiv.org/abs/1710.09412, equation 2)."""
    cutmix: float = 0.0
    """Alpha of the beta distribution of an image's own share of the area (https://arxiv.org/abs/1905.04899, section 3.1)."""
    probability: float = 1.0
    """Share of the images that are mixed; with both, half of these by each."""

    def happens(self, chance: random.Random) -> bool:
        """Whether an image is mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and chance.random() < self.probability

    def __call__(self, own: np.ndarray, other: np.ndarray, chance: random.Random) -> tuple[np.ndarray, float]:
        """Mix two images, uint8 (channels, height, width).

        Returns:
            The mixed pixels, a new array, and the own image's share of them in 0…1.
        """
        if self.mixup > 0 and (self.cutmix == 0 or chance.random() < 0.5):
            return blend(own, other, chance.betavariate(self.mixup, self.mixup))
        return paste(own, other, chance.betavariate(self.cutmix, self.cutmix), chance)


def blend(own: np.ndarray, other: np.ndarray, share: float) -> tuple[np.ndarray, float]:
    """Mixup: every pixel is `share` × own + the rest × other, rounded.

    The share is rounded to 256ths first, so that whole numbers do it: fast, and the same bytes on every machine.
    """
    weight = round(share * 256)
    mixed = np.multiply(own, weight, dtype=np.uint16)
    mixed += np.multiply(other, 256 - weight, dtype=np.uint16)  # at most 255 × 256, which leaves room for the 128
    mixed += 128
    mixed >>= 8
    return mixed.astype(np.uint8), weight / 256


def paste(own: np.ndarray, other: np.ndarray, share: float, chance: random.Random) -> tuple[np.ndarray, float]:
    """Cutmix: a box of the other image, of 1 - `share` of the area around a random pixel, cut off at the image's edges."""
    _, height, width = own.shape
    high, wide = (int(side * (1 - share) ** 0.5) for side in (height, width))
    top, left = chance.randrange(height) - high // 2, chance.randrange(width) - wide // 2
    rows, columns = slice(max(top, 0), top + high), slice(max(left, 0), left + wide)
    mixed = own.copy()
    mixed[:, rows, columns] = other[:, rows, columns]
    pasted = mixed[0, rows, columns].size  # what is cut off at the edges does not count
    return mixed, 1 - pasted / (height * width)


@functools.lru_cache(maxsize=2)  # where one epoch ends and the next begins, a worker draws from two views
def partners(order: Order, seed: int, view: int) -> np.ndarray:
    """With whom each image is mixed in a view: in pairs, and where one is left over, it takes the first.

    Neighbours in the view's order are partners, so that they come in the same batch, and each is decoded only once.

    Returns:
        int32 (images,), read-only.
    """
    numbers = order.of_view(seed, view)
    found = np.empty(len(numbers), np.int32)
    found[numbers] = np.roll(numbers, -1)
    second = numbers[1::2]
    found[second] = numbers[0 : 2 * len(second) : 2]
    found.flags.writeable = False
    return found
