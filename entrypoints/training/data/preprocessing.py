"""Pipelines from an image file to pixels, and which one a run takes."""

from __future__ import annotations

import random
from typing import Protocol

import numpy as np

from training.data.augmentation import Augmentation
from training.data.dali.pipeline import DaliPreprocessor, require_package
from training.data.decode.fast import FastPreprocessor
from training.data.decode.image_file import ImageFile
from training.data.decode.reference import ReferencePreprocessor


class Preprocessor(Protocol):
    """A pipeline from an image file to pixels."""

    name: str
    """Identifies what its pixels depend on, besides the arguments."""

    def about(self) -> str:
        """What does the work, for the log."""

    def varied(
        self, image: ImageFile, size: int, channels: int, augmentation: Augmentation, rng: random.Random
    ) -> np.ndarray:
        """Uint8 (channels, size, size) of an image file, augmented as drawn from `rng` for its size.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """

    def whole(self, encoded: bytes, file: str, channels: int) -> np.ndarray:
        """Uint8 (height, width) for one channel, (height, width, 3) for three, of an image file, upright.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """

    def scaled(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Uint8 (channels, *size) of pixels as `whole` returns them, bilinear, antialiased."""


def open_preprocessor(name: str, *, compose: bool = False) -> Preprocessor:
    """The pipeline of that name.

    Args:
        name: as the setting `preprocessing`.
        compose: as the setting `compose_augmentation`.

    Raises:
        ValueError: it needs a package that is missing; the message says how to get it.
    """
    if name == "dali":
        require_package()
        return DaliPreprocessor()
    return ReferencePreprocessor() if name == "cpu_reference" else FastPreprocessor(compose)
