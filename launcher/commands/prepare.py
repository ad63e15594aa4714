"""`launcher prepare`: make images ready for training."""

from __future__ import annotations

import argparse

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.config.issues import mistake


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
        default=0.25,
        metavar="F",
        help="share of each class to hold out if the source has no split (default: 0.25)",
    )
    made.add_argument(
        "--shards",
        metavar="SIZE",
        help="write tar shards of about this size, for example 100MB (default: one file for each image)",
    )
    made.add_argument(
        "--jpeg-quality",
        type=int,
        default=95,
        metavar="Q",
        help="JPEG quality of scaled images, 1 to 100 (default: 95)",
    )
    made.add_argument(
        "--unlabelled",
        action="store_true",
        help="write TARGET/unlabelled alone: images without labels, of a folder all but those in its validation/, val/ or test/",
    )
    made.add_argument("--jobs", type=int, metavar="N", help="number of processes (default: one for each core)")
    made.add_argument("--verify", action="store_true", help="check a prepared folder against its checksums")


def carry_out(options: argparse.Namespace) -> int:
    from launcher.prepare import prepare as make
    from launcher.prepare import verify

    if options.verify and options.source is not None:
        print(verify(options.source, jobs=options.jobs))
        return DONE
    if options.target is None:
        key = "SOURCE" if options.source is None and not options.verify else "TARGET"
        raise mistake(key, "missing", "launcher prepare SOURCE TARGET, or launcher prepare --verify TARGET")
    print(
        make(
            options.source,
            options.target,
            size=options.size,
            validation_fraction=options.validation_fraction,
            shard_size=options.shards,
            jpeg_quality=options.jpeg_quality,
            unlabelled=options.unlabelled,
            jobs=options.jobs,
        )
    )
    return DONE
