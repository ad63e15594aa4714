"""`launcher label`: fill the label bank of a job, without its student."""

from __future__ import annotations

import argparse

from launcher.commands import foreground
from launcher.commands import options as arguments
from launcher.runner import labelling


def add(to: arguments.Add) -> None:
    made = to(
        "label", "keep a teacher's answers for all views of a job's images, before any student is trained", carry_out
    )
    arguments.job(made)
    arguments.hosts(made)
    arguments.start(made)


def carry_out(options: argparse.Namespace) -> int:
    made = labelling.planned(options.config, arguments.overrides_of(options), on=options.on, smoke=options.smoke)
    return foreground.start(made, options)
