"""Sources of images: scikit-learn's digits and photographs, shapes, cut-outs, idx files, folders with classes or masks."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.file_trees import image_suffixes
from launcher.config.issues import UserError, did_you_mean, mistake
from launcher.planner.made_folders import recorded
from launcher.prepare import cutouts, folders, photos, shapes
from launcher.prepare.image_folders import held_out, image_folder, tree
from launcher.prepare.samples import Sample
from launcher.prepare.state import holds_any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

DRAWN = ("cutouts", "digits", "fashion-mnist", "photos", "shapes")
"""Sources other than folders."""

FASHION_CLASSES = (
    "t-shirt_top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle_boot",
)
"""https://github.com/zalandoresearch/fashion-mnist#labels"""

FASHION_FOLDERS = (
    Path("/usr/share/datasets/fashion-mnist"),
    Path("/usr/share/fashion-mnist"),
    Path("/usr/share/dataset-fashion-mnist"),
)
"""Folders of the idx files of Debian's package dataset-fashion-mnist."""

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

MAX_RATIO = 1032
"""Most bytes that one byte of deflate can hold. https://zlib.net/zlib_tech.html"""


def is_folder(source: str, target: str | Path) -> bool:
    """Whether a source is a folder on this machine. One of DRAWN's names is, if there is such a folder, unless the source was drawn into
    it before, as by `launcher prepare digits digits`."""
    folder = Path(source)
    if not folder.is_dir() or source not in DRAWN or folder.resolve() != Path(target).resolve():
        return folder.is_dir()
    return recorded(folder).get("source") != source and holds_any(folder)


def find_samples(
    source: str, size: int | None, validation_fraction: float, unlabelled: bool, *, in_folder: bool
) -> tuple[list[Sample], Counter[str]]:
    """A source's samples, in a fixed order; and the files beside them that are not read, by their suffixes.

    Args:
        in_folder: by `is_folder`.
        unlabelled: images without their labels: all of a folder's, except held-out ones; of another source, those to train on.

    Raises:
        UserError: the source is unknown, empty or broken, or needs a missing package.
    """
    others: Counter[str] = Counter()
    try:
        if unlabelled and in_folder and not _has_idx(Path(source)):
            samples = [*tree(Path(source), others)]
        else:
            folder = Path(source) if in_folder else None
            samples = list(_samples(source, folder, size, validation_fraction, others))
            samples = [*_without_labels(samples)] if unlabelled else samples
    except (IndexError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise mistake("SOURCE", f"{source}: broken idx files ({error})", "download them again") from None
    if not samples:
        raise mistake(
            "SOURCE",
            f"{source} holds no images",
            "name a folder with images, in any tree"
            if unlabelled
            else "name a folder with one subfolder per class, or with images/ and masks/",
            valid=", ".join(image_suffixes()),
        )
    _require_names_of_their_own(samples)
    return samples, others


def _require_names_of_their_own(samples: list[Sample]) -> None:
    """Raise a UserError if two images would be written to one file, as x.jpg and x.JPG would, or the masks of x.jpg and x.png."""
    named: dict[str, str] = {}
    for sample in samples:
        for path in folders.paths(sample):
            first = named.setdefault(path, sample.source)
            if first is not sample.source:
                found = f"{first} and {sample.source} would be written to one file, {path}"
                raise mistake("SOURCE", found, "rename one of them, and its mask where it has one")


def _samples(
    source: str, folder: Path | None, size: int | None, validation_fraction: float, others: Counter[str]
) -> Iterable[Sample]:
    if folder is None:
        if source == "digits":
            return _digits(validation_fraction)
        if source == "photos":
            return _photos(validation_fraction)
        if source == "shapes":
            return _shapes(size or shapes.SIZE, validation_fraction)
        if source == "cutouts":
            return _cutouts(size or cutouts.SIZE, validation_fraction)
        if source != "fashion-mnist":
            raise _no_source(source)
        folder = next((place for place in FASHION_FOLDERS if place.is_dir()), None) or _no_fashion()
    if _has_idx(folder):
        return (sample for split, names in IDX_FILES.items() for sample in _idx(folder, split, *names))
    return image_folder(folder, validation_fraction, others)


def _no_source(source: str) -> UserError:
    found, fix = "no such folder", did_you_mean(source, DRAWN, "check the path")
    if Path(source).is_file():
        found, fix = "a file", "unpack it, and name the folder"
    elif "://" in source:
        found, fix = "not on this machine", "download it (aws s3 sync, curl), and name the folder"
    return mistake("SOURCE", f"{source}: {found}", fix, valid=f"{', '.join(DRAWN)}, or a folder")


def _has_idx(folder: Path) -> bool:
    return _idx_file(folder, IDX_FILES["train"][0]) is not None


def _without_labels(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Training images, without their labels and masks."""
    for number, sample in enumerate(sample for sample in samples if sample.split == "train"):
        yield sample._replace(split="unlabelled", label=None, mask=None, stem=f"{number:06d}")


def _no_fashion() -> Path:
    raise mistake(
        "SOURCE",
        "fashion-mnist is not on this machine",
        "apt-get install dataset-fashion-mnist, or name the folder that holds its idx files",
        valid=", ".join(str(place) for place in FASHION_FOLDERS),
    )


def _digits(validation_fraction: float) -> Iterator[Sample]:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, values 0…16 (https://scikit-learn.org/stable/datasets/toy_dataset.html)."""
    _require_scikit_learn("digits")
    _, labels = _all_digits()
    names = [(str(label), f"{index:04d}.png") for index, label in enumerate(labels)]
    kept_back = held_out(names, validation_fraction)
    for index, name in enumerate(names):
        split = "validation" if name in kept_back else "train"
        yield Sample(split, name[0], f"{index:04d}", f"digit {index}", functools.partial(_digit, index))


@functools.cache
def _all_digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Pixels, uint8 (images, 8, 8), and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images * (255 / 16)).round().astype("uint8"), digits.target


def _digit(index: int) -> Image:
    from PIL import Image

    return Image.fromarray(_all_digits()[0][index])


def _photos(validation_fraction: float) -> Iterator[Sample]:
    """Parts of scikit-learn's two photographs."""
    _require_scikit_learn("photos")
    names = [(label, f"{index:04d}.jpg") for label in photos.CLASSES for index in range(photos.EACH)]
    kept_back = held_out(names, validation_fraction)
    for place, name in enumerate(names):
        split, index = "validation" if name in kept_back else "train", place % photos.EACH
        drawn = functools.partial(photos.draw, name[0], index)
        yield Sample(split, name[0], f"{index:04d}", f"{name[0]} {name[1]}", drawn)


def _require_scikit_learn(what: str) -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise mistake(
            "SOURCE",
            f"{what} come with scikit-learn, which is not installed",
            "make, or pip install -e '.[local]', in this kit's folder",
        )


def _shapes(size: int, validation_fraction: float) -> Iterator[Sample]:
    """Images of shapes with their masks."""
    names = [("shapes", f"{index:04d}.png") for index in range(shapes.IMAGES)]
    kept_back = held_out(names, validation_fraction)
    for index, name in enumerate(names):
        split = "validation" if name in kept_back else "train"
        image, mask = (functools.partial(_shape, index, size, part) for part in range(2))
        yield Sample(split, None, f"{index:04d}", f"shapes {index}", image, mask)


def _shape(index: int, size: int, part: int) -> Image:
    return shapes.draw(index, size)[part]


def _cutouts(size: int, validation_fraction: float) -> Iterator[Sample]:
    """Images of cut-outs on photographs with their masks."""
    _require_scikit_learn("the photographs behind cutouts")
    folder = next((place for place in cutouts.FOLDERS if place.is_dir()), None)
    if folder is None:
        raise mistake(
            "SOURCE",
            "the cut-outs are not on this machine",
            "apt-get install --no-install-recommends tuxpaint-stamps-default (161 MB)",
            valid=", ".join(str(place) for place in cutouts.FOLDERS),
        )
    files = cutouts.find(folder)
    lacking = [name for name, own in files.items() if len(own) < 2]
    if lacking:
        raise mistake(
            "SOURCE",
            f"{folder} holds too few cut-outs of {', '.join(lacking)}",
            "apt-get install --reinstall tuxpaint-stamps-default",
            valid="two or more of each class, one for each split",
        )
    kept_back = held_out(((name, file) for name, own in files.items() for file in own), validation_fraction)
    of_split = {
        split: {
            name: [file for file in own if ((name, file) in kept_back) == (split == "validation")]
            for name, own in files.items()
        }
        for split in ("train", "validation")
    }
    validation = max(1, round(cutouts.IMAGES * validation_fraction))
    for split, count in (("train", cutouts.IMAGES - validation), ("validation", validation)):
        for index in range(count):
            image, mask = (functools.partial(_cutout, index, split, of_split[split], size, part) for part in range(2))
            yield Sample(split, None, f"{index:04d}", f"cutouts {split} {index}", image, mask)


def _cutout(index: int, split: str, files: dict[str, list[str]], size: int, part: int) -> Image:
    return cutouts.draw(index, split, files, size)[part]


def _idx(folder: Path, split: str, images_name: str, labels_name: str) -> Iterator[Sample]:
    """Images and labels in MNIST's idx format (http://yann.lecun.com/exdb/mnist/), gzipped or not."""
    (count, _, _), _ = _read_idx(folder, images_name)
    (label_count,), numbers = _read_idx(folder, labels_name)
    if count != label_count:
        raise mistake(
            "SOURCE", f"{folder}: {count} images and {label_count} labels in {split}", "download the files again"
        )
    classes = FASHION_CLASSES if _is_fashion(folder) else [str(digit) for digit in range(256)]
    for index in range(count):
        image = functools.partial(_idx_image, folder, images_name, index)
        yield Sample(split, classes[numbers[index]], f"{index:05d}", f"{images_name} {index}", image)


def _is_fashion(folder: Path) -> bool:
    """Whether a folder's own name says Fashion-MNIST, as fashion-mnist or torchvision's FashionMNIST/raw: folders above may have any.
    https://github.com/pytorch/vision/blob/main/torchvision/datasets/mnist.py (raw_folder)"""
    folder = folder.resolve()
    named = folder.parent if folder.name == "raw" else folder
    return "fashion" in named.name.lower()


def _idx_image(folder: Path, name: str, index: int) -> Image:
    from PIL import Image

    (_, height, width), pixels = _read_idx(folder, name)
    area = height * width
    return Image.frombytes("L", (width, height), pixels[index * area : (index + 1) * area])


@functools.lru_cache(maxsize=4)
def _read_idx(folder: Path, name: str) -> tuple[tuple[int, ...], bytes]:
    """An idx file's shape and bytes. No more is read than its header says, so that a small .gz does not fill the memory.

    Raises:
        UserError: it is missing, truncated or damaged, or not an idx file of bytes.
    """
    file = _idx_file(folder, name)
    if file is None:
        raise mistake("SOURCE", f"{folder} lacks {name}(.gz)", "name a folder that holds all four idx files")
    zipped = file.suffix == ".gz"
    try:
        with gzip.open(file) if zipped else open(file, "rb") as stream:
            zero, kind, dimensions = struct.unpack(">HBB", stream.read(4))
            shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
            expected = math.prod(shape)
            possible = expected <= file.stat().st_size * (MAX_RATIO if zipped else 1)
            body = stream.read(expected + 1) if possible else b""
    except (EOFError, struct.error, zlib.error, gzip.BadGzipFile) as error:
        raise mistake("SOURCE", f"{file} is damaged: {error}", "download it again") from None
    if zero or kind != 0x08 or len(body) != expected:
        raise mistake("SOURCE", f"{file} is not an idx file of bytes, or is truncated", "download it again")
    return shape, body


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)
