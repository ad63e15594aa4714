"""Verification of a prepared folder: every image decodes, every shard has its checksum."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from launcher.config.issues import Issue, UserError, mistake
from launcher.prepare.entry_rules import entry_rules
from launcher.prepare.processes import Advance, available_cores, spread
from launcher.prepare.samples import SPLITS
from launcher.prepare.state import ARGUMENTS, WRITTEN, read_state

AT_ONCE = 500
"""Files of one task of a process."""

IMAGES = (".jpg", ".jpeg", ".png", ".webp")


def verify(target: str | Path, *, jobs: int | None = None) -> str:
    """Read everything that `prepare` wrote.

    Returns:
        A summary for people.

    Raises:
        UserError: files are missing, changed or broken; it lists up to ten.
    """
    from tqdm import tqdm

    target, rules = Path(target), entry_rules().shard_index
    if not (target / "prepared.json").is_file():
        why = "was not made by launcher prepare" if target.is_dir() else "is no folder"
        raise mistake("TARGET", f"{target} {why}", "name the folder that holds train/ or unlabelled/")
    how = read_state(target / "prepared.json", target, ARGUMENTS) or {}
    expected = {name: how[f"{WRITTEN}{name}"] for name in SPLITS if f"{WRITTEN}{name}" in how}
    shards, files, problems = [], [], []
    if not expected:
        problems.append(f"{target} was not finished")
    for split in (target / name for name in SPLITS if name in expected or (target / name).is_dir()):
        if not how.get("shard_size"):
            images = sorted(file for file in split.rglob("*") if file.suffix.lower() in IMAGES)
            files += images
            masks = sum((split / "masks") in file.parents for file in images) if (split / "images").is_dir() else 0
            if len(images) - masks != expected.get(split.name, len(images) - masks):
                problems.append(f"{split} has {len(images) - masks:,} images, {expected[split.name]:,} were written")
        elif not (split / rules.INDEX).is_file():
            problems.append(f"{split / rules.INDEX} is missing")
        else:
            try:
                index = rules.read_index(split / rules.INDEX)
            except ValueError as error:
                problems.append(str(error))
                continue
            shards += [(split, name) for name in index.names]
            problems += [
                f"{split / name} is not in {rules.INDEX}"
                for name in rules.find_shards(split)
                if name not in index.names
            ]
    chunks = [files[first : first + AT_ONCE] for first in range(0, len(files), AT_ONCE)]
    seen = 0
    unreadable: list[str] = []
    with tqdm(desc=f"verifying {target}", unit="image", disable=None) as bar:
        jobs = jobs or available_cores()
        in_shards = spread(_verify_shard, shards, jobs, bar.update)
        for count, found in itertools.chain(in_shards, spread(_verify_files, chunks, jobs, bar.update)):
            seen, unreadable = seen + count, unreadable + found
    problems += sorted(unreadable)  # the processes finish in any order; two reports of one folder have to agree
    if problems:
        fix = "remove the named files and run launcher prepare again, which writes what is missing"
        issues = [Issue(key="TARGET", found=problem, fix=fix) for problem in problems[:10]]
        more = f", the first ten of {len(problems)}" if len(problems) > 10 else ""
        raise UserError(issues, f"{target}{more}")
    return f"{target}: {seen} images decoded" + (f", {len(shards)} shards with the right checksum" if shards else "")


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
