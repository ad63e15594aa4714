"""What images with a mask each are read from: `<root>/images/…/<name>.jpg` and `<root>/masks/…/<name>.png`, or shards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from training.data.batches import Announce
from training.data.decode.decoding import read_file
from training.data.orders import FreeOrder, Order
from training.data.sources.channels import has_shards, shard_reading
from training.data.sources.shards import ShardFiles
from training.settings.scripts import TrainingSettings

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


class Pairs(Protocol):
    """Images with a mask each, numbered from 0 on, in the same order on every machine."""

    @property
    def order(self) -> Order:
        """How they are shuffled for training."""

    @property
    def notes(self) -> list[str]:
        """What was chosen in opening them, and why."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Where an image lies, for messages."""

    def mask_name(self, index: int) -> str:
        """Where its mask lies."""

    def image(self, index: int) -> bytes:
        """An image file as it is; a ValueError names one that cannot be read."""

    def mask(self, index: int) -> bytes:
        """A mask file as it is; a ValueError names one that cannot be read."""

    def announce(self) -> Announce | None:
        """Gets the images that an epoch will draw, before they are read. None: the source reads nothing ahead."""


def open_pairs(root: Path, settings: TrainingSettings) -> Pairs:
    """The images and masks of a channel: shards where there are any (*.tar), else two folders.

    Raises:
        ValueError: there are no images, one lacks its mask, two share one, or shards are broken.
    """
    return PairShards(root, settings) if has_shards(root) else PairFolder(root)


class PairFolder:
    """Files of two folders."""

    def __init__(self, root: Path):
        self._files = pair_up(root)
        self.order = FreeOrder(len(self._files))
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return str(self._files[index][0])

    def mask_name(self, index: int) -> str:
        return str(self._files[index][1])

    def image(self, index: int) -> bytes:
        return read_file(self._files[index][0])

    def mask(self, index: int) -> bytes:
        return read_file(self._files[index][1])

    def announce(self) -> None:
        return None


class PairShards(ShardFiles):
    """Shards of `<key>.jpg` and `<key>.mask.png`."""

    def __init__(self, root: Path, settings: TrainingSettings):
        super().__init__(root, shard_reading(root, settings))
        if not len(self.index.mask_offsets):
            raise ValueError(f"{root}: its shards hold labels, not masks (<key>.mask.png beside <key>.jpg)")

    def __len__(self) -> int:
        return len(self.index)


def pair_up(root: Path) -> list[tuple[Path, Path]]:
    """The (image, mask) files of a folder, sorted; masks without an image are left alone.

    Raises:
        ValueError: there are no images, one lacks its mask, or two share one.
    """
    images = _by_stem(root / "images", IMAGE_ENDINGS)
    if not images:
        raise ValueError(
            f"{root}: no images. They belong into {root / 'images'} ({', '.join(IMAGE_ENDINGS)}), and their masks into "
            f"{root / 'masks'}, with the same names but .png"
        )
    masks = _by_stem(root / "masks", (".png",))
    several = [files for files in images.values() if len(files) > 1]
    if several:
        first, second = several[0][:2]
        raise ValueError(f"{first} and {second.name} would share one mask: rename one of them")
    lacking = [stem for stem in images if stem not in masks]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(images)} images have no mask: {images[lacking[0]][0]} needs "
            f"{root / 'masks' / lacking[0]}.png"
        )
    return [(files[0], masks[stem][0]) for stem, files in sorted(images.items())]


def _by_stem(folder: Path, endings: tuple[str, ...]) -> dict[str, list[Path]]:
    """Files below a folder by their path without its ending; hidden ones are left out."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.suffix.lower() in endings and not any(part.startswith(".") for part in inside.parts) and file.is_file():
            found.setdefault(inside.as_posix()[: -len(file.suffix)], []).append(file)
    return found
