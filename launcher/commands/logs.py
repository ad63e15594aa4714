"""`launcher logs`: a run's log lines."""

from __future__ import annotations

import argparse
import sys

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE


def add(to: arguments.Add) -> None:
    made = to("logs", "print a run's log lines", carry_out)
    arguments.run(made)
    made.add_argument("-f", "--follow", action="store_true", help="continue until the run is over")


def carry_out(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    several = len(chosen.hosts) > 1
    if sys.stdout.isatty():
        for host, line in chosen.logs(follow=options.follow):
            print(f"{host} | {line}" if several else line)
        return DONE
    out = sys.stdout.buffer  # byte for byte
    for host, raw in chosen.raw_logs(follow=options.follow):
        out.write(f"{host} | ".encode() + raw.rstrip(b"\n") + b"\n" if several else raw)
        if options.follow:
            out.flush()
    return DONE
