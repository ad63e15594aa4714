"""The images of a channel, from folders or shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np

from training.data.batches import Announce
from training.data.orders import Order
from training.data.sources.folders import LabelledFolder, UnlabelledFolder
from training.data.sources.shard_index import find_shards
from training.data.sources.shards import LabelledShards, ShardReading, UnlabelledShards
from training.runtime.environment import is_streamed
from training.settings.scripts import TrainingSettings


class Channel(Protocol):
    """Images numbered from 0, in the same order on every machine."""

    @property
    def order(self) -> Order:
        """How they are shuffled for training."""

    @property
    def notes(self) -> list[str]:
        """Choices made when it was opened, with reasons."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """An image's path, for messages."""

    def image(self, index: int) -> bytes:
        """An image file.

        Raises:
            ValueError: it cannot be read; the message names it.
        """

    def listing(self) -> str:
        """SHA-256 that identifies these images and their order by name; no file is read."""

    def announce(self) -> Announce | None:
        """A function that takes the images that an epoch will draw, before they are read. None: nothing is read ahead."""


class Digested(Channel, Protocol):
    """Images that caches can be made of."""

    def digest(self) -> str:
        """SHA-256 that identifies these images and, if they have some, their classes."""


class Source(Digested, Protocol):
    """Images, each with a class or UNLABELLED."""

    root: Path
    classes: list[str]

    @property
    def labels(self) -> np.ndarray:
        """int64 (images,), class numbers, or UNLABELLED."""

    @property
    def labelled_share(self) -> float:
        """Share of the images drawn in an epoch that have a label, 0 to 1."""


def open_source(
    root: Path, settings: TrainingSettings, images_per_class: int | None = None, *, sharing: int = 1
) -> Source:
    """The labelled images of a channel: shards if it holds any (*.tar), else a folder with one subfolder per class.

    Args:
        images_per_class: only the first N of each class. None: all.
        sharing: number of channels that share the disk for copies of shards.

    Raises:
        ValueError: there is no class, or one without images; shards are broken; or it holds both kinds.
    """
    if not has_shards(root):
        return LabelledFolder(root, images_per_class)
    return LabelledShards(root, images_per_class, shard_reading(root, settings, sharing))


def open_unlabelled(root: Path, settings: TrainingSettings, *, sharing: int) -> Digested:
    """The images of a channel, without their labels: shards if it holds any (*.tar), else a folder with images at any depth.

    Args:
        sharing: number of channels that share the disk for copies of shards.

    Raises:
        ValueError: there are no images; shards are broken; or it holds both kinds.
    """
    if not has_shards(root):
        return UnlabelledFolder(root)
    return UnlabelledShards(root, shard_reading(root, settings, sharing))


def has_shards(root: Path) -> bool:
    """Whether a channel holds shards.

    Raises:
        ValueError: it holds folders too.
    """
    shards = find_shards(root)
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if shards and folders:
        raise ValueError(
            f"{root} holds {len(shards)} shards ({next(iter(shards))} …) and {len(folders)} folders ({folders[0]} …): "
            "move one kind elsewhere, as training reads only one"
        )
    return bool(shards)


def shard_reading(root: Path, settings: TrainingSettings, sharing: int) -> ShardReading:
    """How a channel's shards are read, by the settings and by SageMaker's input mode."""
    limit = settings.shard_cache_gb
    return ShardReading(
        settings.shuffle_window_shards, is_streamed(root), None if limit is None else round(limit * 10**9), sharing
    )
