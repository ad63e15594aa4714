"""`launcher diff`: how two runs differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.json_text import as_json
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import shortened_apart


def add(to: arguments.Add) -> None:
    made = to("diff", "show how two runs differ: settings, code, commit, request, package versions", carry_out)
    arguments.run(made, "first")
    arguments.run(made, "second")
    arguments.json(made, "a list of {about, key, first, second}; empty where they do not differ")


def carry_out(options: argparse.Namespace) -> int:
    first, second = (launcher.attach(name) for name in (options.first, options.second))
    if options.json:
        print(as_json([asdict(item) for item in launcher.diff(first, second)]))
    else:
        print_differences(first, second)
    return DONE


def print_differences(first: Run, second: Run) -> None:
    """Print how two runs differ."""
    found = launcher.diff(first, second)
    if not found:
        print(f"{first.name} and {second.name} do not differ")
        return
    rows = [[item.about, item.key, *shortened_apart(item.first, item.second, 60)] for item in found]
    print(Table(["about", "what", first.name, second.name], rows))
