"""Images with a mask each: what a pixel shows is its class. Both are varied together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from training.data.batches import Draw
from training.data.decoding import as_pixels, decode
from training.data.loaders import Data, collate_items
from training.data.mask_decoding import decode_mask
from training.data.pairs import open_pairs
from training.script_settings import SegmentationSettings


@dataclass(frozen=True)
class Variation:
    """How a training image and its mask are varied together."""

    crop_size: tuple[int, int]
    min_scale: float
    max_scale: float
    horizontal_flip: bool

    def __call__(
        self, image: Image.Image, mask: Image.Image, size: tuple[int, int], ignore_index: int, chance: random.Random
    ) -> tuple[Image.Image, Image.Image]:
        """Scaled to `size` (height, width) times a random factor, cut at a random place, mirrored or not.

        What the crop has beyond the image is black, and ignored in the mask.
        """
        scale = chance.uniform(self.min_scale, self.max_scale)
        height, width = (max(1, round(side * scale)) for side in size)
        high, wide = self.crop_size
        top = chance.randint(min(0, height - high), max(0, height - high))
        left = chance.randint(min(0, width - wide), max(0, width - wide))
        seen = (max(left, 0), max(top, 0), min(left + wide, width), min(top + high, height))  # of the scaled image
        across, down = image.width / width, image.height / height
        box = (
            seen[0] * across,
            seen[1] * down,
            seen[2] * across,
            seen[3] * down,
        )  # the same part of the image as it is

        def cut(whole: Image.Image, resampling: Image.Resampling, beyond: int) -> Image.Image:
            part = whole.resize((seen[2] - seen[0], seen[3] - seen[1]), resampling, box=box)
            canvas = Image.new(whole.mode, (wide, high), (beyond,) * len(whole.getbands()))
            canvas.paste(part, (seen[0] - left, seen[1] - top))
            return canvas

        image = cut(image, Image.Resampling.BILINEAR, 0)
        mask = cut(mask, Image.Resampling.NEAREST, ignore_index)
        if self.horizontal_flip and chance.random() < 0.5:
            image, mask = (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in (image, mask))
        return image, mask


class MaskedBatch(NamedTuple):
    """Training images, each with its mask."""

    images: torch.Tensor
    """uint8 (batch, channels, height, width)."""
    masks: torch.Tensor
    """uint8 (batch, height, width), class numbers, or `ignore_index`."""


class MaskedImages(Dataset):
    """Images of a channel, each with its mask.

    Indexed by (view, number); gives a uint8 image (channels, height, width) and its uint8 mask: varied and (height, width)
    with a variation, else as the file has it. What is drawn for an image depends on the seed, the view and its number alone.
    """

    def __init__(
        self, root: Path, settings: SegmentationSettings, channels: int = 3, variation: Variation | None = None
    ):
        self.pairs = open_pairs(root, settings)
        self.settings, self.channels, self.variation = settings, channels, variation

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        view, number = draw
        settings = self.settings
        file, mask_file = self.pairs.name(number), self.pairs.mask_name(number)
        image = decode(self.pairs.image(number), file, self.channels)
        mask = read_mask(self.pairs.mask(number), mask_file, settings.classes, settings.ignore_index)
        if image.size != mask.size:
            raise ValueError(
                f"{mask_file} is {mask.width} × {mask.height} pixels, its image {Path(file).name} {image.width} × "
                f"{image.height}, upright as EXIF says: a mask has a pixel for each of its image's"
            )
        if self.variation is None:
            image = image.resize(settings.image_size[::-1], Image.Resampling.BILINEAR)
        else:
            chance = random.Random(f"{settings.seed}/{view}/{number}")
            image, mask = self.variation(image, mask, settings.image_size, settings.ignore_index, chance)
        return torch.from_numpy(as_pixels(image)), torch.from_numpy(np.array(mask))


def open_data(train: Path, validation: Path, settings: SegmentationSettings, channels: int) -> Data:
    """The images of the channels `train` and `validation`, whose masks there stay in their own sizes.

    Args:
        channels: 1 for grey, 3 for colour.

    Raises:
        ValueError: there are no images, or one lacks its mask.
    """
    crop_size = settings.crop_size or settings.image_size
    variation = Variation(crop_size, settings.min_scale, settings.max_scale, settings.horizontal_flip)
    training, held_out = (
        MaskedImages(train, settings, channels, variation),
        MaskedImages(validation, settings, channels),
    )
    return Data(
        [str(number) for number in range(settings.classes)],
        training,
        held_out,
        collate_masked,
        stack_images,
        order=training.pairs.order,
        announce=training.pairs.announce(),
        notes=training.pairs.notes + held_out.pairs.notes,
    )


def collate_masked(items: list[tuple[torch.Tensor, torch.Tensor]], images: torch.Tensor | None = None) -> MaskedBatch:
    """One batch of several varied images and masks; the images may lie together already."""
    return MaskedBatch(*collate_items(items, images))


def stack_images(
    items: list[tuple[torch.Tensor, torch.Tensor]], images: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A batch of images (batch, channels, height, width), and the list of their masks, which may differ in size."""
    stacked, masks = zip(*items)
    return torch.stack(stacked) if images is None else images, list(masks)


def read_mask(encoded: bytes, file: str | Path, classes: int, ignore_index: int) -> Image.Image:
    """A mask of 8 bits a pixel.

    Args:
        encoded: a whole mask file.
        file: where it lies, for messages.

    Raises:
        ValueError: it is no image, holds no class numbers, or one that is neither below `classes` nor `ignore_index`.
    """
    mask = decode_mask(encoded, file)
    wrong = (mask >= classes) & (mask != ignore_index)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"{file}: class {mask[row, column]} at row {row}, column {column} ({wrong.sum()} such pixels). With classes: "
            f"{classes} they are 0 to {classes - 1}, or {ignore_index} to be ignored: correct the mask, or raise classes"
        )
    return Image.fromarray(mask)
