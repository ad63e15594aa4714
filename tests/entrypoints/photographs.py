"""The photographs that scikit-learn brings, and what tells how alike two images are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import sklearn
from PIL import Image

FOLDER = Path(sklearn.__file__).parent / "datasets" / "images"

NAMES = ("china", "flower")
"""640 × 427 pixels, colour."""


def labelled(root: Path, count: int) -> Path:
    """So many photographs of different sizes in three classes, in train and in validation."""
    for split in ("train", "validation"):
        for number in range(count):
            folder = root / split / "abc"[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            image = pixels_of(NAMES[number % 2], (60 + 3 * number, 50 + number))
            (folder / f"{number:02}.jpg").write_bytes(jpeg(image))
    return root


def photograph(name: str) -> bytes:
    """The JPEG file."""
    return (FOLDER / f"{name}.jpg").read_bytes()


def pixels_of(name: str, size: tuple[int, int] | None = None) -> Image.Image:
    """In mode RGB, scaled to width and height where asked for."""
    with Image.open(io.BytesIO(photograph(name))) as opened:
        return opened.convert("RGB") if size is None else opened.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def jpeg(image: Image.Image, **options) -> bytes:
    """An image as a JPEG file."""
    image.save(buffer := io.BytesIO(), "JPEG", **{"quality": 92, **options})
    return buffer.getvalue()


def psnr(one: np.ndarray, other: np.ndarray, where: np.ndarray | None = None) -> float:
    """Peak signal-to-noise ratio of uint8 images of one shape in dB: 10 log10(255² / mean squared difference).

    Args:
        where: the pixels that count.
    """
    squared = (one.astype(np.float64) - other) ** 2
    error = (squared if where is None else squared[where]).mean()
    return 10 * np.log10(255**2 / error) if error else np.inf


def draw_noise(root: Path, size: tuple[int, int], train: int, validation: int) -> None:
    """Two classes of images of noise, one with more of it, as channels: a number of each class.

    Args:
        size: width and height.
    """
    for part, images in (("train", train), ("validation", validation)):
        for label in range(2):
            (root / part / f"class-{label}").mkdir(parents=True)
            for number in range(images):
                image = Image.effect_noise(size, 30 + 40 * label).convert("RGB")
                (root / part / f"class-{label}" / f"{number}.jpg").write_bytes(jpeg(image))
