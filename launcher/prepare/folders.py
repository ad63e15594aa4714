"""Images as single files: TARGET/train/<class>/<name>, TARGET/unlabelled/<name>, or TARGET/train/images/<name> and
TARGET/train/masks/<name>.png."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from launcher.prepare.processes import Advance, spread
from launcher.prepare.samples import Encoding, Sample, encode, reason

AT_ONCE = 2000
"""Images per task of a process."""


def write(
    samples: list[Sample], target: Path, encoding: Encoding, jobs: int, advance: Advance
) -> tuple[int, dict[str, str]]:
    """Write the images that do not exist yet.

    Returns:
        The number of images written, and source -> reason of broken ones.
    """
    existing = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    missing = [sample for sample in samples if not existing.issuperset(paths(sample))]
    advance(len(samples) - len(missing))
    chunks = [missing[first : first + AT_ONCE] for first in range(0, len(missing), AT_ONCE)]
    written, broken = 0, dict[str, str]()
    for count, problems in spread(partial(_write_all, target, encoding), chunks, jobs, advance):
        written, broken = written + count, broken | problems
    return written, broken


def paths(sample: Sample) -> list[str]:
    """A sample's paths below the target."""
    if sample.mask is None:
        folder = sample.split if sample.label is None else f"{sample.split}/{sample.label}"
        return [f"{folder}/{sample.stem}{sample.suffix}"]
    return [f"{sample.split}/images/{sample.stem}{sample.suffix}", f"{sample.split}/masks/{sample.stem}.png"]


def _write_all(target: Path, encoding: Encoding, samples: list[Sample], advance: Advance) -> tuple[int, dict[str, str]]:
    written, broken = 0, {}
    for sample in samples:
        try:
            files = encode(sample, encoding)
        except ValueError as error:
            broken[sample.source] = reason(sample, error)
        else:
            for path, data in zip(paths(sample), files):
                if data is not None:
                    _write(data, target / path)
            written += 1
        advance(1)
    return written, broken


def _write(data: bytes, file: Path) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.part")  # not an image's suffix
    temporary.unlink(missing_ok=True)  # of a killed process, or a link
    with open(temporary, "xb") as opened:
        opened.write(data)
    os.replace(temporary, file)
