"""Files to train on, made on the spot: smooth pictures as JPEG, and masks as PNG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

DISTINCT = 32
"""Pictures of one folder that differ; the others are links to them."""


def picture(number: int, size: tuple[int, int]) -> Image.Image:
    """Coarse noise, enlarged: it compresses about as well as a photograph.

    Args:
        size: width and height.
    """
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (max(2, size[1] // 8), max(2, size[0] // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def labelled(root: Path, images: int, classes: int, size: tuple[int, int]) -> Path:
    """`root`/<class>/<number>.jpg, evenly over the classes."""
    originals = root.with_name(f".{root.name}")
    originals.mkdir(parents=True)
    for number in range(min(images, DISTINCT)):
        picture(number, size).save(originals / f"{number}.jpg", quality=85)
    for number in range(images):
        folder = root / f"class-{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(originals / f"{number % DISTINCT}.jpg", folder / f"{number:05d}.jpg")
    return root


def masked(root: Path, images: int, classes: int, size: tuple[int, int]) -> Path:
    """`root`/images/<number>.jpg and `root`/masks/<number>.png, whose pixels are class numbers."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(images):
        picture(number, size).save(root / f"images/{number:05d}.jpg", quality=85)
        blocks = np.random.default_rng(number).integers(0, classes, (4, 4), dtype=np.uint8)
        Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(root / f"masks/{number:05d}.png")
    return root
