"""Channels of JPEG files like those from the web and from cameras, made from scikit-learn's photographs."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from pathlib import Path

import sklearn
from PIL import Image

SMALL, LARGE = (400, 300), (1600, 1200)
QUALITY = {SMALL: 96, LARGE: 92}
"""Pillow's, so that small files come near ImageNet's 4.7 bits per pixel (138 GB for 1.28 million, of 181,500 pixels), and large ones
have a camera's 2.6."""
PHOTOGRAPHS = Path(sklearn.__file__).parent / "datasets" / "images"
NAMES = ("china.jpg", "flower.jpg")


def part_of_a_photograph(rng: random.Random) -> Image.Image:
    """400 x 300 pixels, resized from a part with 40 to 88 % of a photograph's width."""
    image = Image.open(PHOTOGRAPHS / rng.choice(NAMES))
    wide = round(image.width * rng.uniform(0.4, 0.88))
    high = wide * 3 // 4
    left, top = rng.randint(0, image.width - wide), rng.randint(0, image.height - high)
    return image.resize(SMALL, Image.Resampling.LANCZOS, box=(left, top, left + wide, top + high))


def write_images(root: Path, size: tuple[int, int], different: int, count: int) -> None:
    """A channel of `count` JPEGs: `different` distinct ones, and links to them."""
    rng, folder = random.Random(0), root / "photographs"
    folder.mkdir(parents=True)
    for number in range(different):
        image = Image.new("RGB", size)
        for left, top in itertools.product(range(0, size[0], SMALL[0]), range(0, size[1], SMALL[1])):
            image.paste(part_of_a_photograph(rng), (left, top))
        image.save(folder / f"{number:05}.jpg", quality=QUALITY[size])
    files = sorted(folder.iterdir())
    for number in range(different, count):
        os.link(files[number % different], folder / f"{number:05}.jpg")


def some_of(root: Path, count: int) -> Path:
    """The first `count` images of a channel as their own channel: a round is then an epoch, and what was prefetched is used in it."""
    folder = root.with_name(f"{root.name}-{count}") / "photographs"
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in sorted(root.rglob("*.jpg"))[:count]:
            os.link(file, folder / file.name)
    return folder.parent


def bits_per_pixel(root: Path, size: tuple[int, int]) -> float:
    """Of a channel's files, on average."""
    return 8 * statistics.mean(file.stat().st_size for file in root.rglob("*.jpg")) / (size[0] * size[1])
