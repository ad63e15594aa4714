"""`launcher rm`: remove runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.config.issues import Issue, UserError, mistake
from launcher.record import records, removal
from launcher.record.records import RunFolder
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import counted, file_size


def add(to: arguments.Add) -> None:
    made = to("rm", "remove runs with everything that they left", carry_out)
    made.add_argument("runs", metavar="RUN", nargs="+", help="a run's full name")
    arguments.yes(made)


def carry_out(options: argparse.Namespace) -> int:
    chosen: list[RunFolder] = []
    issues: list[Issue] = []
    for name in dict.fromkeys(options.runs):
        try:
            run = records.find(name)
        except UserError as error:
            issues += error.issues
            continue
        chosen.append(run)
        if name != run.name:
            found = f"{name} is a job; its latest run is {run.name}"
            issues.append(Issue(key="run", found=found, fix=f"launcher rm {run.name}"))
    issues += _in_use(chosen)
    if issues:
        raise UserError(issues)
    return confirmed_removal(chosen, yes=options.yes)


def confirmed_removal(runs: Sequence[RunFolder], *, yes: bool) -> int:
    """List runs with their sizes and the tables in which they are trials, ask, and remove them. Returns the exit code.

    Args:
        yes: do not ask.

    Raises:
        UserError: there is no terminal to ask in, or a run came into use before the answer.
    """
    sizes = [removal.size(run) for run in runs]
    total = f"{counted(len(runs), 'run')}, {file_size(sum(sizes))}"
    print(Table(["run", "state", "size"], [[run.name, _state(run), file_size(size)] for run, size in zip(runs, sizes)]))
    for table, count in removal.tables_naming(runs).items():
        trials = counted(count, "of these runs is a trial", "of these runs are trials")
        print(f"{trials} in {table}: launcher tune reads its trials' runs again; other studies need the table alone")
    if not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise mistake("--yes", "not given, and there is no terminal to ask in", f"add --yes to remove {total}")
        try:
            answer = input(f"remove {total}? [y/N] ").strip().lower()
        except EOFError:
            answer = ""
        if answer not in ("y", "yes"):
            print("nothing is removed")
            return DONE
        if issues := _in_use(runs):  # another process may have resumed one since
            raise UserError(issues)
    for run in runs:
        removal.remove(run)
    print(f"removed {total}")
    return DONE


def _in_use(runs: Sequence[RunFolder]) -> list[Issue]:
    used = removal.in_use(records.all_runs())
    fix = "wait until that ends: launcher runs asks for the state of what is under way"
    found = [Issue(key="run", found=used[run.name], fix=fix) for run in runs if run.name in used]
    billed = {run.name: text for run in runs if (text := remaining_costs(run))}
    return found + [
        Issue(key="run", found=f"{name} is over, but {text}", fix=f"launcher stop {name}, then remove it")
        for name, text in billed.items()
    ]


def remaining_costs(run: RunFolder) -> str:
    """What a finished run on SageMaker still costs; once it is removed, nothing here can end that. "" if nothing."""
    try:
        return Run(run).remaining_costs if run.remote.exists() else ""
    except records.DamagedRecord:
        return ""


def _state(run: RunFolder) -> str:
    try:
        return run.state()
    except records.DamagedRecord:
        return "damaged"
