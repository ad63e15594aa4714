"""`launcher logs`: a run's log lines."""

from __future__ import annotations

import argparse
import json
import sys

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.live import Trouble
from launcher.commands.show import next_commands
from launcher.record import records
from launcher.record.toolkit_lines import ToolkitLines
from launcher.runner.run import Run
from launcher.show.text import duration


def add(to: arguments.Add) -> None:
    made = to("logs", "print a run's log lines", carry_out)
    arguments.run(made)
    made.add_argument("-f", "--follow", action="store_true", help="continue until the run is over")
    made.add_argument("--all", action="store_true", help="print the container toolkit's own lines too")
    arguments.json(made, "{host, line} on each line")


def carry_out(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    several, in_terminal = len(chosen.hosts) > 1, sys.stdout.isatty()
    toolkit = {host: ToolkitLines() for host in chosen.hosts}
    out, lines, hidden = sys.stdout.buffer, 0, 0
    trouble = Trouble(chosen, follows=options.follow)

    def tell() -> None:
        for news in trouble.news():
            arguments.note(news)

    for host, raw in chosen.raw_logs(follow=options.follow, idle=tell):
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if toolkit[host].has(line) and not options.all:
            hidden += 1
            continue
        lines += 1
        if options.json:
            print(json.dumps({"host": host, "line": line}), flush=options.follow)
            continue
        if in_terminal:
            print(f"{host} | {line}" if several else line)
            continue
        out.write(f"{host} | ".encode() + raw.rstrip(b"\n") + b"\n" if several else raw)  # byte for byte
        if options.follow:
            out.flush()
    sys.stdout.flush()
    tell()
    if in_terminal or not lines:
        nothing = f"no lines of the script, {hidden} of the container toolkit (--all); " if hidden else "no lines; "
        arguments.note(f"{'' if lines else nothing}{_how_it_stands(chosen)}")
    return DONE


def _how_it_stands(run: Run) -> str:
    """The run's state after its lines, and the next command."""
    seconds = run.outcome().get("seconds")
    took = f" after {duration(seconds)}" if run.state in records.OVER and seconds is not None else ""
    others = [command for command in next_commands(run) if command != f"launcher logs {run.name}"]
    return f"{run.name}: {run.state}{took}; next: {[*others, f'launcher show {run.name}'][0]}"
