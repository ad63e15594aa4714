"""Start a run, follow it in the terminal, and print how it ended."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import launcher
from launcher import backends
from launcher.backends.interrupts import deferred
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, INTERRUPTED, RUN_FAILED
from launcher.commands.live import follow
from launcher.record import failures, records
from launcher.record.progress import quality
from launcher.record.records import OVER
from launcher.runner.run import Run
from launcher.show.text import dollars, indent


def start(planned: launcher.Plan, options: argparse.Namespace) -> int:
    """Start a planned run and follow it to its end.

    Ctrl-C, SIGTERM and SIGHUP end an upload at once. While the run is created they wait, and following begins with them: the run is
    stopped, or the user asked, though it was to be detached.
    """
    planned = launcher.check(planned)
    for issue in planned.issues:
        if issue.level != "error":
            print(f"{issue.level}: {issue}", file=sys.stderr)
    if planned.price is not None:
        print(planned.price.text, flush=True)
    if planned.resumes is not None:
        print(f"resumes {planned.resumes} from its last checkpoint", flush=True)
    on_this_machine = backends.starter(planned.backend).on_this_machine
    arguments.end_like_ctrl_c(terminal=on_this_machine and not options.detach)  # jobs on SageMaker outlive the terminal
    with deferred() as came:  # what is created is known before it is stopped
        started = launcher.run(planned, detach=options.detach, max_cost=options.max_cost)
        print(f"run {started.name} on {planned.backend}: {started.folder.path}", flush=True)
        if not options.detach or came:
            return follow_to_the_end(started, options)
    print(
        f"it runs without this terminal; launcher attach {started.name} follows it, launcher stop {started.name} stops it"
    )
    return DONE


def follow_to_the_end(started: launcher.Run, options: argparse.Namespace) -> int:
    """Follow a run, then print how it ended."""
    interrupted = follow(started, every_line=options.logs, toolkits=options.all)
    state = started.state
    if state not in OVER:
        print(
            f"{started.name} goes on; launcher attach {started.name} follows it, launcher stop {started.name} stops it"
        )
        return INTERRUPTED
    print_end(started)
    if interrupted:
        return INTERRUPTED
    return DONE if state == records.COMPLETED else RUN_FAILED


def print_end(run: Run) -> None:
    """Print how a run ended, and what to do next."""
    outcome, result, remaining_costs = run.outcome(), run.result(), run.remaining_costs
    parts = [f"{run.name}: {run.state}"]
    if outcome.get("seconds") is not None:
        parts.append(f"after {outcome['seconds']:.0f} s")
    if outcome.get("stop_reason"):
        parts.append(f"({outcome['stop_reason']})")
    if run.cost is not None:
        parts.append(f"for {dollars(run.cost)}{' without the warm pool' if remaining_costs else ''}")
    if quality(result) != "-":
        parts.append(f"- {quality(result)} on held-out images")
    print(" ".join(parts))
    if remaining_costs:
        print(f"  {remaining_costs}")
    if run.state == records.FAILED:
        print_failure(outcome)
        print(f"  next: launcher logs {run.name}")
    for item in outcome.get("saved", []):
        print(f"  saved: {item}")
    for problem in outcome.get("not_saved", []):
        print(f"  not saved: {problem}")
    if run.state != records.FAILED and run.folder.model.is_file():
        print(f"  model: {run.folder.model}")


def print_failure(outcome: dict[str, Any]) -> None:
    """Print a failed run's host, exit code and failure; its traceback, cause and fix if known."""
    failure, traceback = outcome.get("failure", ""), outcome.get("traceback", "")
    if failure:
        where = f" on {outcome['failed_host']}" if outcome.get("failed_host") else ""
        code = f", {failures.how_it_ended(outcome['exit_code'])}" if outcome.get("exit_code") is not None else ""
        print(f"  failed{where}{code}:")
        parts = [failure] if failure.strip() not in traceback else []
        if traceback and traceback.splitlines()[-1] not in failure:
            parts.append(traceback)
        print(indent("\n".join(parts or [traceback]), "    "))
        if outcome.get("cause"):
            print(f"  cause: {outcome['cause']}")
        if outcome.get("fix"):
            print(f"  fix:   {outcome['fix']}")
