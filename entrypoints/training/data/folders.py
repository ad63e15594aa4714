"""Labelled image folders, `<root>/<class>/<image>`, and how their training images are varied."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from training.data.batches import Data, Draw, load_batches
from training.distributed import World
from training.script_settings import LabelledImageSettings


@dataclass(frozen=True)
class Augmentation:
    """How a training image is varied. All zero or one: not at all."""

    min_crop_area: float = 1.0
    horizontal_flip: bool = False
    max_shift_pixels: int = 0
    max_rotation_degrees: float = 0.0

    def __call__(self, image: Image.Image, size: int, chance: random.Random) -> Image.Image:
        """The image at `size` × `size` pixels, varied by the numbers that `chance` draws."""
        if self.min_crop_area < 1:
            box = random_box(image.size, self.min_crop_area, chance)
            image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
        else:
            image = fit(image, size)
        if self.max_shift_pixels or self.max_rotation_degrees:
            shift = tuple(chance.randint(-self.max_shift_pixels, self.max_shift_pixels) for _ in range(2))
            angle = chance.uniform(-self.max_rotation_degrees, self.max_rotation_degrees)
            image = image.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
        if self.horizontal_flip and chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image


class LabelledFolder(Dataset):
    """Images of a folder with one subfolder a class.

    Indexed by (epoch, number); gives a uint8 tensor (channels, size, size) and the class number. What is drawn for an image
    depends on the seed, the epoch and its number alone, never on the process that draws.
    """

    def __init__(
        self,
        root: Path,
        image_size: int,
        channels: int = 3,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        images_per_class: int | None = None,
    ):
        folder = ImageFolder(str(root))
        self.classes: list[str] = folder.classes
        self.images = first_of_each_class(folder.samples, images_per_class)
        self.image_size, self.channels, self.augmentation, self.seed = image_size, channels, augmentation, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, int]:
        epoch, number = draw
        path, label = self.images[number]
        with Image.open(path) as opened:
            image = opened.convert("L" if self.channels == 1 else "RGB")
        if self.augmentation is None:
            image = fit(image, self.image_size)
        else:
            image = self.augmentation(image, self.image_size, random.Random(f"{self.seed}/{epoch}/{number}"))
        pixels = np.array(image, dtype=np.uint8).reshape(self.image_size, self.image_size, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1), label


def open_data(train: Path, validation: Path, settings: LabelledImageSettings, channels: int, world: World) -> Data:
    """Loaders over the channels `train` and `validation`.

    Args:
        train, validation: folders with one subfolder a class, the same classes in both.
        channels: 1 for grey, 3 for colour.

    Raises:
        ValueError: the classes differ, or there are too few images for one batch.
    """
    augmentation = Augmentation(
        settings.min_crop_area, settings.horizontal_flip, settings.max_shift_pixels, settings.max_rotation_degrees
    )
    training = LabelledFolder(
        train, settings.image_size, channels, augmentation, settings.seed, settings.images_per_class
    )
    held_out = LabelledFolder(validation, settings.image_size, channels)
    if training.classes != held_out.classes:
        different = sorted(set(training.classes) ^ set(held_out.classes))
        raise ValueError(
            f"the channels train and validation hold different classes: only one of them has {', '.join(different[:5])}"
        )
    return load_batches(training.classes, training, held_out, settings, world)


def first_of_each_class(images: list[tuple[str, int]], count: int | None) -> list[tuple[str, int]]:
    """The first `count` of each class of (path, class number) pairs sorted by path; all of them for None."""
    taken: Counter[int] = Counter()
    kept = []
    for path, label in images:
        taken[label] += 1
        if count is None or taken[label] <= count:
            kept.append((path, label))
    return kept


def fit(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` (bilinear, antialiased) and cut the middle `size` × `size`."""
    width, height = image.size
    scale = size / min(width, height)
    scaled = (max(size, round(width * scale)), max(size, round(height * scale)))
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_box(image_size: tuple[int, int], min_area: float, chance: random.Random) -> tuple[int, int, int, int]:
    """A random part of an image: its area from `min_area` to 1, its aspect 3:4 to 4:3 (https://arxiv.org/abs/1409.4842, section 6).

    Returns:
        left, top, right, bottom in pixels; where ten draws do not fit, the largest part of that aspect in the middle.
    """
    width, height = image_size
    for _ in range(10):
        area = width * height * chance.uniform(min_area, 1)
        aspect = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = chance.randint(0, width - wide), chance.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
