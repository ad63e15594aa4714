"""Labelled image folders, `<root>/<class>/<image>`: the same batches in the same order at any number of processes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets import ImageFolder

from training.distributed import World
from training.settings import TrainingSettings

Draw = tuple[int, int]
"""Which image of which epoch: what a sampler yields, so that a worker process knows the epoch too."""


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


class TrainingBatches(Sampler[list[Draw]]):
    """This rank's share of every global batch: shuffled by seed and epoch, the last incomplete batch left out.

    The global batches are the same at any world size; rank r of n takes the r-th n-th of each.
    """

    def __init__(self, images: int, global_batch_size: int, world: World, seed: int):
        if global_batch_size % world.size:
            raise ValueError(f"global_batch_size {global_batch_size} does not divide by {world.size} processes")
        if images < global_batch_size:
            raise ValueError(f"{images} training images make no batch of {global_batch_size}: lower global_batch_size")
        self.images, self.global_batch_size, self.world, self.seed, self.epoch = (
            images,
            global_batch_size,
            world,
            seed,
            0,
        )

    def __len__(self) -> int:
        return self.images // self.global_batch_size

    def __iter__(self) -> Iterator[list[Draw]]:
        order = torch.randperm(
            self.images, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        ).tolist()
        share = self.global_batch_size // self.world.size
        for step in range(len(self)):
            first = step * self.global_batch_size + self.world.rank * share
            yield [(self.epoch, number) for number in order[first : first + share]]


class EvaluationBatches(Sampler[list[Draw]]):
    """This rank's share of all images, each exactly once over all ranks."""

    def __init__(self, images: int, batch_size: int, world: World):
        self.numbers = range(world.rank, images, world.size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        for first in range(0, len(self.numbers), self.batch_size):
            yield [(0, number) for number in self.numbers[first : first + self.batch_size]]


@dataclass(frozen=True)
class Data:
    """The loaders of a run and the classes that both folders hold."""

    classes: list[str]
    train: DataLoader
    train_batches: TrainingBatches
    validation: DataLoader


def open_data(train: Path, validation: Path, settings: TrainingSettings, channels: int, world: World) -> Data:
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
    batches = TrainingBatches(len(training), settings.global_batch_size, world, settings.seed)
    workers = {
        "num_workers": settings.num_workers,
        "persistent_workers": settings.num_workers > 0,
        "pin_memory": world.device.type == "cuda",
    }
    return Data(
        training.classes,
        DataLoader(training, batch_sampler=batches, **workers),
        batches,
        DataLoader(
            held_out,
            batch_sampler=EvaluationBatches(len(held_out), max(1, settings.global_batch_size // world.size), world),
            **workers,
        ),
    )


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
