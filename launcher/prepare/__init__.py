"""Images made ready for training: TARGET/train and TARGET/validation, each a folder a class, images/ and masks/, or shards.

It runs in parallel, can be interrupted and repeated, and leaves out what is no image.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from pathlib import Path

from launcher.config.issues import Issue, UserError, mistake
from launcher.prepare import folders, shards
from launcher.prepare.processes import available_cores
from launcher.prepare.samples import Encoding, Sample
from launcher.prepare.sources import find_samples
from launcher.prepare.verification import verify
from launcher.record.records import write_json

__all__ = ["prepare", "verify"]

BROKEN = "broken.txt"

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def prepare(
    source: str,
    target: str | Path,
    *,
    size: int | None = None,
    validation_fraction: float = 0.25,
    shard_size: str | None = None,
    jpeg_quality: int = 95,
    jobs: int | None = None,
) -> str:
    """Write a source's images into a target folder; those that are there already are left alone.

    A file that needs no change is copied as it is. What is scaled is first decoded by the entry scripts' own rules: upright as
    EXIF says, on white where it is transparent, of 16 bits the upper 8.

    Args:
        source: `digits` (scikit-learn's, 8 × 8 grey), `fashion-mnist` (Debian's package), `photos` (JPEGs of 400 × 300 pixels, cut
            from scikit-learn's two photographs), `shapes` (drawn, with masks), a folder with MNIST-style idx files, or a folder with
            one subfolder a class, or with images/ and masks/; the last two also below train/ and validation/ (or val/ or test/).
        target: becomes target/train and target/validation.
        size: scale images down so that the shorter side has so many pixels; smaller ones stay as they are;
            `shapes` and `cutouts` are drawn at that size.
        validation_fraction: share of each class that is held out where the source has no split of its own; drawn by file name,
            so that a repeated call draws the same.
        shard_size: write tar shards of about so much, as in 100MB, with the images in a random order. None: a file an image.
        jpeg_quality: 1 to 100, of JPEG and WebP images that are scaled.
        jobs: processes. None: as many as there are cores that this one may use.

    Returns:
        What was done, in words.

    Raises:
        UserError: no such source, nothing in it, a package that is not installed, or a target made otherwise.
    """
    from tqdm import tqdm

    _check(source, target, size, validation_fraction, shard_size, jpeg_quality, jobs)
    samples = find_samples(source, size, validation_fraction)
    target, encoding = Path(target), Encoding(size, jpeg_quality)
    made_of = str(Path(source).resolve()) if Path(source).is_dir() else source
    how = {"source": made_of, "size": size, "validation_fraction": validation_fraction}
    how |= {"jpeg_quality": jpeg_quality} if jpeg_quality != 95 else {}
    how |= {"shard_size": shard_size} if shard_size else {}
    _remember(target, how)
    with tqdm(total=len(samples), desc=f"{source} -> {target}", unit="image", disable=None) as bar:
        jobs = jobs or available_cores()
        if shard_size:
            written, broken = shards.write(samples, target, encoding, _bytes(shard_size), jobs, bar.update)
        else:
            written, broken = folders.write(samples, target, encoding, jobs, bar.update)
    return "\n".join([_summary(samples, target, written, broken), *_leave_out(target, broken)])


def _check(
    source: str,
    target: str | Path,
    size: int | None,
    validation_fraction: float,
    shard_size: str | None,
    jpeg_quality: int,
    jobs: int | None,
) -> None:
    """Raise a UserError with everything that is wrong with the arguments."""
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
        ("--jobs", jobs, jobs is None or jobs >= 1, "1 or more", "leave it out: it then follows the cores"),
        ("--shards", shard_size, shard_size is None or _bytes(shard_size) >= 1000, "1KB or more", "write 100MB"),
    ]
    problems = [
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
    inside = Path(target).resolve()
    if Path(source).is_dir() and (inside == Path(source).resolve() or Path(source).resolve() in inside.parents):
        raise mistake(
            "TARGET",
            f"{target} lies inside of {source}: its images would be taken as a class",
            "name a folder elsewhere",
        )


def _bytes(text: str) -> float:
    """A size such as 100MB in bytes; 0 where it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    return float(found[1]) * UNITS[found[2]] if found else 0


def _remember(target: Path, how: dict[str, str | int | float | None]) -> None:
    """Write down how a target is made; refuse one that was made otherwise, whose held-out images may be trained on here."""
    file = target / "prepared.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        different = [
            f"{name} {before.get(name)!r}, now {how.get(name)!r}"
            for name in {**how, **before}
            if before.get(name) != how.get(name)
        ]
        if different:
            raise mistake(
                "TARGET",
                f"{target} was made with " + "; ".join(different),
                f"name another folder, or remove it first: rm -r {target}",
            )
    target.mkdir(parents=True, exist_ok=True)
    write_json(file, how)


def _summary(samples: list[Sample], target: Path, written: int, broken: dict[str, str]) -> str:
    readable = [sample for sample in samples if sample.source not in broken]
    splits = Counter(sample.split for sample in readable)
    masked = samples[0].label is None
    classes = len({sample.label for sample in readable})
    what = "images with a mask each" if masked else f"images in {classes} classes"
    return (
        f"{target}: {splits['train']} training and {splits['validation']} validation {what}; "
        f"{written} written now, {len(readable) - written} were there"
    )


def _leave_out(target: Path, broken: dict[str, str]) -> list[str]:
    """Tell what could not be read, and write it down."""
    file = target / BROKEN
    if not broken:
        file.unlink(missing_ok=True)
        return []
    temporary = file.with_name(f".{BROKEN}.part")
    broken = {name: why.removeprefix(f"{name} ") for name, why in broken.items()}
    listed = "".join(f"{name}\t{why}\n" for name, why in broken.items())
    temporary.write_text(listed, encoding="utf-8", errors="surrogateescape")
    os.replace(temporary, file)
    lines = [f"{len(broken)} images could not be read and were left out; {file} lists them:"]
    lines += [f"  {name}: {why}" for name, why in list(broken.items())[:10]]
    return lines + ([f"  … and {len(broken) - 10} more"] if len(broken) > 10 else [])
