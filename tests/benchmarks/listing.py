"""What listing a folder of images costs each process at its start, on a local disk: by the system alone, by the kit, its digests.

A walk lists names, and no file is opened. A label bank's digest also asks for every file's size.

    .venv/bin/python tests/benchmarks/listing.py --images 1281167
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine import machine, progress, table
from training.data.sources.folders import LabelledFolder

CLASSES = 1000
"""As many as ImageNet's, whose training images are 1,281,167."""


def make(root: Path, images: int) -> None:
    """Empty files in one folder for each class, with ImageNet's kind of names."""
    for number in range(CLASSES):
        (root / f"n{number:08}").mkdir()
    for number in range(images):
        name = f"n{number % CLASSES:08}"
        os.close(os.open(root / name / f"{name}_{number}.JPEG", os.O_CREAT | os.O_WRONLY))


def by_the_system(root: Path) -> int:
    """Files, each name read once."""
    return sum(len([*os.scandir(folder.path)]) for folder in os.scandir(root))


def taken(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, computed = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root, options.images)
        opened = LabelledFolder(root)
        assert len(opened) == options.images == by_the_system(root)
        works: dict[str, Callable[[], object]] = {
            "names read by the system": lambda: by_the_system(root),
            "listed, sorted and kept by the kit": lambda: LabelledFolder(root),
            "digest of the names": opened.listing,
            "digest of names and sizes, of a label bank": opened.digest,
        }
        for number in range(options.rounds):
            for name, work in works.items():
                found.setdefault(name, []).append(taken(work))
            progress(f"round {number + 1} of {options.rounds}")
    print(
        f"{machine(1)}\n{options.images:,} images in {CLASSES:,} classes, {options.rounds} rounds in turns, names in the system's cache"
    )
    rows = [("", "seconds, median", "CPU seconds")]
    for name, seconds in found.items():
        wall, computed = (statistics.median(each) for each in zip(*seconds))
        rows.append((name, f"{wall:.2f}", f"{computed:.2f}"))
    print(table(rows))


if __name__ == "__main__":
    main()
