"""Labelled and unlabelled images as one source of training images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from training.data.batches import UNLABELLED, Announce
from training.data.orders import JointOrder
from training.data.sources.channels import Digested, Source, has_shards, open_source, open_unlabelled
from training.runtime.environment import is_streamed
from training.settings.scripts import LabelledImageSettings


class UnlabelledImages:
    """Unlabelled images as a Source: each has UNLABELLED in place of a class number."""

    labelled_share = 0.0

    def __init__(self, channel: Digested, root: Path, classes: Sequence[str]):
        self.root, self.classes = root, [*classes]
        self.order = channel.order
        self.notes = [*channel.notes, f"{len(channel):,} images without labels in {root}"]
        self.labels = np.full(len(channel), UNLABELLED, np.int64)
        self._channel = channel

    def __len__(self) -> int:
        return len(self._channel)

    def name(self, index: int) -> str:
        return self._channel.name(index)

    def image(self, index: int) -> bytes:
        return self._channel.image(index)

    def listing(self) -> str:
        return self._channel.listing()

    def digest(self) -> str:
        return self._channel.digest()

    def announce(self) -> Announce | None:
        return self._channel.announce()


class JointSource:
    """Labelled images and, numbered after them, unlabelled ones.

    Attributes:
        labelled_share: share of labelled images among those that an epoch draws.

    Args:
        per_labelled: unlabelled images that an epoch draws for each labelled one, in an even number. None: all.

    Raises:
        ValueError: there are not that many, or it makes none.
    """

    def __init__(self, labelled: Source, unlabelled: UnlabelledImages, per_labelled: float | None, together: int = 1):
        self.root, self.classes = labelled.root, labelled.classes
        part = len(unlabelled) if per_labelled is None else round(per_labelled * len(labelled))
        if part != len(unlabelled):
            part -= part % 2
        if not 1 <= part <= len(unlabelled):
            most = math.floor(1000 * len(unlabelled) / len(labelled)) / 1000
            raise ValueError(
                f"unlabelled.per_labelled {per_labelled} asks for {part:,} images without labels for {len(labelled):,} with, but "
                f"{unlabelled.root} has {len(unlabelled):,}: set {2 / len(labelled):.3g} to {most:.3f}, or null for all of them"
            )
        self.order = JointOrder(labelled.order, unlabelled.order, part)
        self.labelled_share = len(labelled) / (len(labelled) + part)
        self.labels = np.concatenate([labelled.labels, unlabelled.labels])
        self.notes = [
            *labelled.notes,
            *unlabelled.notes,
            f"{_epochs(together)} {part:,} of them beside {len(labelled):,} with labels{_turns(part, len(unlabelled), together)}",
        ]
        self._labelled, self._unlabelled = labelled, unlabelled

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """An image's path, for messages."""
        source, own = self._of(index)
        return source.name(own)

    def image(self, index: int) -> bytes:
        """An image file.

        Raises:
            ValueError: it cannot be read; the message names it.
        """
        source, own = self._of(index)
        return source.image(own)

    def digest(self) -> str:
        """SHA-256 of both sources' digests."""
        return _both(self._labelled.digest(), self._unlabelled.digest())

    def listing(self) -> str:
        """SHA-256 of both sources' listings."""
        return _both(self._labelled.listing(), self._unlabelled.listing())

    def announce(self) -> Announce | None:
        """A function that takes the images that an epoch will draw and gives each source its own. None: nothing is read ahead."""
        announced = [self._labelled.announce(), self._unlabelled.announce()]
        if announced == [None, None]:
            return None
        border = len(self._labelled)

        def announce(indices: np.ndarray) -> Callable[[int], None]:
            own = indices < border
            parts = [(announced[0], indices[own], own), (announced[1], indices[~own] - border, ~own)]
            asked = [(to(images), np.cumsum(which)) for to, images, which in parts if to is not None]

            def asked_for(count: int) -> None:
                for each, until in asked:
                    each(int(until[count - 1]))

            return asked_for

        return announce

    def _of(self, index: int) -> tuple[Source, int]:
        border = len(self._labelled)
        return (self._labelled, index) if index < border else (self._unlabelled, index - border)


def open_training(
    train: Path | None,
    unlabelled: Path | None,
    settings: LabelledImageSettings,
    per_labelled: float | None = None,
    *,
    classes: Sequence[str] = (),
    sharing: int | None = None,
) -> Source:
    """The training images of one channel, or of both.

    Args:
        train: the channel of labelled images. None: there is none.
        unlabelled: the channel of unlabelled images. None: there is none.
        per_labelled: as JointSource has it.
        classes: used when there are no labelled images.
        sharing: number of channels that share the disk for copies of shards. None: no other channel is opened.

    Raises:
        ValueError: as `open_source`, `open_unlabelled` and JointSource.
    """
    sharing = sharing or channels_with_copies(train, unlabelled)
    labelled = None if train is None else open_source(train, settings, settings.images_per_class, sharing=sharing)
    if unlabelled is None:
        assert labelled is not None, "there are training images"
        return labelled
    found = open_unlabelled(unlabelled, settings, sharing=sharing)
    others = UnlabelledImages(found, unlabelled, classes if labelled is None else labelled.classes)
    return others if labelled is None else JointSource(labelled, others, per_labelled, settings.views_per_decode)


def channels_with_copies(*roots: Path | None) -> int:
    """How many of a host's channels share the disk for copies of shards; 1 if none does.

    Raises:
        ValueError: a channel holds both shards and folders.
    """
    return len({root for root in roots if root is not None and is_streamed(root) and has_shards(root)}) or 1


def _epochs(together: int) -> str:
    return "an epoch draws" if together == 1 else f"{together} epochs draw"


def _turns(part: int, images: int, together: int) -> str:
    """The note on views that each draw a part, `together` of them the same one."""
    views = images // part * together
    if views < 2 * together:
        return ""
    following = "view draws" if together == 1 else f"{together} views draw"
    return f"; the next {following} others, and {views} views draw nearly all: a teacher cache of fewer views leaves images out"


def _both(*parts: str) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()
