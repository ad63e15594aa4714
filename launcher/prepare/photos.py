"""JPEGs cut from the two photographs that scikit-learn brings, by number: real images of a usual size, to measure preprocessing with."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

CLASSES = ("china", "flower")
"""A temple and a dahlia: https://scikit-learn.org/stable/modules/generated/sklearn.datasets.load_sample_image.html"""

EACH = 320
"""Images of a class."""

WIDTH, HEIGHT = 400, 300
LEAST_SCALE = 0.6
"""Of the largest part of the photograph that has this aspect, the least that is taken."""


def draw(label: str, number: int) -> Image:
    """A part of a photograph, 400 × 300 pixels (RGB). The same label and number give the same pixels."""
    picture, rng = photograph(label), random.Random(f"photos/{label}/{number}")
    largest = min(picture.width / WIDTH, picture.height / HEIGHT)
    scale = largest * rng.uniform(LEAST_SCALE, 1)
    left = rng.uniform(0, picture.width - WIDTH * scale)
    top = rng.uniform(0, picture.height - HEIGHT * scale)
    box = (left, top, left + WIDTH * scale, top + HEIGHT * scale)
    return picture.resize((WIDTH, HEIGHT), resample=2, box=box)


@cache
def photograph(label: str) -> Image:
    """One of the two, whole: 640 × 427 pixels (RGB)."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{label}.jpg"))
