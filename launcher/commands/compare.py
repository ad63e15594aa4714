"""`launcher compare`: the results of several runs, side by side."""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.record.progress import quality
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import number


def add(to: arguments.Add) -> None:
    to("compare", "compare the results of several runs side by side", carry_out).add_argument(
        "runs", metavar="RUN", nargs="+"
    )


def carry_out(options: argparse.Namespace) -> int:
    print_comparison([launcher.attach(name) for name in options.runs])
    return DONE


def print_comparison(runs: list[Run]) -> None:
    """Print the results of several runs side by side."""
    rows = []
    for run in runs:
        result = run.result()
        settings = result.get("settings", {})
        weight = settings.get("hard_label_weight")
        learned = (
            "labels"
            if weight == 1 or not isinstance(weight, (int, float))
            else "teacher"
            if weight == 0
            else f"labels {number(weight, 'g')} + teacher {number(1 - weight, 'g')}"
        )
        rows.append(
            [
                run.folder.read(run.folder.plan)["job"]["name"],
                str(result.get("model", "-")),
                learned if result else "-",
                number(result.get("parameters"), ","),
                str(result.get("steps", "-")),
                quality(result),
                number(result.get("images_per_second"), ".0f"),
                number(run.outcome().get("seconds"), ".1f"),
            ]
        )
    print(Table(["job", "model", "learned from", "parameters", "steps", "accuracy", "images/s", "seconds"], rows))
    print()
    for run in runs:
        print(f"{run.state:<10} {run.folder.path}")
