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
    photograph, chance = _photograph(label), random.Random(f"photos/{label}/{number}")
    largest = min(photograph.width / WIDTH, photograph.height / HEIGHT)
    scale = largest * chance.uniform(LEAST_SCALE, 1)
    left = chance.uniform(0, photograph.width - WIDTH * scale)
    top = chance.uniform(0, photograph.height - HEIGHT * scale)
    box = (left, top, left + WIDTH * scale, top + HEIGHT * scale)
    return photograph.resize((WIDTH, HEIGHT), resample=2, box=box)


@cache
def _photograph(label: str) -> Image:
    from PIL import Image
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{label}.jpg"))
