"""Which part of an image, and of its mask, a training step sees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CROPS_VERSION = 1
"""Changes whenever the same draw would crop an image differently, so that what caches kept of it no longer counts."""


class Cut(NamedTuple):
    """Which part of an image a training step sees, and where on its canvas."""

    box: tuple[int, int, int, int]
    """left, top, right, bottom in pixels of the image, upright."""
    size: tuple[int, int]
    """Height and width to which that part is scaled."""
    place: tuple[int, int]
    """Row and column of the canvas at which it begins; the area around it is black, and ignored in the mask."""
    mirrored: bool

    def begin(self, canvas: tuple[int, int]) -> tuple[int, int]:
        """Row and column at which the scaled part, mirrored or not, begins on a canvas of that height and width."""
        top, left = self.place
        return (top, canvas[1] - left - self.size[1]) if self.mirrored else (top, left)

    def on_canvas(self, part: np.ndarray, canvas: tuple[int, int], beyond: int) -> np.ndarray:
        """The scaled part (…, *size) on a canvas of that height and width (…, *canvas) filled with `beyond`, mirrored or not."""
        part = part[..., ::-1] if self.mirrored else part
        (high, wide), (top, left) = self.size, self.begin(canvas)
        if self.size == canvas:
            return np.ascontiguousarray(part)
        whole = np.full((*part.shape[:-2], *canvas), beyond, np.uint8)
        whole[..., top : top + high, left : left + wide] = part
        return whole


@dataclass(frozen=True)
class RandomCrop:
    """How a training image and its mask are augmented together."""

    crop_size: tuple[int, int]
    """Height and width of the result."""
    min_scale: float
    max_scale: float
    horizontal_flip: bool

    def draw(self, image_size: tuple[int, int], size: tuple[int, int], rng: random.Random) -> Cut:
        """An image scaled to `size` (height, width) times a random factor, cut at a random place, mirrored or not.

        Args:
            image_size: its height and width; the box is of whole pixels, so that the image and its mask are cut alike.
        """
        scale = rng.uniform(self.min_scale, self.max_scale)
        sides, begins, places = [], [], []
        for whole, target, canvas in zip(image_size, size, self.crop_size):
            length = max(1, round(target * scale))
            first = rng.randint(min(0, length - canvas), max(0, length - canvas))
            seen = max(first, 0), min(first + canvas, length)  # of the scaled image
            begin = min(round(seen[0] * whole / length), whole - 1)
            begins.append((begin, max(round(seen[1] * whole / length), begin + 1)))
            sides.append(seen[1] - seen[0])
            places.append(seen[0] - first)
        (top, bottom), (left, right) = begins
        mirrored = self.horizontal_flip and rng.random() < 0.5
        return Cut((left, top, right, bottom), (sides[0], sides[1]), (places[0], places[1]), mirrored)
