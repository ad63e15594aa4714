"""Images of cut-out objects from Debian's tuxpaint-stamps-default on photographs, with masks, by index.

A cut-out's transparency is its mask. The photographs are background, the dahlia included. Validation images share neither
cut-outs nor parts of photographs with training images, so they measure generalisation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.prepare import photos

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDERS = (Path("/usr/share/tuxpaint/stamps"),)
"""The package's folder. Licences: GPL version 2 and others, see docs/COPYING.txt of tuxpaint-stamps."""

FORMATS = ("PNG",)
"""Of the cut-outs."""

CLASSES = {"animal": "animals", "food": "food", "plant": "plants", "vehicle": "vehicles"}
"""Class -> the package's folder, in the order of the mask's pixel values from 1 on; 0 is background."""

IMAGES = 1200
SIZE = 96
"""Default height and width in pixels."""

IGNORED = 255
"""The mask's value on a cut-out's edge, which is neither opaque nor transparent."""

OPAQUE, TRANSPARENT = 230, 25
"""Least alpha of opaque and largest alpha of transparent pixels, 0 to 255."""

HELD_OUT_WIDTH = 0.3
"""Share of the photographs' width, on the right, that only validation images show."""

KEPT_SIZE = 256
"""Longer side of a cut-out in memory, in pixels."""


def find(folder: Path) -> dict[str, list[str]]:
    """The cut-outs of each class, sorted: PNG files with transparency, without drawings."""
    from PIL import Image

    found: dict[str, list[str]] = {name: [] for name in CLASSES}
    for name, inside in CLASSES.items():
        for file in sorted((folder / inside).rglob("*.png")):
            if "cartoon" in file.relative_to(folder).as_posix().lower():
                continue
            with Image.open(file, formats=FORMATS) as opened:  # reads its header
                if opened.mode in ("RGBA", "LA") or "transparency" in opened.info:
                    found[name].append(str(file))
    return found


def draw(index: int, split: str, files: Mapping[str, Sequence[str]], size: int = SIZE) -> tuple[Image, Image]:
    """An image and its mask: one to three cut-outs on a part of a photograph. The arguments determine the pixels.

    Args:
        split: train or validation, which selects the part of the photographs.
        files: the split's cut-outs of each class.

    Returns:
        The image (RGB), and the mask (8-bit grey): 0 to 4, or IGNORED.
    """
    return _draw(index, split, tuple((name, tuple(files[name])) for name in CLASSES), size)


@lru_cache(maxsize=4)  # one call for the image, one for its mask
def _draw(index: int, split: str, files: tuple[tuple[str, tuple[str, ...]], ...], size: int) -> tuple[Image, Image]:
    from PIL import Image, ImageEnhance, ImageOps

    rng = random.Random(f"cutouts/{split}/{index}/{size}")
    image, mask = _background(split, size, rng), Image.new("L", (size, size), 0)
    for _ in range(rng.randint(1, 3)):
        label = rng.randrange(1, len(CLASSES) + 1)
        cutout = _cutout(rng.choice(files[label - 1][1]))
        if rng.random() < 0.5:
            cutout = ImageOps.mirror(cutout)
        scale = rng.uniform(0.4, 0.8) * size / max(cutout.size)
        width, height = cutout.size
        cutout = cutout.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BILINEAR)
        cutout = cutout.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, expand=True)
        colours = ImageEnhance.Brightness(cutout.convert("RGB")).enhance(rng.uniform(0.75, 1.25))
        # at least half of its width and height is inside the image
        width, height = cutout.size
        left = round(rng.uniform(-width / 2, size - width / 2))
        place = left, round(rng.uniform(-height / 2, size - height / 2))
        alpha = cutout.getchannel("A")
        image.paste(colours, place, alpha)
        edge = alpha.point([IGNORED if TRANSPARENT < value < OPAQUE else 0 for value in range(256)])
        inside = alpha.point([255 if value >= OPAQUE else 0 for value in range(256)])
        mask.paste(IGNORED, place, edge)
        mask.paste(label, place, inside)
    return image, mask


def _background(split: str, size: int, rng: random.Random) -> Image:
    """A square part of one of scikit-learn's photographs."""
    from PIL import ImageOps

    photograph = photos.photograph(rng.choice(photos.CLASSES))
    border = round(photograph.width * (1 - HELD_OUT_WIDTH))
    first, last = (border, photograph.width) if split == "validation" else (0, border)
    side = rng.uniform(0.5, 1) * min(last - first, photograph.height)
    left, top = rng.uniform(first, last - side), rng.uniform(0, photograph.height - side)
    part = photograph.resize((size, size), resample=2, box=(left, top, left + side, top + side))
    return ImageOps.mirror(part) if rng.random() < 0.5 else part


@cache
def _cutout(file: str) -> Image:
    """A cut-out as RGBA, cropped to its content and scaled down to KEPT_SIZE."""
    from PIL import Image

    with Image.open(file, formats=FORMATS) as opened:
        cutout: Image.Image = opened.convert("RGBA")
    cutout = cutout.crop(cutout.getchannel("A").getbbox() or (0, 0, *cutout.size))
    cutout.thumbnail((KEPT_SIZE, KEPT_SIZE))
    return cutout
