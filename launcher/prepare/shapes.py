"""Images of coloured shapes with masks, by index, to show that a segmentation job learns."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = 400
CLASSES = ("background", "disc", "square", "triangle")
"""In the order of the mask's pixel values."""

SIZE = 64
"""Default height and width in pixels."""

IGNORED = 255
"""The mask's value on a shape's outline, as in PASCAL VOC."""

COLOURS = ((90, 90, 90), (200, 80, 80), (80, 180, 90), (90, 100, 200))
"""Mean colour of each class. A shape differs by up to COLOUR_SPREAD, so colours of two classes come close."""

COLOUR_SPREAD = 45
NOISE_SHARE = 0.25


def draw(index: int, size: int = SIZE) -> tuple[Image, Image]:
    """An image and its mask: one to four shapes, later ones on top. Index and size determine the pixels.

    Returns:
        The image (RGB), and the mask (8-bit grey): 0 to 3, or IGNORED.
    """
    from PIL import Image, ImageDraw

    rng = random.Random(f"shapes/{index}/{size}")
    image = Image.new("RGB", (size, size), _colour(0, rng))
    mask = Image.new("L", (size, size), 0)
    for _ in range(rng.randint(1, 4)):
        label = rng.randrange(1, len(CLASSES))
        radius = rng.uniform(0.12, 0.28) * size
        x, y = (rng.uniform(radius, size - radius) for _ in range(2))
        colour = _colour(label, rng)
        for canvas, fill, outline in ((image, colour, colour), (mask, label, IGNORED)):
            pencil = ImageDraw.Draw(canvas)
            box = [x - radius, y - radius, x + radius, y + radius]
            if CLASSES[label] == "disc":
                pencil.ellipse(box, fill, outline)
            elif CLASSES[label] == "square":
                pencil.rectangle(box, fill, outline)
            else:
                pencil.polygon([x, y - radius, x + radius, y + radius, x - radius, y + radius], fill, outline)
    noise = Image.frombytes("RGB", (size, size), rng.randbytes(3 * size * size))
    return Image.blend(image, noise, NOISE_SHARE), mask


def _colour(label: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(min(max(part + rng.randint(-COLOUR_SPREAD, COLOUR_SPREAD), 0), 255) for part in COLOURS[label])
