"""`launcher runs`: list the latest runs, or all."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.json_text import as_json
from launcher.config.issues import Issue, UserError, mistake
from launcher.record import records, removal
from launcher.record.progress import quality
from launcher.runner.run import Run, billed
from launcher.show.table import Table
from launcher.show.text import counted, dollars, duration, file_size, indent

HEAD = ["run", "state", "started", "took", "on", "hosts", "accuracy", "on disk", "cost"]

DAMAGED = "damaged"
"""Shown as the state of a run whose record cannot be read."""

LATEST = 50
"""Runs listed by default."""


def add(to: arguments.Add) -> None:
    made = to("runs", "list runs, the latest last", carry_out)
    how_many = made.add_mutually_exclusive_group()
    how_many.add_argument("--last", type=int, metavar="N", default=LATEST, help=f"how many (default: {LATEST})")
    how_many.add_argument("--all", action="store_true", help="list every run")
    arguments.json(made, "a list of {name, state, seconds, …}; or {name, damaged}")


def carry_out(options: argparse.Namespace) -> int:
    if options.last < 1:
        raise mistake("--last", str(options.last), "write --last 20, or --all", valid="1 or more")
    found = launcher.runs()
    shown = found if options.all else found[-options.last :]
    if options.json:
        print(as_json([_described(run) for run in shown]))
    elif found:
        whole = print_runs(shown)
        if len(shown) < len(found):
            print(f"the latest {len(shown)} of {len(found)} runs; --last N or --all lists more")
        if whole:
            print(f"next: launcher show {whole[-1]}")
    else:
        print(f"no runs in {records.store()}; start one: launcher run quickstart_teacher")
    return DONE


def print_runs(runs: list[Run]) -> list[str]:
    """Print runs, one per line, then what cannot be read or checked of them. Returns the names of those whose record is whole."""
    rows, unchecked = [], []
    damaged: list[Issue] = []
    for run in runs:
        try:
            rows.append(_row(run))
            unchecked += [f"{run.name}: {line.strip()}" for line in as_last_heard(run)]
        except UserError as error:
            rows.append([run.name, DAMAGED, *["-"] * 5, file_size(removal.size(run.folder)), "-"])
            damaged += error.issues
    print(Table(HEAD, rows).without_empty("cost", "accuracy"))
    print("\n".join(unchecked), end="\n" if unchecked else "")
    if damaged:
        print(f"{counted(len(damaged), 'damaged record')}:")
        print("\n".join(indent(str(issue)) for issue in damaged))
    return [row[0] for row in rows if row[1] != DAMAGED]


def _row(run: Run) -> list[str]:
    plan, outcome = run.folder.read(run.folder.plan), run.outcome()
    return [
        run.name,
        outcome.get("state") or run.state,
        _age(run),
        "-" if outcome.get("seconds") is None else duration(outcome["seconds"]),
        plan["backend"],
        str(len(plan["hosts"])),
        quality(run.result()),
        file_size(removal.size(run.folder)),
        _cost(run, outcome),
    ]


def _age(run: Run) -> str:
    """How long ago a run was planned; - if that cannot be read or is in the future."""
    try:
        planned = datetime.strptime(run.folder.time, "%Y%m%d-%H%M%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return "-"
    seconds = (datetime.now(timezone.utc) - planned).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else "-"


def _described(run: Run) -> dict[str, Any]:
    """A run, JSON-ready; `damaged` holds what cannot be read."""
    try:
        outcome = run.outcome()
        return {"name": run.name, "state": outcome.get("state") or run.state, **outcome}
    except UserError as error:
        return {"name": run.name, "damaged": [issue.to_dict() for issue in error.issues]}


def as_last_heard(run: Run) -> list[str]:
    """Lines that say that SageMaker does not answer, and how old the state is."""
    if not run.trouble:
        return []
    asked = run.folder.read(run.folder.remote).get("asked", "its start")
    return [f"  not checked {run.trouble}; last checked at {asked}"]


def _cost(run: Run, outcome: dict[str, Any]) -> str:
    """What a run on SageMaker has cost so far; - for one on this machine, or if the price is unknown."""
    if not outcome:
        return run.spent.partition(", on demand")[0] or "-"
    usd = billed(outcome)
    return "-" if usd is None else dollars(usd)
