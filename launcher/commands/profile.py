"""`launcher profile`: change how often SageMaker samples a running job's system metrics."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE

INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds that SageMaker accepts for ProfilingIntervalInMilliseconds."""


def add(to: arguments.Add) -> None:
    made = to("profile", "change how often SageMaker samples a running job's system metrics", carry_out)
    arguments.run(made)
    switch = made.add_mutually_exclusive_group(required=True)
    switch.add_argument(
        "--interval",
        type=int,
        choices=INTERVALS,
        metavar="MS",
        help=f"milliseconds between two samples: {', '.join(map(str, INTERVALS))}",
    )
    switch.add_argument("--off", action="store_true", help="stop sampling")


def carry_out(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    chosen.profile(None if options.off else options.interval)
    print(f"{chosen.name}: system metrics " + ("off" if options.off else f"every {options.interval} ms"))
    return DONE
