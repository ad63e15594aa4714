"""Images with masks that give each pixel's class; both are augmented together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from training.data.batches import MaskedBatch, SampleKey
from training.data.broken import BrokenImages, StandIns
from training.data.crops import CROPS_VERSION, Cut, RandomCrop
from training.data.dali.pairs import PairsByDali
from training.data.decode.decoding import BrokenImage
from training.data.decode.masks import decode_mask
from training.data.loaders import Collate, Data, collate_items
from training.data.pairs import open_pairs
from training.data.preprocessing import open_preprocessor
from training.data.sources.joint import channels_with_copies
from training.runtime.environment import read_environment
from training.settings.segmentation import SegmentationSettings

Made = TypeVar("Made")

LOOKED_AT = 8
"""Masks of a channel that are read before training."""


class MaskedView(NamedTuple):
    """One item of a MaskedBatch."""

    image: torch.Tensor
    mask: torch.Tensor
    image_index: int
    view: int


class MaskedImages:
    """A channel's images, each with its mask.

    Indexed by (view, index); returns a uint8 image (channels, height, width) and its uint8 mask. With a variation they are augmented,
    the mask is (height, width), and they come as a MaskedView; without one, the mask is as the file has it. Random draws depend only on
    the seed, the view and the index. The next readable image replaces a broken one, or one with a broken mask, if there is a variation;
    else None does.
    """

    def __init__(
        self,
        root: Path,
        settings: SegmentationSettings,
        channels: int = 3,
        variation: RandomCrop | None = None,
        *,
        broken: BrokenImages,
        sharing: int = 1,
    ):
        self.pairs = open_pairs(root, settings, sharing=sharing)
        self.settings, self.channels, self.variation = settings, channels, variation
        self.preprocessor = open_preprocessor(settings.preprocessing if variation is not None else "cpu_reference")
        self._broken, self._stand_ins = broken, StandIns(broken, len(self.pairs), self.pairs.name)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, draw: SampleKey) -> MaskedView | tuple[torch.Tensor, torch.Tensor] | None:
        view, index = draw
        if self.variation is not None:
            return self.readable(view, index, self._varied)
        try:
            pixels, mask = self._whole(index)
        except BrokenImage as error:
            self._broken.handle(error)
            return None
        return torch.from_numpy(self.preprocessor.scaled(pixels, self.settings.image_size)), torch.from_numpy(mask)

    def listing(self) -> str:
        """Identifies these images and masks and their order by name."""
        return self.pairs.listing()

    def digest(self) -> str:
        """SHA-256 that identifies these images; a teacher's answers depend on no mask."""
        return self.pairs.digest()

    def view_description(self) -> dict[str, Any]:
        """Everything that the pixels of (view, index) depend on besides the images themselves (`digest`), JSON-ready.

        The versions of the decoding libraries are not included, though they may round a pixel differently.
        """
        assert self.variation is not None, "only training images are varied"
        return {
            "version": CROPS_VERSION,
            "seed": self.settings.seed,
            "image_size": [*self.settings.image_size],
            "channels": self.channels,
            "preprocessing": self.preprocessor.name,
            **asdict(self.variation),
        }

    def stand_in(self, index: int) -> int:
        """The image served when this one is requested: itself or, if it or its mask is broken, the next readable one."""
        return self.readable(1, index, self._varied).image_index

    def readable(self, view: int, index: int, make: Callable[[int, int], Made]) -> Made:
        """What `make` returns for the first image from this index on that can be read, and whose mask can."""
        return self._stand_ins.first(index, lambda candidate: make(view, candidate))[1]

    def cut(self, view: int, index: int, mask: np.ndarray) -> tuple[Cut, np.ndarray]:
        """The part of an image that a view shows, and its mask, uint8 (*crop_size), cut from the given whole mask."""
        settings, variation = self.settings, self.variation
        assert variation is not None, "only training images are cut"
        rng = random.Random(f"{settings.seed}/{view}/{index}")
        cut = variation.draw(mask.shape, settings.image_size, rng)
        left, top, right, bottom = cut.box
        labels = Image.fromarray(mask[top:bottom, left:right]).resize(cut.size[::-1], Image.Resampling.NEAREST)
        return cut, cut.on_canvas(np.array(labels), variation.crop_size, settings.ignore_index)

    def mask(self, index: int, image_size: tuple[int, int]) -> np.ndarray:
        """The mask of an image of that height and width, upright, as the file has it: uint8 (height, width).

        Raises:
            BrokenImage: it cannot be read.
            ValueError: it is of another size, or its pixels are no class numbers.
        """
        encoded, settings = self.pairs.mask(index), self.settings
        file = self.pairs.mask_name(index)
        mask = read_mask(encoded, file, settings.classes, settings.ignore_index)
        if image_size != mask.shape:
            (high, wide), (mask_high, mask_wide) = image_size, mask.shape
            raise ValueError(
                f"{file} is {mask_wide} × {mask_high} pixels, its image {Path(self.pairs.name(index)).name} {wide} × {high}, "
                "upright as EXIF says: a mask needs one pixel for each pixel of its image"
            )
        return mask

    def _varied(self, view: int, index: int) -> MaskedView:
        pixels, mask = self._whole(index)
        cut, labels = self.cut(view, index, mask)
        left, top, right, bottom = cut.box
        image = self.preprocessor.scaled(pixels[top:bottom, left:right], cut.size)
        high, wide = labels.shape
        return MaskedView(
            torch.from_numpy(cut.on_canvas(image, (high, wide), 0)), torch.from_numpy(labels), index, view
        )

    def _whole(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """An image and its mask as the files have them, upright: uint8 (height, width[, 3]) and (height, width)."""
        pixels = self.preprocessor.whole(self.pairs.image(index), self.pairs.name(index), self.channels)
        return pixels, self.mask(index, pixels.shape[:2])


def open_data(
    train: Path, validation: Path, settings: SegmentationSettings, channels: int, *, output: Path | None = None
) -> Data[MaskedImages, MaskedImages]:
    """The images of the channels `train` and `validation`; the masks of `validation` keep their own sizes.

    Args:
        channels: 1 for grey, 3 for colour.
        output: this host's folder, for the list of broken images. None: they are named only in the log.

    Raises:
        ValueError: there are no images, or one lacks its mask.
    """
    broken = BrokenImages(settings.on_broken_image == "fail", output)
    sharing = channels_with_copies(train, validation)
    training = open_varied(train, settings, channels, broken, sharing=sharing)
    held_out = MaskedImages(validation, settings, channels, broken=broken, sharing=sharing)
    return Data(
        settings.names,
        training,
        held_out,
        collate_masked,
        stack_images,
        order=training.pairs.order,
        announce=training.pairs.announce(),
        notes=(
            training.preprocessor.about(),
            *training.pairs.notes,
            *held_out.pairs.notes,
            *_one_label_alone(training, "training"),
            *_one_label_alone(held_out, "validation"),
        ),
        recipe=PairsByDali(training) if settings.preprocessing == "dali" else None,
        elsewhere=partial(open_elsewhere, settings, channels),
        numbered=True,
    )


def _one_label_alone(images: MaskedImages, channel: str) -> list[str]:
    """A warning if masks of two classes hold only one of them besides what is ignored: many programs write 0 and 255. It looks at some,
    spread over the channel."""
    settings, seen = images.settings, set[int]()
    step = max(1, -(-len(images) // LOOKED_AT))
    for index in range(0, len(images), step) if settings.classes == 2 else ():
        with contextlib.suppress(BrokenImage, ValueError):  # reported when it is used
            encoded = images.pairs.mask(index)
            seen |= {*np.unique(read_mask(encoded, images.pairs.mask_name(index), 2, settings.ignore_index)).tolist()}
    labels = seen - {settings.ignore_index}
    if settings.ignore_index not in seen or len(labels) != 1:
        return []
    [label] = labels
    return [
        f"WARNING: the {channel} masks that were looked at hold class {label} and {settings.ignore_index} only, and the latter is ignored. "
        f"If it stands for class {1 - label}, as in masks of 0 and 255, write {1 - label} instead"
    ]


def open_varied(
    train: Path, settings: SegmentationSettings, channels: int, broken: BrokenImages, *, sharing: int = 1
) -> MaskedImages:
    """Training images and their masks; the arguments are those of `open_data` and `open_pairs`."""
    crop_size = settings.crop_size or settings.image_size
    variation = RandomCrop(crop_size, settings.min_scale, settings.max_scale, settings.horizontal_flip)
    return MaskedImages(train, settings, channels, variation, broken=broken, sharing=sharing)


def open_elsewhere(settings: SegmentationSettings, channels: int) -> tuple[MaskedImages, Collate]:
    """The images of this host's own channel `train`, as `open_data` opens them, and what makes batches of them."""
    environment = read_environment()
    broken = BrokenImages(fail=True)  # the requester decides what replaces a broken image
    return open_varied(environment.channel("train"), settings, channels, broken), collate_masked


def collate_masked(items: list[MaskedView], images: torch.Tensor | None = None) -> MaskedBatch:
    """One batch of several augmented images and masks; the images may be stacked already."""
    return MaskedBatch(*collate_items(items, images))


def stack_images(
    items: list[tuple[torch.Tensor, torch.Tensor]], images: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A batch of images (batch, channels, height, width), and the list of their masks, which may differ in size."""
    stacked, masks = zip(*items)
    return torch.stack(stacked) if images is None else images, list(masks)


def read_mask(encoded: bytes, file: str | Path, classes: int, ignore_index: int) -> np.ndarray:
    """A mask, uint8 (height, width).

    Args:
        encoded: a whole mask file.
        file: its path, for messages.

    Raises:
        BrokenImage: it cannot be read as an image.
        ValueError: it holds no class numbers, or one that is neither below `classes` nor `ignore_index`.
    """
    mask = decode_mask(encoded, file)
    wrong = (mask >= classes) & (mask != ignore_index)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"{file}: class {mask[row, column]} at row {row}, column {column} ({wrong.sum()} such pixels). With classes: "
            f"{classes}, valid numbers are 0 to {classes - 1}, and {ignore_index} for ignored pixels: correct the mask, or raise classes"
        )
    return mask
