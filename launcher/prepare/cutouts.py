"""Photographed things with their outlines, from Debian's tuxpaint-stamps-default, laid on photographs by number, with masks.

The cut-outs' transparency is their mask; what the photographs show is background, their dahlia too. The cut-outs of the held-out
images, and the part of the photographs behind them, are in no training image: what a model finds there, it has learned of the class.
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
"""Where the package puts them. They are under the GPL, version 2, and other free licences; docs/COPYING.txt of tuxpaint-stamps."""

CLASSES = {"animal": "animals", "food": "food", "plant": "plants", "vehicle": "vehicles"}
"""Those in the order of the mask's pixel values, from 1 on, and the package's folder of each; 0 is the background."""

IMAGES = 1200
SIZE = 96
"""Height and width in pixels, unless asked for otherwise."""

IGNORED = 255
"""The mask's value where a cut-out is neither opaque nor transparent: its edge belongs to neither side."""

OPAQUE, TRANSPARENT = 230, 25
"""Of an alpha of 0 to 255: from here on, and up to here."""

HELD_OUT_WIDTH = 0.3
"""Share of the photographs' width, on the right, that only held-out images show."""

KEPT_SIZE = 256
"""Pixels of the longer side of a cut-out, as it is kept in memory."""


def find(folder: Path) -> dict[str, list[str]]:
    """The cut-outs of each class, sorted: PNG files with transparency; drawings are left out."""
    from PIL import Image

    found: dict[str, list[str]] = {name: [] for name in CLASSES}
    for name, inside in CLASSES.items():
        for file in sorted((folder / inside).rglob("*.png")):
            if "cartoon" in file.relative_to(folder).as_posix().lower():
                continue
            with Image.open(file) as opened:  # reads its header
                if opened.mode in ("RGBA", "LA") or "transparency" in opened.info:
                    found[name].append(str(file))
    return found


def draw(number: int, split: str, files: Mapping[str, Sequence[str]], size: int = SIZE) -> tuple[Image, Image]:
    """One image and its mask: one to three cut-outs on a part of a photograph. The same arguments give the same pixels.

    Args:
        split: train or validation; which part of the photographs it shows.
        files: this split's cut-outs of each class.

    Returns:
        The image (RGB), and the mask (8-bit grey): 0 to 4, or IGNORED.
    """
    return _draw(number, split, tuple((name, tuple(files[name])) for name in CLASSES), size)


@lru_cache(maxsize=4)  # the image is asked for first, then its mask
def _draw(number: int, split: str, files: tuple[tuple[str, tuple[str, ...]], ...], size: int) -> tuple[Image, Image]:
    from PIL import Image, ImageEnhance, ImageOps

    rng = random.Random(f"cutouts/{split}/{number}/{size}")
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
        # at least half of its width and height is inside
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
    """RGBA, without its empty margin, and no larger than any image needs."""
    from PIL import Image

    with Image.open(file) as opened:
        cutout: Image.Image = opened.convert("RGBA")
    cutout = cutout.crop(cutout.getchannel("A").getbbox() or (0, 0, *cutout.size))
    cutout.thumbnail((KEPT_SIZE, KEPT_SIZE))
    return cutout
