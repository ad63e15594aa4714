"""Labelled image folders, `<root>/<class>/<image>`: their images as they are held out, and views of them to train on."""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from training.data.augmentation import VIEWS_VERSION, Augmentation, fit
from training.data.batches import Data, Draw, LabelledBatch
from training.data.decoding import as_pixels, read_image
from training.data.mixing import Mixing, partners
from training.script_settings import LabelledImageSettings

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class LabelledFolder:
    """The images of a folder with one subfolder a class, numbered by class and then by path."""

    def __init__(self, root: Path, channels: int = 3, images_per_class: int | None = None):
        """List the images; none is opened.

        Args:
            channels: 1 for grey, 3 for colour.
            images_per_class: only the first so many of each class. None: all.

        Raises:
            ValueError: there is no class, or one without images.
        """
        found = {name: files[:images_per_class] for name, files in find_images(root).items()}
        self.root, self.channels, self.classes = root, channels, list(found)
        self.labels = np.repeat(np.arange(len(found)), [len(files) for files in found.values()])
        """int64 (images,), class numbers."""
        # One array, because worker processes that only read a list of a million strings come to own a copy each: reading
        # counts references, which writes to the pages that they share (https://github.com/pytorch/pytorch/issues/13246).
        self._files = np.array([os.fsencode(file) for files in found.values() for file in files])

    def __len__(self) -> int:
        return len(self._files)

    def path(self, number: int) -> Path:
        return self.root / os.fsdecode(self._files[number])

    def read(self, number: int) -> Image.Image:
        """An image in mode L or RGB; a ValueError names the file that cannot be read."""
        return read_image(self.path(number), self.channels)

    def digest(self) -> str:
        """SHA-256 of every image's path below the root, which begins with its class, and its size in bytes, in order.

        The content is not read: to ask a million files for their size takes seconds on a disk, minutes on a slow file system.
        """
        found, root = hashlib.sha256(), os.fsencode(self.root)
        for file in self._files:
            found.update(b"%b\0%d\0" % (file, os.stat(os.path.join(root, file)).st_size))
        return found.hexdigest()


class HeldOutImages(Dataset):
    """Images as they are, scaled to `size` and cut to the middle square.

    Indexed by (0, number); gives uint8 pixels (channels, size, size) and the class number.
    """

    def __init__(self, folder: LabelledFolder, size: int):
        self.folder, self.size = folder, size

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, int]:
        _, number = draw
        image = fit(self.folder.read(number), self.size)
        return torch.from_numpy(as_pixels(image)), int(self.folder.labels[number])

    def resized(self, size: int) -> HeldOutImages:
        """The same images at another size, such as a teacher's."""
        return HeldOutImages(self.folder, size)


class LabelledView(NamedTuple):
    """One item of a LabelledBatch."""

    image: torch.Tensor
    label: int
    other_label: int
    own_share: float
    number: int
    view: int


class TrainingViews(Dataset):
    """Varied and mixed training images, indexed by (view, number).

    What is drawn depends on the seed, the view and the number alone, never on the process, the batch or the order. An image is
    varied first and mixed then, as in DeiT; so it is erased before it is mixed. Its partner is varied as in its own view.
    """

    def __init__(self, folder: LabelledFolder, size: int, augmentation: Augmentation, mixing: Mixing, seed: int = 0):
        self.folder, self.size, self.augmentation, self.mixing, self.seed = folder, size, augmentation, mixing, seed

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, draw: Draw) -> LabelledView:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: list[Draw]) -> list[LabelledView]:
        """The items of a batch, for which DataLoader asks at once: an image and its partner there are decoded once, not twice."""
        varied = functools.cache(self._varied)
        return [self._view(view, number, varied) for view, number in draws]

    def view_description(self) -> dict[str, Any]:
        """All that the pixels of (view, number) depend on beside the images themselves (`LabelledFolder.digest`), JSON-ready.

        The versions of Pillow and of its JPEG decoder are not in it, though they may round a pixel differently.
        """
        return {
            "version": VIEWS_VERSION,
            "seed": self.seed,
            "size": self.size,
            "channels": self.folder.channels,
            **asdict(self.augmentation),
            "mixing": asdict(self.mixing),
        }

    def _varied(self, view: int, number: int) -> np.ndarray:
        chance = random.Random(f"{self.seed}/{view}/{number}")
        return self.augmentation(self.folder.read(number), self.size, chance)

    def _view(self, view: int, number: int, varied: Callable[[int, int], np.ndarray]) -> LabelledView:
        pixels, label = varied(view, number), int(self.folder.labels[number])
        other_label, share = label, 1.0
        chance = random.Random(f"{self.seed}/{view}/{number}/mixing")
        if self.mixing.happens(chance):
            partner = int(partners(len(self), self.seed, view)[number])
            pixels, share = self.mixing(pixels, varied(view, partner), chance)
            other_label = int(self.folder.labels[partner])
        return LabelledView(torch.from_numpy(pixels), label, other_label, share, number, view)


def collate_views(views: list[LabelledView]) -> LabelledBatch:
    """One batch of several items."""
    batch = LabelledBatch(*default_collate(views))
    return batch._replace(own_share=batch.own_share.float())


def open_data(
    train: Path, validation: Path, settings: LabelledImageSettings, channels: int, *, view_size: int | None = None
) -> Data:
    """The images of the channels `train` and `validation`.

    Args:
        train, validation: folders with one subfolder a class, the same classes in both.
        channels: 1 for grey, 3 for colour.
        view_size: height and width of training images where a teacher wants more pixels than `image_size`, which
            `max_shift_pixels` still refers to.

    Raises:
        ValueError: there is no class, one has no images, or the classes differ.
    """
    size = view_size or settings.image_size
    augmentation = Augmentation(
        settings.min_crop_area,
        settings.horizontal_flip,
        round(settings.max_shift_pixels * size / settings.image_size),
        settings.max_rotation_degrees,
        settings.random_erasing,
    )
    mixing = Mixing(settings.mixup, settings.cutmix, settings.mix_probability)
    training = LabelledFolder(train, channels, settings.images_per_class)
    held_out = LabelledFolder(validation, channels)
    if training.classes != held_out.classes:
        raise ValueError(_different(training, held_out))
    return Data(
        training.classes,
        TrainingViews(training, size, augmentation, mixing, settings.seed),
        HeldOutImages(held_out, settings.image_size),
        collate_views,
    )


def find_images(root: Path) -> dict[str, list[str]]:
    """By class, sorted: the images at any depth below its folder, as sorted paths from the root. Hidden ones are left out.

    Raises:
        ValueError: there is no class, or one without images.
    """
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{root} has no folders: images belong into {root}/<class>/<image>, one folder a class")
    found = {name: sorted(_images_below(root, name)) for name in classes}
    empty = [name for name, files in found.items() if not files]
    if empty:
        others = f" (nor in {len(empty) - 1} other classes)" if empty[1:] else ""
        raise ValueError(
            f"{root / empty[0]} has no images{others}: put some there ({' '.join(IMAGE_ENDINGS)}), or remove the folder"
        )
    return found


def _images_below(root: Path, name: str) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root / name, followlinks=True):
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith(".")]
        inside = os.path.relpath(folder, root)
        for file in files:
            if file.lower().endswith(IMAGE_ENDINGS) and not file.startswith("."):
                yield os.path.join(inside, file)


def _different(training: LabelledFolder, held_out: LabelledFolder) -> str:
    """What is wrong with two folders of different classes."""
    alone = [
        f"only {one.root} has {', '.join([name for name in one.classes if name not in other.classes][:5])}"
        for one, other in ((training, held_out), (held_out, training))
        if set(one.classes) - set(other.classes)
    ]
    return f"the channels train and validation hold different classes: {'; '.join(alone)}"
