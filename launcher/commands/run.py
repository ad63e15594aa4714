"""`launcher run`: plan a job and run it, or resume its unfinished run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import launcher
from launcher import backends
from launcher.commands import foreground, plan
from launcher.commands import options as arguments
from launcher.runner.unfinished import unfinished


def add(to: arguments.Add) -> None:
    made = to("run", "run a job, with a progress line", carry_out)
    arguments.job(made)
    arguments.hosts(made)
    arguments.start(made)
    made.add_argument(
        "--resume",
        choices=["auto", "never"],
        metavar="auto|never",
        help="auto: resume the unfinished run of the same job and code, if there is one; never: do not look for one "
        "(default: name it, and ask in a terminal)",
    )


def carry_out(options: argparse.Namespace) -> int:
    planned = plan.planned(options)
    if options.resume == "auto":
        planned = launcher.resume_unfinished(planned)
    elif options.resume is None:
        planned = offered(planned)
    return foreground.start(planned, options)


def offered(planned: launcher.Plan) -> launcher.Plan:
    """The plan, made to resume if there is an unfinished run of the same job and code and the user wants it."""
    earlier = unfinished(planned)
    if earlier is None:
        return planned
    found = f"{earlier.name}, of the same job and code, is {earlier.state} and can be resumed"
    shared = backends.get(planned.backend).shared_checkpoints(planned.job)
    if shared:
        arguments.note(f"{found}: the new job continues from {shared}; another `checkpoints` starts from the beginning")
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        arguments.note(
            f"{found}: launcher resume {earlier.name}, or this command with --resume auto. This is a new run"
        )
        return planned
    elif not _answer(f"{found}. Resume it, or start a new run? [r/N] ").startswith("r"):
        return planned
    return replace(planned, resumes=earlier.name)


def _answer(question: str) -> str:
    """The answer in lower case. Raises KeyboardInterrupt at Ctrl-D: no answer means neither."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        raise KeyboardInterrupt from None
