"""`launcher plan`: what a run would do."""

from __future__ import annotations

import argparse
import sys

import launcher
from launcher.backends.plans import plan_config
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, USER_ERROR
from launcher.planner.plan_text import Part
from launcher.runner import labelling
from launcher.show.severity import coloured

PARTS: dict[Part, str] = {
    "files": "list the files of the source package",
    "env": "list the environment that the kit sets",
    "differences": "tell how the backend differs from SageMaker, and why",
}
"""What a plan folds to a line each -> what the option does."""


def add(to: arguments.Add) -> None:
    made = to("plan", "show what a run would do, without doing it", carry_out)
    arguments.job(made)
    arguments.hosts(made)
    made.add_argument("--label", action="store_true", help="what `launcher label` would do")
    made.add_argument("--check", action="store_true", help="also check with AWS, by read-only requests")
    for part, what in PARTS.items():
        made.add_argument(f"--{part}", action="append_const", const=part, dest="opened", default=[], help=what)
    arguments.json(
        made,
        "the plan as `launcher.Plan.to_dict` gives it: {name, backend, job, hosts, files, issues, price, request, …}",
    )


def planned(options: argparse.Namespace) -> launcher.Plan:
    """Plan a command's config. Raises UserError with every mistake in it."""
    return plan_config(options.config, arguments.overrides_of(options), on=options.on, smoke=options.smoke)


def carry_out(options: argparse.Namespace) -> int:
    made = (
        planned(options)
        if not options.label
        else labelling.planned(options.config, arguments.overrides_of(options), on=options.on, smoke=options.smoke)
    )
    if options.check:
        made = launcher.check(made)
    print(made.to_json() if options.json else coloured(made.text(*options.opened), sys.stdout))
    return USER_ERROR if made.errors else DONE
