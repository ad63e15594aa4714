"""Runs as text tables for people."""

from __future__ import annotations

from typing import Any

from launcher.record import records
from launcher.record.progress import percent, quality
from launcher.runner.replay import diff
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import dollars, indent


def print_runs(runs: list[Run]) -> None:
    """All runs, one a line."""
    rows = []
    for run in runs:
        outcome = run.outcome()
        rows.append(
            [
                run.name,
                run.state,
                run.folder.read(run.folder.plan)["backend"],
                str(len(run.hosts)),
                _seconds(outcome.get("seconds")),
                quality(run.result()),
                _cost(run, outcome),
            ]
        )
    print(Table(["run", "state", "on", "hosts", "seconds", "accuracy", "cost"], rows))
    for run in runs:
        for line in _as_last_heard(run):
            print(f"{run.name}: {line.strip()}")


def print_run(run: Run) -> None:
    """Everything about one run."""
    plan, git, outcome = run.folder.read(run.folder.plan), run.folder.read(run.folder.git), run.outcome()
    commit = (
        git["commit"][:12]
        + ("" if git["clean"] else f", {len(git['changed'])} files changed, see {run.folder.git_patch.name}")
        if git.get("commit")
        else f"not in a git repository ({git.get('reason', 'unknown')})"
    )
    lines = [
        f"run {run.name}",
        f"  state       {run.state}",
        *_as_last_heard(run),
        f"  planned     {plan['planned']}",
        f"  runs on     {plan['backend']}, {len(run.hosts)} host(s)",
        f"  script      {plan['job']['script']} from {plan['source']}",
        f"  commit      {commit}",
        f"  folder      {run.folder.path}",
    ]
    lines += [f"  channel     {name}: {place}" for name, place in plan["channels"].items()]
    lines += [f"  setting     {name}: {value}" for name, value in plan["job"].get("hyperparameters", {}).items()]
    if outcome.get("seconds") is not None:
        lines.append(f"  took        {outcome['seconds']:.1f} s, {outcome['host_seconds']:.1f} host-seconds")
    lines += _about_the_price(plan, outcome, run)
    lines += [f"  result      {name}: {value}" for name, value in run.result().items() if name != "settings"]
    lines += [f"  left        {name}: {path}" for name, path in run.artifacts().items()]
    print("\n".join(lines))
    _print_failure(outcome)


def print_end(run: Run) -> None:
    """How a run ended, and what to do next."""
    outcome, result = run.outcome(), run.result()
    parts = [f"{run.name}: {run.state}"]
    if outcome.get("seconds") is not None:
        parts.append(f"after {outcome['seconds']:.0f} s")
    if outcome.get("stop_reason"):
        parts.append(f"({outcome['stop_reason']})")
    if outcome.get("cost_usd") is not None:
        parts.append(f"for {dollars(outcome['cost_usd'])}")
    if quality(result) != "-":
        parts.append(f"- {quality(result)} on held-out images")
    print(" ".join(parts))
    if run.state == records.FAILED:
        _print_failure(outcome)
        print(f"  next: launcher logs {run.name}")
    for problem in outcome.get("not_saved", []):
        print(f"  not saved: {problem}")
    if run.state != records.FAILED and run.folder.model.is_file():
        print(f"  model: {run.folder.model}")


def print_comparison(runs: list[Run]) -> None:
    """What came out of several runs, side by side."""
    rows = []
    for run in runs:
        result = run.result()
        settings = result.get("settings", {})
        weight = settings.get("hard_label_weight")
        learnt = (
            "labels"
            if weight in (None, 1)
            else "teacher"
            if weight == 0
            else f"labels {weight:g} + teacher {1 - weight:g}"
        )
        rows.append(
            [
                run.folder.read(run.folder.plan)["job"]["name"],
                str(result.get("model", "-")),
                learnt if result else "-",
                _number(result.get("parameters"), ","),
                str(result.get("steps", "-")),
                quality(result),
                _number(result.get("images_per_second"), ".0f"),
                _seconds(run.outcome().get("seconds")),
            ]
        )
    print(Table(["job", "model", "learnt from", "parameters", "steps", "accuracy", "images/s", "seconds"], rows))
    print()
    for run in runs:
        print(f"{run.state:<10} {run.folder.path}")


def _print_failure(outcome: dict[str, Any]) -> None:
    """A failed run's host, exit code and reason; its traceback, cause and fix as far as they are known."""
    if outcome.get("failure"):
        where = f" on {outcome['failed_host']}" if outcome.get("failed_host") else ""
        code = f", exit code {outcome['exit_code']}" if outcome.get("exit_code") is not None else ""
        print(f"  failed{where}{code}:")
        print(indent(outcome["failure"], "    "))
        if outcome.get("traceback") and outcome["traceback"].strip() not in outcome["failure"]:
            print(indent(outcome["traceback"], "    "))
        if outcome.get("cause"):
            print(f"  cause: {outcome['cause']}\n  fix:   {outcome['fix']}")


def _about_the_price(plan: dict[str, Any], outcome: dict[str, Any], run: Run) -> list[str]:
    """What a run on SageMaker may cost, has cost so far, or did cost: in all, by epoch, and what spot saved."""
    if not plan.get("price"):
        return []
    lines = [f"  price       {plan['price']['text']}"]
    if not outcome and run.spend is not None:
        lines.append(f"  spent       {dollars(run.spend)} so far")
    if outcome.get("billable_seconds") is not None:
        lines.append(f"  billed      {outcome['billable_seconds']} s on each host")
    if outcome.get("cost_usd") is not None:
        epochs = max((metric["epoch"] for metric in run.metrics() if "epoch" in metric), default=0)
        each = f", {dollars(outcome['cost_usd'] / epochs)} an epoch" if epochs else ""
        lines.append(f"  cost        {dollars(outcome['cost_usd'])}{each}")
    if outcome.get("saving") is not None:
        lines.append(f"  spot        saved {percent(outcome['saving'])}")
    if outcome.get("interruptions"):
        lines.append(f"  spot        interrupted {outcome['interruptions']} times")
    return lines


def print_differences(first: Run, second: Run) -> None:
    """What two runs were not started with alike."""
    found = diff(first, second)
    if not found:
        print(f"{first.name} and {second.name} were started with the same")
        return
    rows = [[item.about, item.key, _short(item.first), _short(item.second)] for item in found]
    print(Table(["about", "what", first.name, second.name], rows))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: Any, form: str) -> str:
    """A script's number in a format; - for anything else that it may have written."""
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _as_last_heard(run: Run) -> list[str]:
    """That the far side does not answer, and from when the state is."""
    if not run.trouble:
        return []
    asked = run.folder.read(run.folder.remote).get("asked", "its start")
    return [f"  not checked {run.trouble}; this is as of {asked}"]


def _cost(run: Run, outcome: dict[str, Any]) -> str:
    """What a run on SageMaker has cost, or costs so far; - for one of this machine, or where the price is not known."""
    usd = outcome.get("cost_usd") if outcome else run.spend
    return "-" if usd is None else dollars(usd) + ("" if outcome else " so far")


def _seconds(seconds: Any) -> str:
    return _number(seconds, ".1f")
