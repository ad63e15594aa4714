"""The suite's outcomes as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.gpu.outcomes import Outcome
from tests.gpu.suite import CHECKS, ITEMS, Check

MACHINE = {
    "device": "Device",
    "gpu_memory_gib": "Memory, GiB",
    "capability": "Compute capability",
    "multiprocessors": "Multiprocessors",
    "driver": "Driver",
    "cuda": "CUDA of torch",
    "cudnn": "cuDNN",
    "cpu": "CPU",
    "cores": "Cores",
    "python": "Python",
}
"""What the page calls the facts of a machine."""

LONGEST = 600
"""Characters of an error on the page; the log has all of it."""


def render(outcomes: Mapping[str, Outcome]) -> str:
    """The page: the machine, a summary, then each item of the list with its figures."""
    parts = ["# What one GPU shows", ""]
    if not outcomes:
        return "\n".join([*parts, "No check has run yet: `make gpu` runs them.", ""])
    if any(outcome.machine.get("device") == "CPU" for outcome in outcomes.values()):
        parts += ["**A rehearsal on the CPU, at toy sizes: no record of a GPU.**", ""]
    parts += _machines([*outcomes.values()])
    parts += ["## Summary", "", *_table(_summary(outcomes)), ""]
    for item, title in ITEMS.items():
        parts += [f"## {item}. {title}", ""]
        for check in CHECKS:
            if check.item == item:
                parts += _section(check, outcomes.get(check.name))
    return "\n".join(parts).rstrip() + "\n"


def _machines(outcomes: list[Outcome]) -> list[str]:
    """What is the same of all checks, once; what is not, by its values."""
    machines = [outcome.machine for outcome in outcomes]
    rows = [{"": name, "value": _values(machine.get(key) for machine in machines)} for key, name in MACHINE.items()]
    packages = sorted({name for machine in machines for name in machine["packages"]})
    rows += [{"": name, "value": _values(machine["packages"].get(name) for machine in machines)} for name in packages]
    rows.append({"": "Commit", "value": _values(machine["commit"] for machine in machines)})
    rows.append({"": "Date", "value": _values(machine["date"] for machine in machines)})
    commands = dict.fromkeys(machine["command"] for machine in machines)
    return [
        *_table([row for row in rows if row["value"]]),
        "",
        "Commands: " + ", ".join(f"`{text}`" for text in commands),
        "",
    ]


def _values(values: Iterable[Any]) -> str:
    """The different ones of some values, in their order."""
    return ", ".join(dict.fromkeys(_shown(value) for value in values if value is not None))


def _summary(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    rows = []
    for item, title in ITEMS.items():
        ended = [
            outcomes[check.name].status if check.name in outcomes else "not run"
            for check in CHECKS
            if check.item == item
        ]
        counted = ", ".join(f"{ended.count(status)} {status}" for status in dict.fromkeys(ended))
        rows.append({"#": item, "what": title, "checks": counted})
    return rows


def _section(check: Check, outcome: Outcome | None) -> list[str]:
    lines = [f"### {check.title}", ""]
    if outcome is None:
        return [*lines, f"**Not run.** `python -m tests.gpu {check.part} --only {check.name}` runs it.", ""]
    result = outcome.result
    commit, date = (outcome.machine[name] for name in ("commit", "date"))
    lines += [f"{_status(outcome)} `{check.name}`, {outcome.seconds:.0f} s, commit {commit}, {date}.", ""]
    lines += [f"- Does not hold: {problem}." for problem in result.problems]
    lines += [f"- Left out: {what}." for what in result.left_out]
    if result.problems or result.left_out:
        lines.append("")
    if result.figures:
        lines += [*_table([{"figure": name, "value": value} for name, value in result.figures.items()]), ""]
    if result.rows:
        lines += [*_table(result.rows), ""]
    return lines


def _status(outcome: Outcome) -> str:
    if outcome.status == "not checked":
        return f"**Not checked** because {_one_line(outcome.reason)}."
    if outcome.status == "error":
        return f"**Error**: {_one_line(outcome.reason)}."
    return f"**{outcome.status.capitalize()}.**"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else "… " + text[-LONGEST:]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table; numbers to the right."""
    names = [*rows[0]]
    numeric = [all(_is_number(row[name]) for row in rows) for name in names]
    rule = ["---:" if right else "---" for right in numeric]
    body = [[_shown(row[name]).replace("|", "\\|") for name in names] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (names, rule, *body)]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    """A value for people: three significant digits where it is small, whole where it is large."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split())
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 0.001 <= abs(value) < 1 else f"{value:.3g}"
