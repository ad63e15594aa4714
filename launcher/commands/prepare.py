"""`launcher prepare`: make images ready for training."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.config.issues import Issue, UserError, mistake

OPTIONS = {
    "size": "--size",
    "validation_fraction": "--validation-fraction",
    "shard_size": "--shards",
    "jpeg_quality": "--jpeg-quality",
    "unlabelled": "--unlabelled",
}
"""Arguments of `prepare` -> the options that give them, which have its defaults."""


def add(to: arguments.Add) -> None:
    made = to(
        "prepare", "make images ready for training: TARGET/train and TARGET/validation, or TARGET/unlabelled", carry_out
    )
    made.usage = (
        "launcher prepare SOURCE TARGET [--size PIXELS] [--shards SIZE] [options]\n"
        "       launcher prepare --verify TARGET [--jobs N]"
    )
    made.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="digits, fashion-mnist, photos, shapes or cutouts (with masks); or a folder with idx files, with a subfolder for each "
        "class, or with images/ and masks/",
    )
    made.add_argument("target", nargs="?", metavar="TARGET", help="the folder to create, or to complete")
    made.add_argument(
        "--size", type=int, metavar="PIXELS", help="scale images down until their shorter side has this length"
    )
    made.add_argument(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="share of each class to hold out if the source has no split (default: 0.25)",
    )
    made.add_argument(
        "--shards",
        dest="shard_size",
        metavar="SIZE",
        help="write tar shards of about this size, for example 100MB (default: one file for each image)",
    )
    made.add_argument(
        "--jpeg-quality",
        type=int,
        metavar="Q",
        help="JPEG quality of scaled images, 1 to 100 (default: 95)",
    )
    made.add_argument(
        "--unlabelled",
        action="store_true",
        default=None,
        help="write TARGET/unlabelled alone: images without labels, of a folder all but those in its validation/, val/ or test/",
    )
    made.add_argument("--jobs", type=int, metavar="N", help="number of processes (default: one for each core)")
    made.add_argument("--verify", action="store_true", help="check a prepared folder against its checksums")


def carry_out(options: argparse.Namespace) -> int:
    from launcher.prepare import prepare as make
    from launcher.prepare import verify

    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    if options.verify and (issues := list(_beside_verify(options, given))):
        raise UserError(issues)
    if options.verify and options.source is not None:
        print(verify(options.source, jobs=options.jobs))
        return DONE
    if options.target is None:
        key = "SOURCE" if options.source is None and not options.verify else "TARGET"
        raise mistake(key, "missing", "launcher prepare SOURCE TARGET, or launcher prepare --verify TARGET")
    print(make(options.source, options.target, **given, jobs=options.jobs))
    return DONE


def _beside_verify(options: argparse.Namespace, given: Iterable[str]) -> Iterator[Issue]:
    """What --verify would ignore."""
    if options.target is not None:
        fix = f"launcher prepare --verify {shlex.quote(options.target)}"
        found = f"two folders, {options.source} and {options.target}"
        yield Issue(key="--verify", found=found, valid="launcher prepare --verify TARGET takes one folder", fix=fix)
    for name in given:
        yield Issue(key=OPTIONS[name], found="given beside --verify, which only reads", fix="leave it out")
