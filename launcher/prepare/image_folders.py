"""Folders of images as sources: one with a subfolder for each class, one with images/ and masks/, or a tree of images without labels."""

from __future__ import annotations

import hashlib
import os
import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.config.file_trees import image_suffixes, masks_among, walk
from launcher.config.issues import Issue, UserError, mistake
from launcher.prepare.samples import KEPT, Sample, as_utf8

LONGEST = 200
"""Bytes of a written file's name without its suffix; file systems allow 255 in all, and its temporary name is longer."""

HELD_OUT = ("validation", "val", "test")
"""Folders of held-out images beside train/: the first that exists counts."""

SHOWN = 5
"""Suffixes that a message names."""

CONTROLS = ("Cc", "Zl", "Zp", "Cs")
"""Unicode categories: control characters, line and paragraph separators, and bytes that are not UTF-8."""


def image_folder(folder: Path, validation_fraction: float, others: Counter[str]) -> Iterator[Sample]:
    """A folder with one subfolder per class, or with images/ and masks/; optionally below a split's folders.

    Args:
        others: gets the visible files that are not read, by their suffixes, such as .heic.
    """
    held_out_name = _held_out_name(folder)
    if (
        held_out_name is None
        and (folder / "train").is_dir()
        and any(path.is_dir() for path in (folder / "train").iterdir())
    ):
        raise mistake(
            "SOURCE",
            f"{folder} has train/ with folders in it, and no {', '.join(f'{name}/' for name in HELD_OUT)} beside it",
            f"name {folder / 'train'}, of which a part is held out; or call the held-out images' folder {HELD_OUT[0]}",
        )
    if held_out_name is not None:
        for split, part in (("train", folder / "train"), ("validation", folder / held_out_name)):
            masked = _has_masks(part)
            for name in _named_files(part, masked, others):
                yield _from_file(split, part, name, masked)
        return
    masked = _has_masks(folder)
    names = list(_named_files(folder, masked, others))
    kept_back = held_out(names, validation_fraction)
    for name in names:
        yield _from_file("validation" if name in kept_back else "train", folder, name, masked)


def _held_out_name(folder: Path) -> str | None:
    """The folder of the held-out images beside train/; None if the folder is not split."""
    found = next((name for name in HELD_OUT if (folder / name).is_dir()), None)
    return found if (folder / "train").is_dir() else None


def tree(folder: Path, others: Counter[str]) -> Iterator[Sample]:
    """All images of a tree, without labels; if the tree is split, except held-out ones. Masks are not images. `others` as in
    `image_folder`."""
    without = {*HELD_OUT} if _held_out_name(folder) is not None else set()
    for inside in _images_below(folder, others, without):
        yield Sample("unlabelled", None, _stem(inside), os.path.join(folder, inside))


def _images_below(folder: Path, others: Counter[str], without: Iterable[str] = ()) -> Iterator[str]:
    """Paths of all images below a folder, as the entry scripts find them: links are followed; hidden files and folders are left out, as are
    masks beside their images.

    Args:
        others: as in `image_folder`.
        without: names of folders directly in it that are left out too.
    """
    left_out, endings = {*without}, image_suffixes()
    for place, folders, files in walk(folder, _refuse_unlisted):
        left_out |= masks_among(folders)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        left_out = set()
        for name in sorted(name for name in files if not name.startswith(".")):
            if name.lower().endswith(endings):
                yield os.path.normpath(os.path.join(os.path.relpath(place, folder), name))
            else:
                others[os.path.splitext(name.lower())[1] or "without suffix"] += 1


def _refuse_unlisted(error: OSError) -> None:
    """Raise a UserError for a folder that cannot be listed: its content would be left out silently."""
    if not isinstance(error, FileNotFoundError):
        found = f"{error.filename} cannot be listed: {error.strerror}"
        fix = "let this user list it, or begin again when its file system is back"
        raise mistake("SOURCE", found, fix) from error


def _visible_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _has_masks(folder: Path) -> bool:
    """Whether a folder holds images/ and masks/. Raises UserError if there are others beside them: all would become classes."""
    names = [path.name for path in _visible_folders(folder)]
    if not {"images", "masks"} <= {*names}:
        return False
    others = [name for name in names if name not in ("images", "masks")]
    if others:
        found = f"{folder} has {', '.join(others)} beside images/ and masks/"
        raise mistake("SOURCE", found, "move them elsewhere, or name a folder with one subfolder per class")
    return True


def _named_files(folder: Path, masked: bool, others: Counter[str]) -> Iterator[tuple[str, str]]:
    """(class, path below the class's folder) of every image, sorted. Images with masks have the class `images`. `others` as in
    `image_folder`."""
    classes = [path for path in _visible_folders(folder) if not (path.name == "masks" and masked)]
    _require_lines(classes)
    unread = {path: Counter[str]() for path in classes}
    images = {path: sorted(_images_below(path, unread[path])) for path in classes}
    if any(images.values()):
        _require_images({path: unread[path] for path, found in images.items() if not found})
    others.update(sum(unread.values(), Counter[str]()))
    for class_folder, found in images.items():
        for path in found:
            yield class_folder.name, path


def _require_images(classes: dict[Path, Counter[str]]) -> None:
    """Raise a UserError that lists the folders without an image, by its suffix: their classes would be missing."""
    issues = [
        Issue(
            key="SOURCE",
            found=f"{path} has no images" + (f" among its files ({by_suffix(others)})" if others else ""),
            valid=", ".join(image_suffixes()),
            fix=f"{'convert its files to one of these' if others else 'put some there'}, or move the folder elsewhere if it is no class",
        )
        for path, others in classes.items()
    ]
    if issues:
        raise UserError(issues)


def by_suffix(files: Counter[str]) -> str:
    """`12 .heic, 3 .txt`, the most frequent first."""
    listed = sorted(files.items(), key=lambda one: (-one[1], one[0]))
    shown = [
        f"{count:,} {as_utf8(suffix) if suffix.isprintable() else ascii(suffix)}" for suffix, count in listed[:SHOWN]
    ]
    more = sum(count for _, count in listed[SHOWN:])
    return ", ".join(shown + ([f"{more:,} others"] if more else []))


def _require_lines(classes: list[Path]) -> None:
    """Raise a UserError that lists the folders whose names are not a line of text, as classes.txt and logs need."""
    wrong = [path for path in classes if any(unicodedata.category(letter) in CONTROLS for letter in path.name)]
    if wrong:
        valid, fix = "UTF-8 text without line breaks and control characters", "rename the folder"
        raise UserError(
            [
                Issue(key="SOURCE", found=f"{path.parent} has the class {path.name!r}", valid=valid, fix=fix)
                for path in wrong
            ]
        )


def _from_file(split: str, folder: Path, name: tuple[str, str], masked: bool) -> Sample:
    label, path = name
    stem, without = _stem(path), os.path.splitext(path)[0]
    if masked:
        lower, upper = (folder / "masks" / f"{without}{ending}" for ending in (".png", ".PNG"))
        mask = upper if upper.is_file() and not lower.is_file() else lower
        return Sample(split, None, stem, str(folder / label / path), mask=str(mask))
    return Sample(split, label, stem, str(folder / label / path))


def _stem(path: str) -> str:
    """A unique name for a path below a folder."""
    without, ending = os.path.splitext(path)
    stem = without if ending.lower() in KEPT else path  # x.bmp becomes x.bmp.png, beside x.png
    stem = stem.replace("_", "__").replace("/", "_")  # a/b.jpg and a_b.jpg stay distinct
    encoded = os.fsencode(stem)
    if len(encoded) <= LONGEST:
        return stem
    return f"{encoded[:LONGEST].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:16]}"


def held_out(names: Iterable[tuple[str, str]], fraction: float) -> set[tuple[str, str]]:
    """The held-out images of each class, determined by the names; at least one on each side if there are two."""
    by_class: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        by_class.setdefault(name[0], []).append(name)
    found: set[tuple[str, str]] = set()
    for label, members in sorted(by_class.items()):
        shuffled = random.Random(label).sample(sorted(members), len(members))
        found.update(shuffled[: min(max(round(len(members) * fraction), 1), len(members) - 1)])
    return found
