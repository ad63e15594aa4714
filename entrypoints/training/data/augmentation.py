"""Augmentation of one training image: crop, shift, rotation, mirroring and erasing, all drawn from one generator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

VIEWS_VERSION = 2
"""Raise it whenever a code change alters the pixels of a view, so that what was cached of the old views is not used."""

PARTS = (8, 4, 2)
"""Scale denominators at which a JPEG decodes faster than in full: powers of two, for which libjpeg's inverse DCT is smaller.
Its other fractions (3/8, 5/8 …) take longer than the full size."""


class Turn(NamedTuple):
    """One round of the DALI post's augmentation load, on the whole image: mirrored, turned upside down, rotated."""

    mirrored: bool
    upside_down: bool
    degrees: float
    """Counterclockwise, around the middle; the canvas keeps its size, and its corners become black."""


class Variation(NamedTuple):
    """The transforms of one image, in this order, so that every pipeline does the same."""

    turns: tuple[Turn, ...] = ()
    box: tuple[int, int, int, int] | None = None
    """left, top, right, bottom in pixels, multiples of `part`: what is scaled to the view. None: the middle square (`fit`)."""
    degrees: float = 0.0
    """The scaled part is rotated counterclockwise around its middle, and then …"""
    shift: tuple[int, int] = (0, 0)
    """… moved right and down, in pixels of the view; what comes in from beyond is black."""
    mirrored: bool = False
    part: int = 1
    """Scale denominator at which the image can be decoded; the box begins and ends at whole pixels of the smaller image."""


class Erasing(NamedTuple):
    """A box of an augmented image that becomes noise."""

    top: int
    left: int
    noise: np.ndarray
    """uint8 (channels, height, width) of the box."""

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """The box, as an index into an image (channels, height, width)."""
        _, high, wide = self.noise.shape
        return slice(None), slice(self.top, self.top + high), slice(self.left, self.left + wide)


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented. All zero or one: not at all."""

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
        """The box to erase, if any, in an image of that (channels, height, width); `rng` drew the image's variation before."""
        erased = self.random_erasing and rng.random() < self.random_erasing
        return draw_erasing(shape, rng) if erased else None

    def erase(self, pixels: np.ndarray, rng: random.Random) -> None:
        """Erase what `draw_erasing` draws from uint8 pixels (channels, height, width), in place."""
        erasing = self.draw_erasing(pixels.shape, rng)
        if erasing is not None:
            pixels[erasing.place] = erasing.noise


def decoded_part(box: tuple[int, int, int, int], size: int) -> int:
    """Scale denominator at which an image can be decoded for a `size` × `size` view of that box; 1: full size.

    The box still has at least the view's pixels then. If it has hardly more, the result is sharper than with the reference's filter,
    which blurs what it shrinks: 34 dB at least on photographs full of detail, over 45 dB with twice as many pixels.
    """
    left, top, right, bottom = box
    return next((part for part in PARTS if min(right - left, bottom - top) >= part * size), 1)


def _at_multiples(box: tuple[int, int, int, int], image_size: tuple[int, int], part: int) -> tuple[int, int, int, int]:
    """The smallest box around a box with edges at multiples of `part`; an image's last pixels beyond its last multiple are left out."""
    width, height = (side // part * part for side in image_size)
    left, top = (side // part * part for side in box[:2])
    right, bottom = (-(-side // part) * part for side in box[2:])
    return left, top, min(right, width), min(bottom, height)


def random_box(image_size: tuple[int, int], min_area: float, rng: random.Random) -> tuple[int, int, int, int]:
    """A random crop of an image: area from `min_area` to 1, aspect ratio 3:4 to 4:3 (https://arxiv.org/abs/1409.4842, section 6).

    Returns:
        left, top, right, bottom in pixels; if none of ten draws fits, the largest crop of such an aspect ratio in the middle.
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

    The aspect ratio is 0.3 to 1 / 0.3, and each pixel has its own noise, as in timm; if none of ten draws fits, nothing is erased.

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
