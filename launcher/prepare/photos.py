"""Parts of scikit-learn's two photographs by index: real images of a usual size, to measure preprocessing."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

CLASSES = ("china", "flower")
"""A temple and a dahlia: https://scikit-learn.org/stable/modules/generated/sklearn.datasets.load_sample_image.html"""

EACH = 320
"""Images per class."""

WIDTH, HEIGHT = 400, 300
MIN_SCALE = 0.6
"""Least size of a part, relative to the largest of this aspect ratio."""


def draw(label: str, index: int) -> Image:
    """A part of a photograph, 400 × 300 pixels (RGB). Label and index determine the pixels."""
    picture, rng = photograph(label), random.Random(f"photos/{label}/{index}")
    largest = min(picture.width / WIDTH, picture.height / HEIGHT)
    scale = largest * rng.uniform(MIN_SCALE, 1)
    left = rng.uniform(0, picture.width - WIDTH * scale)
    top = rng.uniform(0, picture.height - HEIGHT * scale)
    box = (left, top, left + WIDTH * scale, top + HEIGHT * scale)
    return picture.resize((WIDTH, HEIGHT), resample=2, box=box)


@cache
def photograph(label: str) -> Image:
    """A whole photograph, 640 × 427 pixels (RGB)."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{label}.jpg"))
