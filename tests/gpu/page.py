"""The suite's outcomes as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.gpu.outcomes import Outcome, Result
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

BESIDE = "Other checks ran on the same GPU meanwhile: times are longer than alone."

LONGEST_CELL = 100
"""Characters of a text in a table; a kernel's name has hundreds."""

LONGEST = 600
"""Characters of an error on the page; the log has all of it."""


def render(outcomes: Mapping[str, Outcome]) -> str:
    """The page: the machine, a summary, then each item with its figures."""
    parts = ["# What one GPU shows", ""]
    if not outcomes:
        return "\n".join([*parts, "No check has run yet: `make gpu` runs them.", ""])
    if any(outcome.machine.get("device") == "CPU" for outcome in outcomes.values()):
        parts += ["**A rehearsal on the CPU, at toy sizes: no record of a GPU.**", ""]
    parts += _machines([*outcomes.values()])
    parts += ["## Summary", "", *_table(_summary(outcomes)), ""]
    for item, title in ITEMS.items():
        parts += [f"## {item}. {title}", ""]
        checks = [check for check in CHECKS if check.item == item]
        ran = {check: outcomes[check.name] for check in checks if check.name in outcomes}
        for check, outcome in ran.items():
            if not check.table:
                parts += [f"### {check.title}", "", *_about(check, outcome), ""]
                parts += _found([outcome.result], check.only_problems)
        for table in dict.fromkeys(check.table for check in ran if check.table):
            sharing = {check: outcome for check, outcome in ran.items() if check.table == table}
            parts += [f"### {table}", ""]
            for check, outcome in sharing.items():
                first, *problems = _about(check, outcome)
                parts += [f"- {check.title}. {first}", *(f"  {problem}" for problem in problems if problem)]
            parts += ["", *_found([outcome.result for outcome in sharing.values()])]
        parts += _not_run([check for check in checks if check not in ran])
    return "\n".join(parts).rstrip() + "\n"


def _machines(outcomes: list[Outcome]) -> list[str]:
    """What all checks share, once; what differs, by its values."""
    machines = [outcome.machine for outcome in outcomes]
    rows = [{"": name, "value": _values(machine.get(key) for machine in machines)} for key, name in MACHINE.items()]
    packages = sorted({name for machine in machines for name in machine["packages"]})
    versions = {name: _values(machine["packages"].get(name) for machine in machines) for name in packages}
    rows.append({"": "Commit", "value": _values(machine["commit"] for machine in machines)})
    days = sorted({machine["date"].partition(" ")[0] for machine in machines})
    rows.append({"": "Date", "value": ", ".join(days)})
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        *_table([row for row in rows if row["value"]]),
        "",
        f"With {said}. `make gpu` makes this page; each check names the command that repeats it.",
        "",
    ]


def _values(values: Iterable[Any]) -> str:
    """The distinct values, in their order."""
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


def _about(check: Check, outcome: Outcome) -> list[str]:
    """How a check ended, by which command, and what failed or was left out."""
    result, machine = outcome.result, outcome.machine
    command = f"python -m tests.gpu {check.part} --only {check.name}"
    beside = f" {BESIDE}" if machine["beside"] else ""
    lines = [
        f"{_status(outcome)} `{command}`, {outcome.seconds:.0f} s, commit {machine['commit']}, {machine['date']}.{beside}"
    ]
    lines += [""] if result.problems or result.left_out else []
    lines += [f"- Does not hold: {problem}." for problem in result.problems]
    return lines + [f"- Left out: {what}." for what in result.left_out]


def _found(results: list[Result], only_problems: bool = False) -> list[str]:
    """Figures and rows of one check, or of several with the same columns."""
    figures = {name: value for result in results for name, value in result.figures.items()}
    rows = [row for result in results for row in result.rows if not only_problems or row["problem"]]
    lines = [*_table([{"figure": name, "value": value} for name, value in figures.items()]), ""] if figures else []
    return [*lines, *_table(rows), ""] if rows else lines


def _not_run(checks: list[Check]) -> list[str]:
    """What is still to be run, by the command that runs it."""
    lines = [f"- {check.title}: `python -m tests.gpu {check.part} --only {check.name}`" for check in checks]
    return ["**Not run:**", "", *lines, ""] if lines else []


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
    """A Markdown table; numbers right-aligned."""
    names = [*rows[0]]
    numeric = [all(_is_number(row[name]) for row in rows) for name in names]
    rule = ["---:" if right else "---" for right in numeric]
    body = [[_cell(row[name]) for name in names] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (names, rule, *body)]


def _cell(value: Any) -> str:
    text = _shown(value)
    short = text if len(text) <= LONGEST_CELL or not isinstance(value, str) else f"{text[:LONGEST_CELL]} …"
    return short.replace("|", "\\|")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    """A value for people: three significant digits if small, whole if large."""
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
