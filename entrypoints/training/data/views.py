"""Labelled images: held-out ones as they are, and augmented views to train on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from training.data.augmentation import VIEWS_VERSION, Augmentation
from training.data.batches import LabelledBatch, SampleKey, visit_of
from training.data.broken import BrokenImages, StandIns
from training.data.dali.views import ViewsByDali
from training.data.decode.decoding import BrokenImage
from training.data.decode.image_file import ImageFile, OpenFiles
from training.data.decode.reference import ReferencePreprocessor
from training.data.loaders import Collate, Data, collate_items
from training.data.mixing import Mixing, partners
from training.data.preprocessing import Preprocessor, open_preprocessor
from training.data.sources.channels import Source, has_shards, open_source
from training.data.sources.joint import channels_with_copies, open_training
from training.data.sources.shard_index import CLASSES, read_classes
from training.data.threads import PerBatchMemo
from training.runtime.environment import Environment, read_environment
from training.settings.scripts import LabelledImageSettings

Made = TypeVar("Made")


class HeldOutImages:
    """Unaugmented images, scaled to `size` and cropped to the centre square.

    Indexed by (0, index); returns uint8 pixels (channels, size, size) and the class number, or None for a broken image. They are
    always preprocessed by the reference pipeline, so that accuracy does not depend on the training images' pipeline.
    """

    def __init__(self, source: Source, size: int, channels: int, broken: BrokenImages):
        self.source, self.size, self.channels, self.broken = source, size, channels, broken
        self._preprocessor = ReferencePreprocessor()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: SampleKey) -> tuple[torch.Tensor, int] | None:
        _, index = draw
        source = self.source
        try:
            pixels = self._preprocessor.held_out(source.image(index), source.name(index), self.size, self.channels)
        except BrokenImage as error:
            self.broken.handle(error)
            return None
        return torch.from_numpy(pixels), int(source.labels[index])

    def listing(self) -> str:
        """Identifies these images and their order by name."""
        return self.source.listing()

    def resized(self, size: int) -> HeldOutImages:
        """The same images at another size, such as a teacher's."""
        return HeldOutImages(self.source, size, self.channels, self.broken)


class LabelledView(NamedTuple):
    """One item of a LabelledBatch."""

    image: torch.Tensor
    label: int
    label_b: int
    lam: float
    image_index: int
    view: int


class TrainingViews:
    """Augmented and mixed training images, indexed by (view, index).

    Random draws depend only on the seed, the view and the index, never on the process, the batch or the order. As in DeiT, an image
    is augmented first and mixed afterwards, so it is erased before it is mixed. Its partner is augmented as in its own view.

    The next readable image replaces a broken one, under its own index and exactly as if it had been requested itself.

    Views of an image that are requested in one batch share one decoding. With `views_per_decode` N, views 1 to N share their mixing
    partners, views N + 1 to 2N do too, and so on.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        augmentation: Augmentation,
        mixing: Mixing,
        seed: int = 0,
        *,
        channels: int = 3,
        preprocessor: Preprocessor,
        broken: BrokenImages,
        views_per_decode: int = 1,
    ):
        self.source, self.size, self.augmentation, self.mixing, self.seed = source, size, augmentation, mixing, seed
        self.channels, self.preprocessor, self.views_per_decode = channels, preprocessor, views_per_decode
        self._stand_ins = StandIns(broken, len(source), source.name)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: SampleKey) -> LabelledView:
        return self.begin_batch([draw])(draw)

    def __getitems__(self, draws: list[SampleKey]) -> list[LabelledView]:
        """A batch's items, which DataLoader fetches in one call."""
        return [*map(self.begin_batch(draws), draws)]

    def begin_batch(self, draws: Sequence[SampleKey]) -> Callable[[SampleKey], LabelledView]:
        """A thread-safe getter for one batch's items: an image that occurs twice, also as a partner, is decoded once.

        Args:
            draws: all that will be requested, each once.
        """
        varied = PerBatchMemo(partial(self._varied, OpenFiles(self._file, (index for _, index in draws))))
        return lambda draw: self._view(*draw, varied)

    def view_description(self) -> dict[str, Any]:
        """Everything that the pixels of (view, index) depend on besides the images themselves (`Source.digest`), JSON-ready.

        The versions of the decoding libraries are not included, though they may round a pixel differently.
        """
        return {
            "version": VIEWS_VERSION,
            "seed": self.seed,
            "size": self.size,
            "channels": self.channels,
            "preprocessing": self.preprocessor.name,
            **asdict(self.augmentation),
            "mixing": asdict(self.mixing),
            **({"partners": self._partners_description()} if self.mixing.is_on else {}),
        }

    def listing(self) -> str:
        """Identifies these images and their order by name."""
        return self.source.listing()

    def digest(self) -> str:
        """SHA-256 that identifies these images and their classes."""
        return self.source.digest()

    def rng(self, view: int, index: int) -> random.Random:
        """The generator that draws first an image's augmentation, then its erasing."""
        return random.Random(f"{self.seed}/{view}/{index}")

    def partner(self, view: int, index: int) -> tuple[int, random.Random] | None:
        """The image that this one is mixed with, and the generator that decides how. None: it is not mixed."""
        if not self.mixing.is_on:  # making a generator takes as long as reading a small file
            return None
        rng = random.Random(f"{self.seed}/{view}/{index}/mixing")
        if not self.mixing.happens(rng):
            return None
        return int(partners(self.source.order, self.seed, visit_of(view, self.views_per_decode))[index]), rng

    def stand_in(self, index: int) -> int:
        """The image served when this one is requested: itself or, if it is broken, the next readable one."""
        return self.readable(1, index, partial(self._varied, OpenFiles(self._file, [])))[0]

    def readable(self, view: int, index: int, make: Callable[[int, int], Made]) -> tuple[int, Made]:
        """The first index from this one on whose image can be read, and what `make` returns for it."""
        return self._stand_ins.first(index, lambda candidate: make(view, candidate))

    def _file(self, index: int) -> ImageFile:
        return ImageFile(partial(self.source.image, index), partial(self.source.name, index))

    def _varied(self, files: OpenFiles, view: int, index: int) -> np.ndarray:
        rng = self.rng(view, index)
        with files.opened(index) as image:
            pixels = self.preprocessor.varied(image, self.size, self.channels, self.augmentation, rng)
        self.augmentation.erase(pixels, rng)
        return pixels

    def _partners_description(self) -> dict[str, Any]:
        """What determines the mixing partners, besides the images."""
        several = {"views_per_decode": self.views_per_decode} if self.views_per_decode > 1 else {}
        return {**self.source.order.description(), **several}

    def _view(self, view: int, index: int, varied: Callable[[int, int], np.ndarray]) -> LabelledView:
        index, pixels = self.readable(view, index, varied)
        label = int(self.source.labels[index])
        label_b, share = label, 1.0
        mixed = self.partner(view, index)
        if mixed is not None:
            partner, rng = mixed
            partner, other = self.readable(view, partner, varied)
            pixels, share = self.mixing(pixels, other, rng)
            label_b = int(self.source.labels[partner])
        return LabelledView(torch.from_numpy(pixels), label, label_b, share, index, view)


def collate_views(views: list[LabelledView], images: torch.Tensor | None = None) -> LabelledBatch:
    """One batch of several items, whose images may be stacked already."""
    batch = LabelledBatch(*collate_items(views, images))
    return batch._replace(lam=batch.lam.float())


def open_data(
    train: Path | None,
    validation: Path,
    settings: LabelledImageSettings,
    channels: int,
    *,
    unlabelled: Path | None = None,
    per_labelled: float | None = None,
    view_size: int | None = None,
    output: Path | None = None,
) -> Data[TrainingViews, HeldOutImages]:
    """The images of the channels `train`, `unlabelled` and `validation`.

    Args:
        train, validation: folders with one subfolder per class, or with shards; the same classes in both. Without `train` there are
            no labelled images to train on.
        unlabelled: a folder with images at any depth, or with shards. None: every training image has a label.
        per_labelled: unlabelled images that an epoch draws for each labelled one. None: all of them.
        channels: 1 for grey, 3 for colour.
        view_size: height and width of training images if a teacher needs more pixels than `image_size`, which
            `max_shift_pixels` still refers to.
        output: this host's folder, for the list of broken images. None: they are named only in the log.

    Raises:
        ValueError: there is no class, one has no images, the classes differ, or there are too few unlabelled images.
    """
    sharing = channels_with_copies(train, unlabelled, validation)
    held_out = open_source(validation, settings, sharing=sharing)
    training = open_training(train, unlabelled, settings, per_labelled, classes=held_out.classes, sharing=sharing)
    if training.classes != held_out.classes:
        raise ValueError(_different(training, held_out))
    broken = BrokenImages(settings.on_broken_image == "fail", output)
    views = open_views(training, settings, channels, view_size, broken)
    return Data(
        training.classes,
        views,
        HeldOutImages(held_out, settings.image_size, channels, broken),
        collate_views,
        order=training.order,
        announce=training.announce(),
        notes=(views.preprocessor.about(), *training.notes, *held_out.notes),
        recipe=ViewsByDali(views) if settings.preprocessing == "dali" else None,
        elsewhere=partial(open_elsewhere, settings, channels, view_size, per_labelled, training.classes),
        labelled_share=training.labelled_share,
        views_per_decode=settings.views_per_decode,
    )


def open_views(
    source: Source, settings: LabelledImageSettings, channels: int, view_size: int | None, broken: BrokenImages
) -> TrainingViews:
    """Training views of labelled images; the arguments are those of `open_data`."""
    size = view_size or settings.image_size
    augmentation = Augmentation(
        settings.min_crop_area,
        settings.horizontal_flip,
        round(settings.max_shift_pixels * size / settings.image_size),
        settings.max_rotation_degrees,
        settings.random_erasing,
        settings.augmentation_load,
    )
    mixing = Mixing(settings.mixup, settings.cutmix, settings.mix_probability)
    preprocessor = open_preprocessor(settings.preprocessing, compose=settings.compose_augmentation)
    return TrainingViews(
        source,
        size,
        augmentation,
        mixing,
        settings.seed,
        channels=channels,
        preprocessor=preprocessor,
        broken=broken,
        views_per_decode=settings.views_per_decode,
    )


def open_elsewhere(
    settings: LabelledImageSettings,
    channels: int,
    view_size: int | None,
    per_labelled: float | None = None,
    classes: Sequence[str] = (),
) -> tuple[TrainingViews, Collate]:
    """This host's own training images, as `open_data` opens them, and what makes batches of them.

    Args:
        classes: used when there are no labelled images.
    """
    train, unlabelled = training_folders(settings, read_environment())
    broken = BrokenImages(fail=True)  # the requester decides what replaces a broken image
    source = open_training(train, unlabelled, settings, per_labelled, classes=classes)
    return open_views(source, settings, channels, view_size, broken), collate_views


def training_folders(settings: LabelledImageSettings, environment: Environment) -> tuple[Path | None, Path | None]:
    """The channels `train` and `unlabelled`; None for one that the settings do not ask for."""
    names = settings.training_channels()
    train, unlabelled = (environment.channel(name) if name in names else None for name in ("train", "unlabelled"))
    return train, unlabelled


def _different(training: Source, held_out: Source) -> str:
    """The error message for two folders with different classes."""
    alone = [
        f"only {one.root} has {', '.join([name for name in one.classes if name not in other.classes][:5])}"
        for one, other in ((training, held_out), (held_out, training))
        if set(one.classes) - set(other.classes)
    ]
    if alone:
        unnamed = any(has_shards(one.root) and read_classes(one.root) is None for one in (training, held_out))
        fix = f". Without names, classes are numbers up to the largest label: put the same {CLASSES[0]} beside the shards of both"
        return f"the channels train and validation hold different classes: {'; '.join(alone)}{fix if unnamed else ''}"
    number, (first, second) = next(
        (number, pair)
        for number, pair in enumerate(zip_longest(training.classes, held_out.classes))
        if pair[0] != pair[1]
    )
    return (
        f"the channels train and validation hold the same classes in another order: class {number} is {first!r} in {training.root} "
        f"and {second!r} in {held_out.root}. Put the same list in {CLASSES[0]} beside the shards of each, and number the labels "
        "by it; the classes of folders are sorted by name"
    )
