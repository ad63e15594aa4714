"""`launcher show`: everything about one run."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

import launcher
from launcher import backends
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.foreground import print_failure
from launcher.commands.json_text import as_json
from launcher.commands.runs import as_last_heard
from launcher.config import students
from launcher.record import records, removal
from launcher.record.log_lines import last_lines
from launcher.record.metric_lines import GOES_ON, parse_line
from launcher.record.progress import RunProgress, percent
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import counted, dollars, duration, file_size, indent, number, shown, written

MAX_EPOCHS = 10**9
"""A larger number of an epoch is a damaged metric line's."""


def add(to: arguments.Add) -> None:
    made = to("show", "show everything about one run", carry_out)
    arguments.run(made)
    arguments.json(
        made,
        "{name, state, plan, git, outcome, spent_usd, result, artifacts}; `plan` as `launcher plan --json` prints it",
    )


def carry_out(options: argparse.Namespace) -> int:
    run = launcher.attach(options.run)
    run.refresh()
    run.settle()
    if options.json:
        print(as_json(_described(run)))
    else:
        print_run(run)
    return DONE


def _described(run: Run) -> dict[str, Any]:
    """Everything about a run, JSON-ready."""
    return {
        "name": run.name,
        "state": run.state,
        "plan": run.folder.read(run.folder.plan),
        "git": run.folder.read(run.folder.git),
        "outcome": run.outcome(),
        "spent_usd": run.cost,
        "result": run.result(),
        "artifacts": {name: str(path) for name, path in run.artifacts().items()},
    }


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
        else _without_commit(git.get("reason", "not recorded"))
    )
    lines = [
        f"run {run.name}",
        f"  state       {run.state}{f' ({reason})' if (reason := outcome.get('stop_reason')) else ''}",
        *_progress(run),
        *as_last_heard(run),
        f"  planned     {str(plan['planned'])[:16].replace('T', ' ')} UTC",
        f"  runs on     {plan['backend']}, {counted(len(run.hosts), 'host')}",
        *_about_the_script(plan),
        f"  commit      {commit}",
        *(
            f"  left out    {path} of {run.folder.git_patch.name}: {why}"
            for path, why in git.get("left_out", {}).items()
        ),
        f"  folder      {run.folder.path}, {file_size(removal.size(run.folder))}",
    ]
    lines += [f"  channel     {name}: {place}" for name, place in plan.get("channels", {}).items()]
    lines += [
        f"  setting     {name}: {written(value)}" for name, value in plan["job"].get("hyperparameters", {}).items()
    ]
    lines += _about_the_time(outcome)
    lines += _about_the_price(plan, outcome, run)
    lines += [f"  warm pool   {run.remaining_costs}"] if run.remaining_costs else []
    result = run.result()
    each = students.results(result)
    shared = {name: value for name, value in result.items() if name != "settings" and not (name == "students" and each)}
    lines += [f"  result      {name.replace('_', ' ')}: {shown(name, value)}" for name, value in shared.items()]
    lines += [indent(str(_students(each)))] if each else []
    lines += [f"  file        {name}: {_near(path)}" for name, path in run.artifacts().items()]
    lines += [f"  next        {command}" for command in next_commands(run)]
    print("\n".join(lines))
    if run.state == records.FAILED:
        print_failure(outcome)


def _without_commit(reason: str) -> str:
    """Why a run has no commit."""
    return "none (not in a git repository)" if "not a git repository" in reason else f"not known: {reason}"


def _students(each: dict[str, dict[str, Any]]) -> Table:
    """A row for each student of a result, and a column for everything that it says about them."""
    names = list(dict.fromkeys(name for own in each.values() for name in own))
    rows = [[student, *(_cell(own.get(name)) for name in names)] for student, own in each.items()]
    return Table(["student", *(name.removeprefix("validation_") for name in names)], rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value, ".4f")
    return "-" if value is None else str(value)


def _about_the_time(outcome: dict[str, Any]) -> list[str]:
    seconds, of_hosts = outcome.get("seconds"), outcome.get("host_seconds")
    if not isinstance(seconds, (int, float)):
        return []
    of_all = (
        f", {duration(of_hosts)} of all hosts together"
        if isinstance(of_hosts, (int, float)) and of_hosts > seconds
        else ""
    )
    return [f"  took        {duration(seconds)}{of_all}"]


def _near(path: Path) -> str:
    """A path, relative to the current folder if below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def next_commands(run: Run) -> list[str]:
    """The commands that help most with a run in its state."""
    plan = run.folder.read(run.folder.plan)
    if run.state not in records.OVER:
        return [f"launcher logs {run.name} --follow", f"launcher stop {run.name}"]
    if run.state == "Completed":
        return [f"launcher diagnose {run.name}"]
    again = []
    if plan["job"].get("script") and plan["backend"] != "watch":
        why_not = backends.get(plan["backend"]).why_not_resumed(plan["job"], run.folder)
        again = [f"launcher {'resume' if why_not is None else 'replay'} {run.name}"]
    return [f"launcher logs {run.name}", *again]


def _about_the_script(plan: dict[str, Any]) -> list[str]:
    """The script, or the command of a run without a config."""
    source, command = plan.get("source", "not recorded"), plan["hosts"][0].get("command", [])
    if "script" not in plan["job"] and command:
        return [f"  command     {shlex.join(command)}", f"  in          {source}"]
    return [f"  script      {plan['job'].get('script', 'not recorded')} from {source}"]


def _progress(run: Run) -> list[str]:
    """How far a run that goes on has come, if known."""
    log = run.folder.log(run.hosts[0])
    if run.state in records.OVER or not log.exists():
        return []
    progress, now = RunProgress(run.folder), time.monotonic()
    for line in last_lines(log):
        progress.read_line(line, now)
    progress.read_observed(now)
    text = progress.line(progress.seconds_left(now))
    return [f"  progress    {text}"] if text else []


def _about_the_price(plan: dict[str, Any], outcome: dict[str, Any], run: Run) -> list[str]:
    """The price of a run on SageMaker: its ceiling, its cost so far or in all, by epoch, and what spot saved."""
    if not plan.get("price"):
        return []
    lines = [f"  price       {plan['price'].get('text', 'not recorded')}"]
    if not outcome and run.spent:
        lines.append(f"  spent       {run.spent}")
    if outcome.get("billable_seconds") is not None:
        lines.append(f"  billed      {outcome['billable_seconds']} s on each host")
    if outcome.get("cost_usd") is not None:
        whole = outcome["state"] == records.COMPLETED and not plan.get("hyperparameters", {}).get("max_steps")
        epochs = _epochs(plan, run) if whole else 0
        each = f", {dollars(outcome['cost_usd'] / epochs)} an epoch" if epochs else ""
        lines.append(f"  cost        {dollars(outcome['cost_usd'])}{each}")
    if outcome.get("warm_pool_usd"):
        lines.append(f"  warm pool   cost {dollars(outcome['warm_pool_usd'])} besides")
    if outcome.get("saving") is not None:
        lines.append(f"  spot        saved {percent(outcome['saving'])}")
    if outcome.get("interruptions"):
        lines.append(f"  spot        interrupted {counted(outcome['interruptions'], 'time')}")
    return lines


def _epochs(plan: dict[str, Any], run: Run) -> int:
    """Epochs that a completed run trained; 0: not known. An epoch shorter than a window of logged steps may have no metric line."""
    found = [epoch for one in run.metrics() if isinstance(epoch := one.get("epoch"), int) and 0 < epoch <= MAX_EPOCHS]
    return max(0, max(found) - _first_epoch(plan, run, min(found)) + 1) if found else 0


def _first_epoch(plan: dict[str, Any], run: Run, of_metrics: int) -> int:
    """The first epoch that was paid for: 1, or of a resumed run that of its first metric line. After an interruption the log begins
    with the first attempt, `metrics.jsonl` with the last one.

    Args:
        of_metrics: of `metrics.jsonl`, for a log without metric lines.
    """
    resumed = bool(plan.get("resumes"))
    for host, line in run.logs():
        if host == run.hosts[0] and GOES_ON.match(line):
            resumed = True
        elif host == run.hosts[0] and (metric := parse_line(line)) is not None:
            return max(metric.epoch, 1) if resumed else 1
    return of_metrics if resumed else 1
