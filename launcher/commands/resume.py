"""`launcher resume`: continue a run's job from its last checkpoint."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments


def add(to: arguments.Add) -> None:
    made = to("resume", "continue a run's job from its last checkpoint, with the code that it used", carry_out)
    arguments.run(made)
    arguments.overrides(made)
    arguments.hosts(made)
    arguments.start(made)


def carry_out(options: argparse.Namespace) -> int:
    return foreground.start(launcher.resume(options.run, arguments.overrides_of(options)), options)
