"""`launcher replay`: run a run's job again."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments


def add(to: arguments.Add) -> None:
    made = to("replay", "run a run's job again, with the code that it used", carry_out)
    arguments.run(made)
    arguments.overrides(made)
    made.add_argument("--on", metavar="BACKEND", help="use another backend than the run's")
    arguments.start(made)


def carry_out(options: argparse.Namespace) -> int:
    return foreground.start(launcher.replay(options.run, options.overrides, on=options.on), options)
