"""`launcher attach`: follow a run that another process or machine started."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments


def add(to: arguments.Add) -> None:
    made = to("attach", "follow a run that another terminal or machine started", carry_out)
    arguments.run(made)
    made.add_argument("--region", metavar="REGION", help="the AWS region of a job that another machine started")
    arguments.every_line(made)


def carry_out(options: argparse.Namespace) -> int:
    return foreground.follow_to_the_end(launcher.attach(options.run, region=options.region), options)
