"""Verification of a prepared folder: every image decodes, every shard has its checksum."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

from launcher.config.issues import Issue, UserError, mistake
from launcher.planner.made_folders import RECORD, WRITTEN, Recorded, image_counts, not_finished
from launcher.prepare.entry_rules import entry_rules
from launcher.prepare.processes import Advance, available_cores, spread
from launcher.prepare.state import ARGUMENTS, MASKS, read_state, splits_of

AT_ONCE = 500
"""Files per task of a process."""

IMAGES = (".jpg", ".jpeg", ".png", ".webp")


def verify(target: str | Path, *, jobs: int | None = None) -> str:
    """Read everything that `prepare` wrote.

    Returns:
        A summary for people.

    Raises:
        UserError: files are missing, changed or broken; it lists up to ten.
    """
    from tqdm import tqdm

    target = Path(target)
    if not (target / RECORD).is_file():
        why = "was not made by launcher prepare" if target.is_dir() else "is no folder"
        raise mistake("TARGET", f"{target} {why}", "name the folder that holds train/ or unlabelled/")
    how = read_state(target / RECORD, target, ARGUMENTS) or {}
    shards, files, problems = _listed(target, how)
    chunks = [files[first : first + AT_ONCE] for first in range(0, len(files), AT_ONCE)]
    seen = 0
    unreadable: list[str] = []
    with tqdm(desc=f"verifying {target}", unit="image", disable=None) as bar:
        jobs = jobs or available_cores()
        in_shards = spread(_verify_shard, shards, jobs, bar.update)
        for count, found in itertools.chain(in_shards, spread(_verify_files, chunks, jobs, bar.update)):
            seen, unreadable = seen + count, unreadable + found
    problems += sorted(unreadable)  # processes finish in any order; two reports of one folder must agree
    fix = "remove the named files and run launcher prepare again, which writes what is missing"
    issues = [] if image_counts(how) else [not_finished("TARGET", target, how)]
    issues += [Issue(key="TARGET", found=problem, fix=fix) for problem in problems]
    if issues:
        more = f", the first ten of {len(issues)}" if len(issues) > 10 else ""
        raise UserError(issues[:10], f"{target}{more}")
    return f"{target}: {seen} images decoded" + (f", {len(shards)} shards with the right checksum" if shards else "")


def _listed(target: Path, how: Recorded) -> tuple[list[tuple[Path, str]], list[Path], list[str]]:
    """What to read: (split, name) of each shard, and image files; and what is missing or unexpected."""
    rules = entry_rules().shard_index
    expected = image_counts(how)
    shards: list[tuple[Path, str]] = []
    files: list[Path] = []
    problems: list[str] = []
    for split in (target / name for name in splits_of(how) if name in expected or (target / name).is_dir()):
        if how.get("shard_size"):
            try:
                index = _index(split)
            except ValueError as error:
                problems.append(str(error))
                continue
            shards += [(split, name) for name in index.names]
            unknown = [name for name in rules.find_shards(split) if name not in index.names]
            problems += [f"{split / name} is not in {rules.INDEX}" for name in unknown]
            count = len(index)
        else:
            images = sorted(file for file in split.rglob("*") if file.suffix.lower() in IMAGES and file.is_file())
            written = how.get(f"{WRITTEN}{split.name}/{MASKS}")
            masked = (split / "images").is_dir() and (split / MASKS).is_dir()
            masks = sum(split / MASKS in file.parents for file in images) if masked else 0
            files += images
            count = len(images) - masks
            if written is not None and masks != written:
                problems.append(f"{split} has {masks:,} masks, {written:,} were written")
        if count != expected.get(split.name, count):
            problems.append(f"{split} has {count:,} images, {expected[split.name]:,} were written")
    return shards, files, problems


def _index(split: Path) -> Any:
    """A split's ShardIndex. Raises ValueError if it is missing or damaged."""
    rules = entry_rules().shard_index
    if not (split / rules.INDEX).is_file():
        raise ValueError(f"{split / rules.INDEX} is missing")
    return rules.read_index(split / rules.INDEX)


def _verify_shard(task: tuple[Path, str], advance: Advance) -> tuple[int, list[str]]:
    folder, name = task
    rules, file = entry_rules(), folder / name
    index = rules.shard_index.read_index(folder / rules.shard_index.INDEX)
    shard = index.names.index(name)
    try:
        data = file.read_bytes()
    except OSError as error:
        return 0, [f"{file} cannot be read: {error.strerror}"]
    if hashlib.sha256(data).hexdigest().encode() != index.checksums[shard]:
        return 0, [
            f"{file} has changed since it was written ({len(data):,} bytes, {index.sizes[shard]:,} were written)"
        ]
    problems, first = [], int(index.counts[:shard].sum())
    for number in range(first, first + int(index.counts[shard])):
        begins, length = int(index.offsets[number]), int(index.lengths[number])
        problems += _problem(data[begins : begins + length], f"{file}, image {number}")
        advance(1)
    return int(index.counts[shard]), problems


def _verify_files(files: list[Path], advance: Advance) -> tuple[int, list[str]]:
    problems = []
    for file in files:
        problems += _problem(file.read_bytes(), file)
        advance(1)
    return len(files), problems


def _problem(encoded: bytes, file: str | Path) -> list[str]:
    try:
        entry_rules().decoding.decode(encoded, file, 3)
    except ValueError as error:
        return [str(error)]
    return []
