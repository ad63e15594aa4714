"""`launcher stop`: stop a run after its current step, or end the warm pool that a finished run left."""

from __future__ import annotations

import argparse
import contextlib
import sys

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.config.issues import mistake
from launcher.record import records
from launcher.record.records import OVER


def add(to: arguments.Add) -> None:
    made = to(
        "stop", "stop a run after its current step; of one that is over, end the warm pool that it left", carry_out
    )
    arguments.run(
        made, help="a run's name; or a job's name for its run that is under way, or else the latest that still costs"
    )


def carry_out(options: argparse.Namespace) -> int:
    chosen = _chosen(options.run)
    if chosen.state in OVER:
        print(chosen.release() or f"{chosen.name} is over: {chosen.state}")
        return DONE
    chosen.stop("launcher stop")
    asked = f"asked {chosen.name} to stop after its current step"
    if not chosen.on_this_machine and chosen.folder.is_closed():  # its end would not be seen
        print(f"{asked}; not waiting for its end, as its folder is another user's or read-only: {chosen.folder.path}")
        return DONE
    print(f"{asked}; waiting", flush=True)
    trouble = ""
    while chosen.wait(1) not in OVER:
        if chosen.trouble != trouble:
            trouble = chosen.trouble
            print(trouble or "AWS answers again", file=sys.stderr, flush=True)
    foreground.print_end(chosen)
    return DONE


def _chosen(name: str) -> launcher.Run:
    """A run by its name; of a job the run that is under way, else the latest that left a warm pool, else the latest.

    Raises:
        UserError: no such run, or several of the job are under way.
    """
    latest = launcher.attach(name)
    if latest.name == name:
        return latest
    under_way: list[launcher.Run] = []
    costly = latest
    for run in (launcher.Run(folder) for folder in records.all_runs(name) if folder.plan.exists()):
        try:
            is_over = run.folder.state() in OVER
        except records.DamagedRecord:
            is_over = True  # its outcome cannot be read
        if not is_over and run.state not in OVER:
            under_way.append(run)
            continue
        with contextlib.suppress(records.DamagedRecord):
            if run.remaining_costs:
                costly = run
    if len(under_way) > 1:
        fix = "; or ".join(f"launcher stop {run.name}" for run in under_way)
        raise mistake("run", f"{name}: {len(under_way)} runs are under way", fix)
    return under_way[0] if under_way else costly
