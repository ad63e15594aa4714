"""`launcher attach`: follow a run that was started elsewhere."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments


def add(to: arguments.Add) -> None:
    made = to("attach", "follow a run that was started elsewhere", carry_out)
    arguments.run(made)
    made.add_argument("--region", metavar="REGION", help="where to find a training job that another machine started")
    arguments.every_line(made)


def carry_out(options: argparse.Namespace) -> int:
    return foreground.follow_to_the_end(launcher.attach(options.run, region=options.region), options)
