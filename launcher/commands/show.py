"""`launcher show`: everything about one run."""

from __future__ import annotations

import argparse
from typing import Any

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.foreground import print_failure
from launcher.commands.runs import as_last_heard
from launcher.record.progress import percent
from launcher.runner.run import Run
from launcher.show.text import counted, dollars, number


def add(to: arguments.Add) -> None:
    arguments.run(to("show", "show everything about one run", carry_out))


def carry_out(options: argparse.Namespace) -> int:
    print_run(launcher.attach(options.run))
    return DONE


def print_run(run: Run) -> None:
    """Print everything about one run."""
    plan, git, outcome = run.folder.read(run.folder.plan), run.folder.read(run.folder.git), run.outcome()
    commit = (
        git["commit"][:12]
        + (
            ""
            if git.get("clean")
            else f", {counted(len(git.get('changed', [])), 'changed file')}, see {run.folder.git_patch.name}"
        )
        if git.get("commit")
        else f"not in a git repository ({git.get('reason', 'unknown')})"
    )
    lines = [
        f"run {run.name}",
        f"  state       {run.state}",
        *as_last_heard(run),
        f"  planned     {plan['planned']}",
        f"  runs on     {plan['backend']}, {counted(len(run.hosts), 'host')}",
        f"  script      {plan['job'].get('script', 'not recorded')} from {plan.get('source', 'not recorded')}",
        f"  commit      {commit}",
        *(
            f"  left out    {path} of {run.folder.git_patch.name}: {why}"
            for path, why in git.get("left_out", {}).items()
        ),
        f"  folder      {run.folder.path}",
    ]
    lines += [f"  channel     {name}: {place}" for name, place in plan.get("channels", {}).items()]
    lines += [f"  setting     {name}: {value}" for name, value in plan["job"].get("hyperparameters", {}).items()]
    if outcome.get("seconds") is not None:
        lines.append(
            f"  took        {outcome['seconds']:.1f} s, {number(outcome.get('host_seconds'), '.1f')} host-seconds"
        )
    lines += _about_the_price(plan, outcome, run)
    lines += [f"  result      {name}: {value}" for name, value in run.result().items() if name != "settings"]
    lines += [f"  file        {name}: {path}" for name, path in run.artifacts().items()]
    print("\n".join(lines))
    print_failure(outcome)


def _about_the_price(plan: dict[str, Any], outcome: dict[str, Any], run: Run) -> list[str]:
    """The price of a run on SageMaker: its ceiling, its cost so far or in all, by epoch, and what spot saved."""
    if not plan.get("price"):
        return []
    lines = [f"  price       {plan['price'].get('text', 'not recorded')}"]
    if not outcome and run.spend is not None:
        lines.append(f"  spent       {dollars(run.spend)} so far")
    if outcome.get("billable_seconds") is not None:
        lines.append(f"  billed      {outcome['billable_seconds']} s on each host")
    if outcome.get("cost_usd") is not None:
        epochs = [
            one["epoch"] for one in run.metrics() if isinstance(one.get("epoch"), int) and 0 < one["epoch"] < 2**53
        ]
        each = f", {dollars(outcome['cost_usd'] / max(epochs))} an epoch" if epochs else ""
        lines.append(f"  cost        {dollars(outcome['cost_usd'])}{each}")
    if outcome.get("saving") is not None:
        lines.append(f"  spot        saved {percent(outcome['saving'])}")
    if outcome.get("interruptions"):
        lines.append(f"  spot        interrupted {counted(outcome['interruptions'], 'time')}")
    return lines
