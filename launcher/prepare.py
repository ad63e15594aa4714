"""Images into labelled folders, TARGET/train/<class>/ and TARGET/validation/<class>/, or with masks, TARGET/train/images/ and
TARGET/train/masks/. It can be interrupted and repeated."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import shapes
from launcher.findings import Finding, UserError, did_you_mean, mistake
from launcher.records import write_json

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

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
"""Where Debian's package dataset-fashion-mnist puts the idx files."""

IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Item:
    """One image to write."""

    path: str
    """Below the target: train/<class>/<name>.png; with masks, train/images/<name>.png and train/masks/<name>.png."""
    open: Callable[[], Image]
    source: str
    """For messages."""


def prepare(source: str, target: str | Path, *, size: int | None = None, validation_fraction: float = 0.25) -> str:
    """Write a source's images into a target folder; those that are there already are left alone.

    Args:
        source: `digits` (scikit-learn's, 8 × 8 grey), `fashion-mnist` (Debian's package), `shapes` (drawn, with masks), a folder
            with MNIST-style idx files, or a folder with one subfolder a class, also below train/ and validation/ (or val/ or test/).
        target: becomes target/train and target/validation.
        size: scale images down so that the shorter side has so many pixels; smaller ones stay as they are;
            `shapes` are drawn at that size.
        validation_fraction: share of each class that is held out where the source has no split of its own; drawn by file name,
            so that a repeated call draws the same.

    Returns:
        What was done, in words.

    Raises:
        UserError: no such source, nothing in it, or a package that is not installed.
    """
    from tqdm import tqdm

    problems = []
    if not 0 < validation_fraction < 1:
        problems.append(
            Finding(
                key="--validation-fraction",
                found=str(validation_fraction),
                valid="above 0 and below 1",
                cure="write 0.25",
            )
        )
    if size is not None and size < 8:
        problems.append(Finding(key="--size", found=str(size), valid="8 or more pixels", cure="write 224"))
    if importlib.util.find_spec("PIL") is None:
        problems.append(
            Finding(
                key="launcher prepare",
                found="Pillow is not installed",
                cure="make, or pip install -e '.[local]', in this kit's folder",
            )
        )
    if Path(target).exists() and not Path(target).is_dir():
        problems.append(Finding(key="TARGET", found=f"{target} is a file", cure="name a folder"))
    if problems:
        raise UserError(problems)
    inside = Path(target).resolve()
    if Path(source).is_dir() and (inside == Path(source).resolve() or Path(source).resolve() in inside.parents):
        raise mistake(
            "TARGET",
            f"{target} lies inside of {source}: its images would be taken as a class",
            "name a folder elsewhere",
        )
    try:
        items = _items(source, size, validation_fraction)
    except (EOFError, struct.error, IndexError, ValueError) as error:
        raise mistake("SOURCE", f"{source}: broken idx files ({error})", "fetch them again") from None
    if not items:
        raise mistake(
            "SOURCE",
            f"{source} holds no images",
            "name a folder with one subfolder a class",
            valid=", ".join(IMAGE_ENDINGS),
        )
    target = Path(target)
    made_of = str(Path(source).resolve()) if Path(source).is_dir() else source
    _remember(target, {"source": made_of, "size": size, "validation_fraction": validation_fraction})
    from PIL.Image import DecompressionBombError

    existing = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    written, broken = 0, {}
    for item in tqdm(items, desc=f"{source} -> {target}", unit="image", disable=None):
        if item.path in existing:
            continue
        try:
            image = _scaled(item.open(), size)
        except (
            OSError,
            SyntaxError,
            ValueError,
            DecompressionBombError,
        ) as error:  # what Pillow raises for files that are no images
            broken[item.source] = str(error)
            continue
        _write(image, target / item.path)
        written += 1
    readable = [item for item in items if item.source not in broken]
    places = Counter(tuple(item.path.split("/")[:2]) for item in readable)  # (split, class)
    classes = {label for _, label in places}
    if made_of == "shapes":  # what lies at a class's place is images and masks
        training, held_out = (places[split, "images"] for split in ("train", "validation"))
        what = f"images with a mask each, of {len(shapes.CLASSES)} classes"
    else:
        training, held_out = (sum(places[split, label] for label in classes) for split in ("train", "validation"))
        what = f"images in {len(classes)} classes"
    lines = [
        f"{target}: {training} training and {held_out} validation {what}; "
        f"{written} written now, {len(items) - written - len(broken)} were there"
    ]
    if broken:
        lines += [
            f"{len(broken)} images could not be read and were left out:",
            *(f"  {name}: {why}" for name, why in list(broken.items())[:10]),
        ]
        lines += [f"  … and {len(broken) - 10} more"] if len(broken) > 10 else []
    return "\n".join(lines)


def _remember(target: Path, how: dict[str, str | int | float | None]) -> None:
    """Write down how a target is made; refuse one that was made otherwise, whose held-out images may be trained on here."""
    file = target / "prepared.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        different = [
            f"{name} {before.get(name)!r}, now {value!r}" for name, value in how.items() if before.get(name) != value
        ]
        if different:
            raise mistake(
                "TARGET",
                f"{target} was made with " + "; ".join(different),
                f"name another folder, or remove it first: rm -r {target}",
            )
    target.mkdir(parents=True, exist_ok=True)
    write_json(file, how)


def _items(source: str, size: int | None, validation_fraction: float) -> list[Item]:
    """What a source holds, in a fixed order."""
    if source == "digits":
        return list(_digits(validation_fraction))
    folder = Path(source)
    if source == "shapes" and not folder.is_dir():
        return list(_shapes(size or shapes.SIZE, validation_fraction))
    if source == "fashion-mnist" and not folder.is_dir():
        folder = next((place for place in FASHION_FOLDERS if place.is_dir()), None) or _no_fashion()
    if not folder.is_dir():
        cure = did_you_mean(source, ["digits", "fashion-mnist", "shapes"], "check the path")
        raise mistake("SOURCE", f"{source}: no such folder", cure, valid="digits, fashion-mnist, shapes, or a folder")
    if _idx_file(folder, IDX_FILES["train"][0]) is not None:
        return [item for split, names in IDX_FILES.items() for item in _idx(folder, split, *names)]
    return list(_image_folder(folder, validation_fraction))


def _no_fashion() -> Path:
    raise mistake(
        "SOURCE",
        "fashion-mnist is not on this machine",
        "apt-get install dataset-fashion-mnist, or name the folder that holds its idx files",
        valid=", ".join(str(place) for place in FASHION_FOLDERS),
    )


def _digits(validation_fraction: float) -> Iterator[Item]:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, values 0…16 (https://scikit-learn.org/stable/datasets/toy_dataset.html)."""
    if importlib.util.find_spec("sklearn") is None:
        raise mistake(
            "SOURCE",
            "digits come with scikit-learn, which is not installed",
            "make, or pip install -e '.[local]', in this kit's folder",
        )
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    names = [(str(label), f"{number:04d}.png") for number, label in enumerate(digits.target)]
    held_out = _held_out(names, validation_fraction)
    for number, name in enumerate(names):
        split = "validation" if name in held_out else "train"
        yield Item(
            f"{split}/{name[0]}/{name[1]}", lambda number=number: Image.fromarray(pixels[number]), f"digit {number}"
        )


def _shapes(size: int, validation_fraction: float) -> Iterator[Item]:
    """Drawn images, and for each its mask."""
    names = [("shapes", f"{number:04d}.png") for number in range(shapes.IMAGES)]
    held_out = _held_out(names, validation_fraction)
    for number, name in enumerate(names):
        split = "validation" if name in held_out else "train"
        for part, kind in enumerate(("images", "masks")):
            yield Item(
                f"{split}/{kind}/{name[1]}",
                lambda number=number, part=part: shapes.draw(number, size)[part],
                f"shapes {number}",
            )


def _idx(folder: Path, split: str, images_name: str, labels_name: str) -> Iterator[Item]:
    """Images and labels in MNIST's idx format (http://yann.lecun.com/exdb/mnist/), gzipped or not."""
    from PIL import Image

    images, labels = (_read_idx(folder, name) for name in (images_name, labels_name))
    (count, height, width), pixels = images
    (label_count,), numbers = labels
    if count != label_count:
        raise mistake(
            "SOURCE", f"{folder}: {count} images and {label_count} labels in {split}", "fetch the files again"
        )
    classes = FASHION_CLASSES if "fashion" in folder.as_posix() else [str(digit) for digit in range(256)]
    area = height * width
    for number in range(count):

        def image(number: int = number) -> Image.Image:
            return Image.frombytes("L", (width, height), pixels[number * area : (number + 1) * area])

        yield Item(f"{split}/{classes[numbers[number]]}/{number:05d}.png", image, f"{images_name} {number}")


def _read_idx(folder: Path, name: str) -> tuple[tuple[int, ...], bytes]:
    """An idx file's shape and its bytes."""
    file = _idx_file(folder, name)
    if file is None:
        raise mistake("SOURCE", f"{folder} lacks {name}(.gz)", "name a folder that holds all four idx files")
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        data = stream.read()
    zero, kind, dimensions = struct.unpack(">HBB", data[:4])
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    body = data[4 + 4 * dimensions :]
    expected = 1
    for length in shape:
        expected *= length
    if zero or kind != 0x08 or len(body) != expected:
        raise mistake("SOURCE", f"{file} is no idx file of bytes, or is cut short", "fetch it again")
    return shape, body


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _image_folder(folder: Path, validation_fraction: float) -> Iterator[Item]:
    """A folder with one subfolder a class, with or without a split above."""
    held_out_name = next((name for name in ("validation", "val", "test") if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and held_out_name:
        for split, part in (("train", folder / "train"), ("validation", folder / held_out_name)):
            for name in _labelled_files(part):
                yield _from_file(split, part, name)
        return
    names = list(_labelled_files(folder))
    held_out = _held_out(names, validation_fraction)
    for name in names:
        yield _from_file("validation" if name in held_out else "train", folder, name)


def _labelled_files(folder: Path) -> Iterator[tuple[str, str]]:
    """(class, path below the class's folder) of every image, sorted."""
    for class_folder in sorted(path for path in folder.iterdir() if path.is_dir()):
        for file in sorted(class_folder.rglob("*")):
            if file.suffix.lower() in IMAGE_ENDINGS and file.is_file():
                yield class_folder.name, file.relative_to(class_folder).as_posix()


def _from_file(split: str, folder: Path, name: tuple[str, str]) -> Item:
    from PIL import Image, ImageOps

    file = folder / name[0] / name[1]
    ending = file.suffix.lower() if file.suffix.lower() in (".jpg", ".jpeg", ".png") else ".png"
    name_without = (
        name[1] if ending != file.suffix.lower() else re.sub(r"\.[^.]*$", "", name[1])
    )  # x.bmp becomes x.bmp.png, beside x.png

    def image() -> Image.Image:
        with Image.open(file) as opened:
            if opened.mode.startswith(("I", "F")):
                raise OSError(
                    f"{opened.mode} pixels of more than 8 bits: convert it to 8 bits, in the range that you want to keep"
                )
            return ImageOps.exif_transpose(opened).convert("L" if opened.mode in ("1", "L") else "RGB")

    stem = name_without.replace("_", "__").replace("/", "_")  # a/b.jpg and a_b.jpg stay two
    return Item(f"{split}/{name[0]}/{stem}{ending}", image, str(file))


def _held_out(names: Iterable[tuple[str, str]], fraction: float) -> set[tuple[str, str]]:
    """The share of each class that is held out: the same for the same names, and at least one image on either side where there are two."""
    by_class: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        by_class.setdefault(name[0], []).append(name)
    held_out: set[tuple[str, str]] = set()
    for label, members in sorted(by_class.items()):
        shuffled = random.Random(label).sample(sorted(members), len(members))
        held_out.update(shuffled[: min(max(round(len(members) * fraction), 1), len(members) - 1)])
    return held_out


def _scaled(image: Image, size: int | None) -> Image:
    """The image with a shorter side of at most `size` pixels."""
    if size is None or min(image.size) <= size:
        return image
    scale = size / min(image.size)
    return image.resize(
        (max(size, round(image.width * scale)), max(size, round(image.height * scale))), resample=2, reducing_gap=3.0
    )


def _write(image: Image, file: Path) -> None:
    """Write an image so that an interruption leaves no part of one under its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")  # an ending that no reader of images takes
    if file.suffix == ".png":
        image.save(temporary, "PNG")
    else:
        image.save(temporary, "JPEG", quality=95, subsampling=0)
    os.replace(temporary, file)
