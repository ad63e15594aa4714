"""Folders of photographs, as an image classifier's channels have them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launcher.prepare import photos


def draw_photos(folder: Path, train: Iterable[int], validation: Iterable[int]) -> None:
    """Write the photographs of these numbers into `<folder>/<channel>/<class>`."""
    for channel, numbers in (("train", train), ("validation", validation)):
        for label in photos.CLASSES:
            (folder / channel / label).mkdir(parents=True)
            for number in numbers:
                photos.draw(label, number).save(folder / channel / label / f"{number}.jpg", quality=95)
