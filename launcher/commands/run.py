"""`launcher run`: plan a job and run it."""

from __future__ import annotations

import argparse

from launcher.commands import foreground, plan
from launcher.commands import options as arguments


def add(to: arguments.Add) -> None:
    made = to("run", "run a job, with a progress line", carry_out)
    arguments.job(made)
    arguments.hosts(made)
    arguments.start(made)


def carry_out(options: argparse.Namespace) -> int:
    return foreground.start(plan.planned(options), options)
