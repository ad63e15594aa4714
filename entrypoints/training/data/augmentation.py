"""How one training image is varied: crop, shift, rotation, mirroring, erasing, all from the numbers of one generator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

from training.data.decoding import as_pixels

VIEWS_VERSION = 1
"""Raise it whenever a change of the code changes the pixels of a view: what was kept of the old views is then not used."""


@dataclass(frozen=True)
class Augmentation:
    """How a training image is varied. All zero or one: not at all."""

    min_crop_area: float = 1.0
    horizontal_flip: bool = False
    max_shift_pixels: int = 0
    max_rotation_degrees: float = 0.0
    random_erasing: float = 0.0
    """Share of the images that lose a box."""

    def __call__(self, image: Image.Image, size: int, chance: random.Random) -> np.ndarray:
        """Uint8 (channels, size, size) of an image in mode L or RGB, varied by the numbers that `chance` draws."""
        if self.min_crop_area < 1:
            box = random_box(image.size, self.min_crop_area, chance)
            image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
        else:
            image = fit(image, size)
        if self.max_shift_pixels or self.max_rotation_degrees:
            shift = tuple(chance.randint(-self.max_shift_pixels, self.max_shift_pixels) for _ in range(2))
            angle = chance.uniform(-self.max_rotation_degrees, self.max_rotation_degrees)
            image = image.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
        if self.horizontal_flip and chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = as_pixels(image)
        if self.random_erasing and chance.random() < self.random_erasing:
            erase(pixels, chance)
        return pixels


def fit(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` (bilinear, antialiased) and cut the middle `size` × `size`.

    It rounds as torchvision's Resize and CenterCrop do, so that timm's transform gives an exported model the same pixels.
    """
    short = min(image.size)
    scaled = tuple(size if side == short else int(size * side / short) for side in image.size)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in scaled)
    return image.crop((left, top, left + size, top + size))


def random_box(image_size: tuple[int, int], min_area: float, chance: random.Random) -> tuple[int, int, int, int]:
    """A random part of an image: its area from `min_area` to 1, its aspect 3:4 to 4:3 (https://arxiv.org/abs/1409.4842, section 6).

    Returns:
        left, top, right, bottom in pixels; where ten draws do not fit, the largest part of that aspect in the middle.
    """
    width, height = image_size
    for _ in range(10):
        area = width * height * chance.uniform(min_area, 1)
        wide, high = _sides(area, chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        if 0 < wide <= width and 0 < high <= height:
            left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def erase(pixels: np.ndarray, chance: random.Random) -> None:
    """Random erasing (https://arxiv.org/abs/1708.04896, algorithm 1): noise in a box of 2 % to a third of the area; in place.

    The aspect is 0.3 to 1 / 0.3 and every pixel's noise its own, as in timm; where ten draws do not fit nothing is erased.

    Args:
        pixels: uint8 (channels, height, width).
    """
    channels, height, width = pixels.shape
    for _ in range(10):
        area = width * height * chance.uniform(0.02, 1 / 3)
        wide, high = _sides(area, chance.uniform(math.log(0.3), math.log(1 / 0.3)))
        if 0 < wide < width and 0 < high < height:
            left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
            noise = np.frombuffer(chance.randbytes(channels * high * wide), np.uint8)
            pixels[:, top : top + high, left : left + wide] = noise.reshape(channels, high, wide)
            return


def _sides(area: float, log_aspect: float) -> tuple[int, int]:
    """Width and height in whole pixels of a box of that area."""
    aspect = math.exp(log_aspect)
    return round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
