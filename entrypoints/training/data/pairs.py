"""Images with a mask each: `<root>/images/…/<name>.jpg` and `<root>/masks/…/<name>.png`, or shards of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from training.data.decode.decoding import read_file
from training.data.orders import FreeOrder
from training.data.sources.channels import Digested, has_shards, shard_reading
from training.data.sources.file_trees import IMAGE_ENDINGS, refuse_unlisted, walk
from training.data.sources.folders import FilePaths, digest_of_sizes
from training.data.sources.shards import ShardFiles
from training.settings.scripts import TrainingSettings


class Pairs(Digested, Protocol):
    """Images with a mask each."""

    def mask_name(self, index: int) -> str:
        """A mask's path, for messages."""

    def mask(self, index: int) -> bytes:
        """A mask file, as `image`."""


def open_pairs(root: Path, settings: TrainingSettings, *, sharing: int = 1) -> Pairs:
    """The images and masks of a channel: shards if it holds any (*.tar), else two folders.

    Args:
        sharing: channels that share the disk for copies of shards.

    Raises:
        ValueError: there are no images, one lacks its mask, two share one, or shards are broken.
    """
    return PairShards(root, settings, sharing) if has_shards(root) else PairFolder(root)


class PairFolder:
    """Files of two folders."""

    def __init__(self, root: Path):
        pairs = pair_up(root)
        self._root = root
        self._images, self._masks = (FilePaths(os.path.relpath(pair[part], root) for pair in pairs) for part in (0, 1))
        self.order = FreeOrder(len(pairs))
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._images[index]))

    def mask_name(self, index: int) -> str:
        return os.path.join(self._root, os.fsdecode(self._masks[index]))

    def image(self, index: int) -> bytes:
        return read_file(self.name(index))

    def mask(self, index: int) -> bytes:
        return read_file(self.mask_name(index))

    def digest(self) -> str:
        """SHA-256 of every image's path below the root and its size in bytes, in order. No file is read."""
        return digest_of_sizes(self._root, self._images)

    def listing(self) -> str:
        """SHA-256 of every image's and mask's path below the root, in order."""
        return hashlib.sha256(self._images.digest() + self._masks.digest()).hexdigest()

    def announce(self) -> None:
        return None


class PairShards(ShardFiles):
    """Shards of `<key>.jpg` and `<key>.mask.png`."""

    def __init__(self, root: Path, settings: TrainingSettings, sharing: int):
        super().__init__(root, shard_reading(root, settings, sharing))
        if not len(self.index.mask_offsets):
            raise ValueError(f"{root}: its shards hold labels, not masks (<key>.mask.png beside <key>.jpg)")


def pair_up(root: Path) -> list[tuple[Path, Path]]:
    """The (image, mask) files of a folder, sorted; masks without an image are ignored.

    Raises:
        ValueError: there are no images, one lacks its mask, or two share one.
    """
    images = _by_stem(root / "images", IMAGE_ENDINGS)
    if not images:
        raise ValueError(
            f"{root}: no images. They belong in {root / 'images'} ({', '.join(IMAGE_ENDINGS)}), and their masks in "
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
    """Files below a folder by path without ending; links are followed, and hidden ones left out."""
    found: dict[str, list[Path]] = {}
    for place, folders, files in walk(folder, refuse_unlisted):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(place, name)
            if file.suffix.lower() in endings and not name.startswith("."):
                found.setdefault(file.relative_to(folder).as_posix()[: -len(file.suffix)], []).append(file)
    return found
