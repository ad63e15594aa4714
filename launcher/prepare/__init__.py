"""Prepare images for training: TARGET/train and TARGET/validation, each with one folder per class, images/ and masks/, or shards; or
TARGET/unlabelled.

It runs in parallel, can be interrupted and repeated, and skips unreadable files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

from launcher.config.issues import Issue, UserError, mistake
from launcher.planner.made_folders import RECORD, SPLITS, WRITTEN, Recorded
from launcher.prepare import folders, shards
from launcher.prepare.image_folders import by_suffix
from launcher.prepare.processes import available_cores
from launcher.prepare.samples import Encoding, Sample, as_utf8
from launcher.prepare.sources import find_samples, is_folder
from launcher.prepare.state import ARGUMENTS, BROKEN, MASKS, holds_any, read_state, removal, splits_of
from launcher.prepare.verification import verify
from launcher.record import folder_lock
from launcher.record.records import write_atomically, write_json
from launcher.show.text import counted

__all__ = ["prepare", "verify"]

NAMES = {"train": "training", "validation": "validation", "unlabelled": "unlabelled"}
"""What messages call a split's images."""

SHOWN = 5
"""Classes that a message names."""

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def prepare(
    source: str,
    target: str | Path,
    *,
    size: int | None = None,
    validation_fraction: float = 0.25,
    shard_size: str | None = None,
    jpeg_quality: int = 95,
    unlabelled: bool = False,
    jobs: int | None = None,
) -> str:
    """Write a source's images to a target folder, except those that exist already.

    A file that needs no change is copied. Scaled images are first decoded by the entry scripts' rules: EXIF orientation is
    applied, transparency becomes white, and 16 bits are reduced to the upper 8.

    Args:
        source: `digits` (scikit-learn's, 8 × 8 grey), `fashion-mnist` (Debian's package), `photos` (JPEGs of 400 × 300 pixels, cut
            from scikit-learn's two photographs), `shapes` and `cutouts` (with masks), a folder with MNIST-style idx files, or a
            folder with one subfolder per class, or with images/ and masks/; the last two also below train/ and validation/ (or
            val/ or test/). A folder with one of these names takes precedence.
        target: gets target/train and target/validation.
        size: scale images down to this shorter side, in pixels; smaller images stay. `shapes` and `cutouts` are drawn at this size.
        validation_fraction: held-out share of each class, unless the source has a split. It is selected by file name, so a
            repeated call selects the same.
        shard_size: write tar shards of about this size, as in 100MB, with shuffled images. None: one file per image.
        jpeg_quality: 1 to 100, for scaled JPEG and WebP images.
        unlabelled: write only target/unlabelled, images without labels: all in a folder's tree, except those in the validation/, val/ or
            test/ beside its train/; from any other source, those to train on.
        jobs: processes. None: the number of available cores.

    Returns:
        A summary for people.

    Raises:
        UserError: an unknown or empty source, a class or a split of which nothing can be read, a class with held-out images only or
            whose name is not a line of text or whose files are no images by their suffix, a missing package, or a target that was made with
            other arguments, has files where its own would go and no record, or is being written by another process.
    """
    from tqdm import tqdm

    _check(source, target, size, validation_fraction, shard_size, jpeg_quality, jobs)
    in_folder = is_folder(source, target)
    samples, others = find_samples(source, size, validation_fraction, unlabelled, in_folder=in_folder)
    _refuse_unlearned(source, samples)
    target, encoding = Path(target), Encoding(size, jpeg_quality)
    made_of = as_utf8(str(Path(source).resolve())) if in_folder else source
    how: Recorded = {"source": made_of, "size": size, "validation_fraction": validation_fraction}
    how |= {"jpeg_quality": jpeg_quality} if jpeg_quality != 95 else {}
    how |= {"shard_size": shard_size} if shard_size else {}
    how |= {"unlabelled": True} if unlabelled else {}
    with folder_lock.alone(target):
        _remember(target, how | {"listing": _listing(samples)})
        with tqdm(total=len(samples), desc=f"{source} -> {target}", unit="image", disable=None) as bar:
            jobs = jobs or available_cores()
            if shard_size:
                written, broken = shards.write(samples, target, encoding, _bytes(shard_size), jobs, bar.update)
            else:
                written, broken = folders.write(samples, target, encoding, jobs, bar.update)
        left_out = _leave_out(target, broken)
        readable = [sample for sample in samples if sample.source not in broken]
        if not readable:
            found = f"{source}: 0 of {counted(len(broken), 'image')} can be read"
            raise mistake("SOURCE", found, f"name another folder; {target / BROKEN} says why, image by image")
        _refuse_emptied(source, target, samples, readable)
        _finish(target, readable)
        warnings = _not_held_out(readable, in_folders=not shard_size)
        warnings += [f"left out, as no images by their suffix: {by_suffix(others)}"] if others else []
        return as_utf8("\n".join([_summary(readable, target, written), *warnings, *left_out]))


def _check(
    source: str,
    target: str | Path,
    size: int | None,
    validation_fraction: float,
    shard_size: str | None,
    jpeg_quality: int,
    jobs: int | None,
) -> None:
    """Raise a UserError that lists every invalid argument."""
    wrong = [
        (
            "--validation-fraction",
            validation_fraction,
            0 < validation_fraction < 1,
            "above 0 and below 1",
            "write 0.25",
        ),
        ("--size", size, size is None or size >= 8, "8 or more pixels", "write 224"),
        ("--jpeg-quality", jpeg_quality, 1 <= jpeg_quality <= 100, "1 to 100", "write 95"),
        ("--jobs", jobs, jobs is None or jobs >= 1, "1 or more", "leave it out to use all cores"),
        (
            "--shards",
            shard_size,
            shard_size is None or _bytes(shard_size) >= 1000,
            "500KB, 100MB, 2GB …",
            "write 100MB",
        ),
    ]
    problems = [
        Issue(key=key, found="empty", fix="name a folder; . is this one")
        for key, given in (("SOURCE", source), ("TARGET", target))
        if given == ""
    ]
    problems += [
        Issue(key=key, found=str(found), valid=valid, fix=fix) for key, found, holds, valid, fix in wrong if not holds
    ]
    for package in ("PIL", "numpy"):
        if importlib.util.find_spec(package) is None:
            fix = "make, or pip install -e '.[local]', in this kit's folder"
            problems.append(Issue(key="launcher prepare", found=f"{package} is not installed", fix=fix))
    if Path(target).exists() and not Path(target).is_dir():
        problems.append(Issue(key="TARGET", found=f"{target} is a file", fix="name a folder"))
    if problems:
        raise UserError(problems)
    if not is_folder(source, target):
        return
    inside = Path(target).resolve()
    if any((inside / split) in (Path(source).resolve(), *Path(source).resolve().parents) for split in SPLITS):
        raise mistake(
            "TARGET",
            f"{source} is in {target}, where the images that are prepared go: some would be in two splits",
            "name another folder",
        )
    if inside == Path(source).resolve() or Path(source).resolve() in inside.parents:
        raise mistake(
            "TARGET",
            f"{target} is inside {source}, so its images would become a class",
            "name a folder elsewhere",
        )


def _bytes(text: str) -> float:
    """A size such as 100MB in bytes; 0: not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    return float(found[1]) * UNITS[found[2]] if found else 0


def _listing(samples: list[Sample]) -> str:
    """SHA-256 over the names, classes and splits of a source's images."""
    listed = hashlib.sha256()
    for sample in samples:
        listed.update(f"{sample.split}\0{sample.label}\0{sample.stem}\0".encode(errors="surrogateescape"))
    return listed.hexdigest()


def _remember(target: Path, how: Recorded) -> None:
    """Record a target's arguments before anything is written. Refuse arguments or images other than before: the split would differ."""
    file = target / RECORD
    before = read_state(file, target, ARGUMENTS)
    if before is None:
        _refuse_other_files(target, how)
    else:
        before = {name: value for name, value in before.items() if not name.startswith(WRITTEN)}
        if before.get("listing") != how["listing"] and before | {"listing": None} == how | {"listing": None}:
            raise mistake(
                "SOURCE",
                f"it holds other images than at the first run for {target}, and another part of them would be held out",
                f"name another folder, or {removal(target)}",
            )
        different = [
            f"{name} {before.get(name)!r}, now {how.get(name)!r}"
            for name in {**how, **before}
            if before.get(name) != how.get(name)
        ]
        if different:
            raise mistake(
                "TARGET",
                f"{target} was made with " + "; ".join(different),
                f"name another folder, or {removal(target)}",
            )
    write_json(file, how)


def _refuse_other_files(target: Path, how: Recorded) -> None:
    """Raise a UserError if files are where nothing was prepared before: they would be mixed with a source's images, or taken for them."""
    taken = [target / split for split in splits_of(how) if holds_any(target / split)]
    if taken:
        found = f"there are files in {' and '.join(map(str, taken))}, and no {target / RECORD}: launcher prepare may not have made them"
        raise mistake("TARGET", found, "name another folder, or move them elsewhere")


def _refuse_unlearned(source: str, samples: list[Sample]) -> None:
    """Raise a UserError if held-out images, all or a class, have no training images: no model learns them."""
    if all(sample.split == "validation" for sample in samples):
        raise mistake(
            "SOURCE", f"{source}: no training images beside the validation images", "put images into its train/"
        )
    unlearned = _classes(samples, "validation") - _classes(samples, "train")
    if unlearned:
        found = f"{source}: validation images and no training images of {_named(unlearned)}"
        raise mistake("SOURCE", found, "add training images of each class, or remove its validation images")


def _classes(samples: list[Sample], split: str) -> set[str]:
    """The classes of a split; none for images with masks or without labels."""
    return {sample.label for sample in samples if sample.split == split and sample.label is not None}


def _named(classes: set[str]) -> str:
    """`class a`, or `7 classes: a, b, c, d, e …`"""
    if len(classes) == 1:
        return f"class {min(classes)}"
    return f"{len(classes)} classes: {', '.join(sorted(classes)[:SHOWN])}{' …' if len(classes) > SHOWN else ''}"


def _refuse_emptied(source: str, target: Path, samples: list[Sample], readable: list[Sample]) -> None:
    """Raise a UserError that lists the training classes and the splits of which no image can be read: nothing trains on the rest."""
    every = Counter((sample.split, sample.label) for sample in samples)
    read = Counter((sample.split, sample.label) for sample in readable)
    emptied: list[tuple[str, str, int]] = []
    for split in dict.fromkeys(split for split, _ in every):
        classes = {label: count for (of, label), count in every.items() if of == split}
        lost = {label: count for label, count in classes.items() if not read[split, label]}
        if lost == classes:
            emptied.append(("", split, sum(lost.values())))
        elif split == "train":
            emptied += [(f"of class {label}, ", split, count) for label, count in lost.items()]
    if emptied:
        fix = f"replace the images that {target / BROKEN} lists, or remove the class; then prepare again, but first {removal(target)}"
        issues = [
            Issue(
                key="SOURCE", found=f"{source}: {of}0 of {counted(count, f'{NAMES[split]} image')} can be read", fix=fix
            )
            for of, split, count in emptied
        ]
        raise UserError(issues, f"{target}, which is not finished")


def _not_held_out(readable: list[Sample], *, in_folders: bool) -> list[str]:
    """A warning about training images without validation images, for all or some classes.

    Args:
        in_folders: classes are folders, by which a run compares the two splits; shards come with the list of all classes.
    """
    splits, why_none = {sample.split for sample in readable}, "a class of one image keeps it for training"
    if "train" in splits and "validation" not in splits:
        return [f"warning: no validation images: add images to hold out; {why_none}"]
    missing = _classes(readable, "train") - _classes(readable, "validation")
    if not missing:
        return []
    why = "a run refuses folders of different classes" if in_folders else "no evaluation shows how well it is learned"
    return [
        f"warning: no validation images of {_named(missing)}: {why}; add images of each class, or remove it; {why_none}"
    ]


def _finish(target: Path, readable: list[Sample]) -> None:
    """Record how many images each split has, for `verify`: a target without these counts was not finished."""
    file = target / RECORD
    counts = Counter(sample.split for sample in readable)
    counts.update(f"{sample.split}/{MASKS}" for sample in readable if sample.mask is not None)
    how = read_state(file, target, ARGUMENTS) or {}
    write_json(file, {**how, **{f"{WRITTEN}{split}": count for split, count in sorted(counts.items())}})


def _summary(readable: list[Sample], target: Path, written: int) -> str:
    splits = Counter(sample.split for sample in readable)
    found = f"{written} written, {len(readable) - written} already there"
    if splits["unlabelled"]:
        return f"{target}: {counted(splits['unlabelled'], 'image')} without labels; {found}"
    masked = readable[0].label is None
    classes = len({sample.label for sample in readable})
    what = "images with masks" if masked else f"images in {counted(classes, 'class', 'classes')}"
    return f"{target}: {splits['train']} training and {splits['validation']} validation {what}; {found}"


def _leave_out(target: Path, broken: dict[str, str]) -> list[str]:
    """Write the list of unreadable images, and return its first lines."""
    file = target / BROKEN
    if not broken:
        file.unlink(missing_ok=True)
        return []
    listed = "".join(f"{name}\t{why}\n" for name, why in broken.items())
    write_atomically(file, listed.encode(errors="surrogateescape"))
    lines = [f"{counted(len(broken), 'image')} could not be read; {file} lists what was skipped:"]
    lines += [f"  {name}: {why}" for name, why in list(broken.items())[:10]]
    return lines + ([f"  … and {len(broken) - 10} more"] if len(broken) > 10 else [])
