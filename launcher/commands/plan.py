"""`launcher plan`: what a run would do."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import launcher
from launcher import backends
from launcher.backends.plans import plan_config
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, USER_ERROR
from launcher.commands.json_text import as_json
from launcher.config.issues import Issue, UserError
from launcher.config.redaction import REDACTED, mentions_a_secret
from launcher.planner.plan_text import Part, counts, in_full
from launcher.runner import labelling
from launcher.show.severity import coloured
from launcher.show.text import counted

PARTS: dict[Part, str] = {
    "files": "list the files of the source package",
    "env": "list the environment that the kit sets",
    "differences": "tell how the backend differs from SageMaker, and why",
}
"""Parts that a plan folds to one line -> what the option that opens them does."""


def add(to: arguments.Add) -> None:
    made = to(
        "plan", "show what a run would do, without doing it; of several configs, what is wrong with each", carry_out
    )
    made.usage = "launcher plan CONFIG [CONFIG.yaml …] [KEY=VALUE …] [options]"
    arguments.job(made)
    arguments.hosts(made)
    made.add_argument(
        "--strict",
        action="store_true",
        help="end with 2 where there is a warning too, as where there is an error; with --check also where AWS cannot be asked",
    )
    made.add_argument("--label", action="store_true", help="what `launcher label` would do")
    made.add_argument(
        "--check", action="store_true", help="also check with AWS, or the Docker engine with --on docker, read-only"
    )
    for part, what in PARTS.items():
        made.add_argument(f"--{part}", action="append_const", const=part, dest="opened", default=[], help=what)
    arguments.json(
        made,
        "the plan as `launcher.Plan.to_dict` gives it: {name, backend, job, hosts, files, issues, price, request, …}, its job null where "
        "the config is not valid; of several configs a list of {config, issues, plan}",
    )


def planned(options: argparse.Namespace) -> launcher.Plan:
    """Plan a command's config. Raises UserError with every mistake in it."""
    return plan_config(options.config, arguments.overrides_of(options), on=options.on, smoke=options.smoke)


def carry_out(options: argparse.Namespace) -> int:
    overrides = arguments.overrides_of(options)
    others = [word for word in overrides if word.endswith((".yaml", ".yml")) and "=" not in word]
    given = [word for word in overrides if word not in others]
    if others:
        _refuse_parts(options)
        return _each([options.config, *others], given, options)
    try:
        made = _planned(options.config, given, options)
    except UserError as error:
        if not options.json or options.debug:
            raise
        print(as_json(_without_a_plan(error.issues, options)))
        return _exit_code(error.issues, options)
    start = f"`{_starting(given, options)}`"
    print(as_json(made.to_dict()) if options.json else coloured(made.text(*options.opened, start=start), sys.stdout))
    return _exit_code(made.issues, options)


def _refuse_parts(options: argparse.Namespace) -> None:
    """Refuse --files and the like for several configs: they open a plan that is shown whole."""
    if options.opened:
        found = "several configs, of which only the mistakes are shown"
        raise UserError(
            Issue(key=f"--{part}", found=found, fix=f"name one config, or leave --{part} out")
            for part in dict.fromkeys(options.opened)
        )


def _without_a_plan(issues: Sequence[Issue], options: argparse.Namespace) -> dict[str, Any]:
    """What --json prints for an invalid config: the keys of a plan that its help promises."""
    found = [one.to_dict() for one in issues]
    return {
        **{"name": None, "backend": options.on, "job": None, "hosts": [], "files": []},
        **{"issues": found, "price": None, "request": None},
    }


def _starting(overrides: Sequence[str], options: argparse.Namespace) -> str:
    """The command that starts what was planned, without the options that only `launcher plan` has."""
    shown = [f"{one.partition('=')[0]}={REDACTED}" if mentions_a_secret(one) else one for one in overrides]
    backend = ["--on", options.on] if options.on != backends.DEFAULT else []
    smoke = ["--smoke"] if options.smoke else []
    return shlex.join(["launcher", "label" if options.label else "run", options.config, *shown, *backend, *smoke])


def _planned(config: str, overrides: list[str], options: argparse.Namespace) -> launcher.Plan:
    plan = labelling.planned if options.label else plan_config
    made = plan(config, overrides, on=options.on, smoke=options.smoke)
    if not options.check:
        return made
    made = launcher.check(made)
    if not options.strict:
        return made
    issues = (replace(one, level="error") if one.key == "online" else one for one in made.issues)  # nothing was checked
    return replace(made, issues=tuple(issues))


def _each(configs: list[str], overrides: list[str], options: argparse.Namespace) -> int:
    """Print what is wrong with each of several configs. Returns the worst exit code."""
    plans, every = [], list[Issue]()
    for config in dict.fromkeys(configs):
        made, issues = None, tuple[Issue, ...]()
        try:
            made = _planned(config, overrides, options)
            issues = made.issues
        except UserError as error:
            issues = error.issues
        every += issues
        plans.append({"config": config, "issues": [one.to_dict() for one in issues], "plan": made and made.to_dict()})
        if not options.json:
            wrong = [one for one in issues if one.level != "not checked"]
            about = [made.backend, counted(len(made.hosts), "host"), "no mistakes"] if made and not wrong else []
            about += filter(None, [counts(issues)])
            print(coloured("\n".join([f"{config}: {', '.join(about)}", *in_full(wrong)]), sys.stdout))
    if options.json:
        print(as_json(plans))
    return _exit_code(every, options)


def _exit_code(issues: Sequence[Issue], options: argparse.Namespace) -> int:
    levels = {"error", "warning"} if options.strict else {"error"}
    return USER_ERROR if any(issue.level in levels for issue in issues) else DONE
