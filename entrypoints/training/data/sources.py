"""What labelled images are read from, whatever holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from training.data.folders import LabelledFolder


class Source(Protocol):
    """Labelled images, numbered from 0 on, in the same order on every machine."""

    root: Path
    classes: list[str]
    labels: np.ndarray
    """int64 (images,), class numbers."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """Where an image lies, for messages."""

    def encoded(self, number: int) -> bytes:
        """An image file as it is; a ValueError names one that cannot be read."""

    def digest(self) -> str:
        """SHA-256 of what the images are, so that what was computed from others is not used for them."""


def open_source(root: Path, images_per_class: int | None = None) -> Source:
    """The labelled images of a channel.

    Raises:
        ValueError: there is no class, or one without images.
    """
    return LabelledFolder(root, images_per_class)
