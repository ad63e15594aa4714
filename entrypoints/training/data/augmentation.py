"""How one training image is varied: crop, shift, rotation, mirroring, erasing, all from the numbers of one generator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

VIEWS_VERSION = 2
"""Raise it whenever a change of the code changes the pixels of a view: what was kept of the old views is then not used."""

PARTS = (8, 4, 2)
"""The parts of its size at which a JPEG can be decoded faster than whole: powers of two, where libjpeg's inverse DCT is smaller.
Its other fractions (3/8, 5/8 …) take longer than the whole."""


class Turn(NamedTuple):
    """One round of the DALI post's augmentation load, on the whole image: mirrored, turned upside down, rotated."""

    mirrored: bool
    upside_down: bool
    degrees: float
    """Counterclockwise, around the middle; the canvas keeps its size, and its corners become black."""


class Variation(NamedTuple):
    """What is done to one image, in this order, so that every pipeline does the same."""

    turns: tuple[Turn, ...] = ()
    box: tuple[int, int, int, int] | None = None
    """left, top, right, bottom in pixels, multiples of `part`: what is scaled to the view. None: the middle square (`fit`)."""
    degrees: float = 0.0
    """The scaled part is rotated counterclockwise around its middle, and then …"""
    shift: tuple[int, int] = (0, 0)
    """… moved right and down, in pixels of the view; what comes in from beyond is black."""
    mirrored: bool = False
    part: int = 1
    """How many times smaller the image can be decoded for its box: that begins and ends there where the smaller image has pixels."""


class Erasing(NamedTuple):
    """A box of a varied image that becomes noise."""

    top: int
    left: int
    noise: np.ndarray
    """uint8 (channels, height, width) of the box."""

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """The box, as an index of an image (channels, height, width)."""
        _, high, wide = self.noise.shape
        return slice(None), slice(self.top, self.top + high), slice(self.left, self.left + wide)


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied. All zero or one: not at all."""

    min_crop_area: float = 1.0
    horizontal_flip: bool = False
    max_shift_pixels: int = 0
    max_rotation_degrees: float = 0.0
    random_erasing: float = 0.0
    """Share of the images that lose a box."""
    load: int = 0
    """Rounds of mirroring, turning upside down and rotating by up to 5 degrees, before anything else."""

    def draw(self, image_size: tuple[int, int], size: int, rng: random.Random) -> Variation:
        """The variation of an image of that width and height for a view of `size` × `size` pixels."""
        turns = tuple(Turn(rng.random() < 0.5, rng.random() < 0.5, rng.uniform(-5, 5)) for _ in range(self.load))
        box, part = None, 1
        if self.min_crop_area < 1:
            box = random_box(image_size, self.min_crop_area, rng)
            part = decoded_part(box, size)
            box = _at_multiples(box, image_size, part)
        shift, degrees = (0, 0), 0.0
        if self.max_shift_pixels or self.max_rotation_degrees:
            right, down = (rng.randint(-self.max_shift_pixels, self.max_shift_pixels) for _ in range(2))
            shift = (right, down)
            degrees = rng.uniform(-self.max_rotation_degrees, self.max_rotation_degrees)
        return Variation(turns, box, degrees, shift, self.horizontal_flip and rng.random() < 0.5, part)

    def draw_erasing(self, shape: tuple[int, int, int], rng: random.Random) -> Erasing | None:
        """What of some images is erased, of that (channels, height, width); `rng` drew the image's variation before."""
        erased = self.random_erasing and rng.random() < self.random_erasing
        return draw_erasing(shape, rng) if erased else None

    def erase(self, pixels: np.ndarray, rng: random.Random) -> None:
        """Erase what `draw_erasing` draws of uint8 (channels, height, width), in place."""
        erasing = self.draw_erasing(pixels.shape, rng)
        if erasing is not None:
            pixels[erasing.place] = erasing.noise


def decoded_part(box: tuple[int, int, int, int], size: int) -> int:
    """How many times smaller an image can be decoded of which a view of `size` × `size` pixels shows that box; 1: not at all.

    The box still has a view's pixels then, at least. What is near to having just these comes out sharper than by the reference's
    filter, which blurs what it shrinks: 34 dB at the least on photographs full of details, over 45 dB where there are twice as many.
    """
    left, top, right, bottom = box
    return next((part for part in PARTS if min(right - left, bottom - top) >= part * size), 1)


def _at_multiples(box: tuple[int, int, int, int], image_size: tuple[int, int], part: int) -> tuple[int, int, int, int]:
    """The smallest box around a box whose sides are multiples of `part`; what an image's last pixels lack of one is left out."""
    width, height = (side // part * part for side in image_size)
    left, top = (side // part * part for side in box[:2])
    right, bottom = (-(-side // part) * part for side in box[2:])
    return left, top, min(right, width), min(bottom, height)


def random_box(image_size: tuple[int, int], min_area: float, rng: random.Random) -> tuple[int, int, int, int]:
    """A random part of an image: its area from `min_area` to 1, its aspect 3:4 to 4:3 (https://arxiv.org/abs/1409.4842, section 6).

    Returns:
        left, top, right, bottom in pixels; where ten draws do not fit, the largest part of that aspect in the middle.
    """
    width, height = image_size
    for _ in range(10):
        area = width * height * rng.uniform(min_area, 1)
        wide, high = _sides(area, rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def draw_erasing(shape: tuple[int, int, int], rng: random.Random) -> Erasing | None:
    """Random erasing (https://arxiv.org/abs/1708.04896, algorithm 1): noise in a box of 2 % to a third of the area.

    The aspect is 0.3 to 1 / 0.3 and every pixel's noise its own, as in timm; where ten draws do not fit nothing is erased.

    Args:
        shape: channels, height, width of the image.
    """
    channels, height, width = shape
    for _ in range(10):
        area = width * height * rng.uniform(0.02, 1 / 3)
        wide, high = _sides(area, rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        if 0 < wide < width and 0 < high < height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - high)
            noise = np.frombuffer(rng.randbytes(channels * high * wide), np.uint8)
            return Erasing(top, left, noise.reshape(channels, high, wide))
    return None


def _sides(area: float, log_aspect: float) -> tuple[int, int]:
    """Width and height in whole pixels of a box of that area."""
    aspect = math.exp(log_aspect)
    return round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
