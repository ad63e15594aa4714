"""The reference pipeline from an image file to a view's pixels: Pillow, one operation after the other, antialiased."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image

from training.data.augmentation import Augmentation, Variation
from training.data.decode.decoding import as_pixels, decode
from training.data.decode.geometry import fitted, not_too_long
from training.data.decode.image_file import ImageFile


class ReferencePreprocessor:
    """Pillow's decoder and operations."""

    name = "cpu_reference"

    def about(self) -> str:
        """The library that decodes and resizes, for the log."""
        return f"preprocessing {self.name}: images decoded, resized and rotated by Pillow"

    def held_out(self, encoded: bytes, file: str, size: int, channels: int) -> np.ndarray:
        """Uint8 (channels, size, size) of an image file's middle square.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """
        return as_pixels(fit(decode(encoded, file, channels), size))

    def varied(
        self, image: ImageFile, size: int, channels: int, augmentation: Augmentation, rng: random.Random
    ) -> np.ndarray:
        """Uint8 (channels, size, size) of an image file, augmented as drawn from `rng`.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """
        whole = image.decoded(channels, lambda: decode(image.encoded, image.name, channels))
        return as_pixels(vary(whole, size, augmentation.draw(whole.size, size, rng)))

    def whole(self, encoded: bytes, file: str, channels: int) -> np.ndarray:
        """Uint8 (height, width) for one channel, (height, width, 3) for three, of an image file, upright.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """
        return np.array(decode(encoded, file, channels))

    def scaled(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Uint8 (channels, *size) of pixels as `whole` returns them, bilinear, antialiased."""
        return as_pixels(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR))


def vary(image: Image.Image, size: int, variation: Variation) -> Image.Image:
    """An image in mode L or RGB as a variation of `size` × `size` pixels."""
    for turn in variation.turns:
        if turn.mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if turn.upside_down:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        image = image.rotate(turn.degrees, Image.Resampling.BILINEAR)
    scaled = (size, size), Image.Resampling.BILINEAR
    image = fit(image, size) if variation.box is None else image.resize(*scaled, box=variation.box)
    if variation.degrees or variation.shift != (0, 0):
        image = image.rotate(variation.degrees, Image.Resampling.BILINEAR, translate=variation.shift)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if variation.mirrored else image


def fit(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` (bilinear, antialiased) and cut the middle `size` × `size`.

    It rounds as torchvision's Resize and CenterCrop do, so timm's transform gives an exported model the same pixels.
    """
    box = not_too_long(*image.size)
    image = image if box == (0, 0, *image.size) else image.crop(box)
    scaled = fitted(*image.size, size)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in scaled)
    return image.crop((left, top, left + size, top + size))
