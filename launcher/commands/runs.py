"""`launcher runs`: list all runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.record import records
from launcher.record.progress import quality
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import dollars


def add(to: arguments.Add) -> None:
    arguments.json(to("runs", "list all runs", carry_out))


def carry_out(options: argparse.Namespace) -> int:
    found = launcher.runs()
    if options.json:
        print(json.dumps([{"name": item.name, "state": item.state, **item.outcome()} for item in found], indent=2))
    elif found:
        print_runs(found)
    else:
        print(f"no runs in {records.store()}; start one: launcher run configs/quickstart_teacher.yaml")
    return DONE


def print_runs(runs: list[Run]) -> None:
    """Print all runs, one a line."""
    rows = []
    for run in runs:
        outcome = run.outcome()
        rows.append(
            [
                run.name,
                run.state,
                run.folder.read(run.folder.plan)["backend"],
                str(len(run.hosts)),
                number(outcome.get("seconds"), ".1f"),
                quality(run.result()),
                _cost(run, outcome),
            ]
        )
    print(Table(["run", "state", "on", "hosts", "seconds", "accuracy", "cost"], rows))
    for run in runs:
        for line in as_last_heard(run):
            print(f"{run.name}: {line.strip()}")


def as_last_heard(run: Run) -> list[str]:
    """Lines that say that SageMaker does not answer, and how old the state is."""
    if not run.trouble:
        return []
    asked = run.folder.read(run.folder.remote).get("asked", "its start")
    return [f"  not checked {run.trouble}; last checked at {asked}"]


def _cost(run: Run, outcome: dict[str, Any]) -> str:
    """What a run on SageMaker has cost so far; - for one on this machine, or where the price is unknown."""
    usd = outcome.get("cost_usd") if outcome else run.spend
    return "-" if usd is None else dollars(usd) + ("" if outcome else " so far")


def number(value: Any, form: str) -> str:
    """A number in a format; - for anything else that a script may have written."""
    return format(value, form) if isinstance(value, (int, float)) else "-"
