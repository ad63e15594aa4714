"""`launcher compare`: the results of several runs, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.json_text import as_json
from launcher.config import students
from launcher.insight.diagnose import speed
from launcher.record.progress import percent, quality
from launcher.runner.run import Run
from launcher.show.table import Table
from launcher.show.text import number


def add(to: arguments.Add) -> None:
    made = to("compare", "compare the results of several runs side by side", carry_out)
    made.add_argument("runs", metavar="RUN", nargs="+", help="a run's name, or a job's name for its latest run")
    arguments.json(made, "a list of {name, job, state, folder, seconds, result, speed}")


def carry_out(options: argparse.Namespace) -> int:
    chosen = [launcher.attach(name) for name in options.runs]
    if options.json:
        print(as_json([_described(run) for run in chosen]))
    else:
        print_comparison(chosen)
    return DONE


def _described(run: Run) -> dict[str, Any]:
    """A run's results, JSON-ready."""
    seen = speed(run.folder)
    return {
        "name": run.name,
        "job": run.folder.read(run.folder.plan)["job"]["name"],
        "state": run.state,
        "folder": str(run.folder.path),
        "seconds": run.outcome().get("seconds"),
        "result": run.result(),
        "speed": None if seen is None else vars(seen),
    }


def print_comparison(runs: list[Run]) -> None:
    """Print the results of several runs side by side."""
    rows = []
    for run in runs:
        result, seen = run.result(), speed(run.folder)
        of_steps = {} if seen is None else {name: value for name, value in vars(seen).items() if value is not None}
        job, settings = run.folder.read(run.folder.plan)["job"]["name"], result.get("settings", {})
        overrides = students.results(settings)
        for student, of_one in (students.results(result) or {"": {}}).items():
            measured = {**of_steps, **result, **of_one}
            rows.append(
                [
                    f"{job}/{student}" if student else job,
                    str(measured.get("model", "-")),
                    learned_from({**settings, **overrides.get(student, {})}) if result else "-",
                    number(measured.get("parameters"), ","),
                    str(measured.get("steps", "-")),
                    quality(of_one or result),
                    number(measured.get("step_seconds"), ".3g"),
                    number(measured.get("images_per_second"), ".0f"),
                    percent(result.get("mfu")),
                    number(run.outcome().get("seconds"), ".1f"),
                ]
            )
    results = ["job", "model", "learned from", "parameters", "steps", "accuracy"]
    print(Table([*results, "s/step", "images/s", "MFU", "seconds"], rows).without_empty("MFU"))
    print()
    for run in runs:
        print(f"{run.state:<10} {run.folder.path}")


def learned_from(settings: Mapping[str, Any]) -> str:
    """The parts of a run's loss, with weights if there are several."""
    labels, teacher = settings.get("hard_label_weight"), settings.get("teacher_loss_weight")
    if not isinstance(labels, (int, float)):
        return "labels"
    features = settings.get("features")  # any script may mean something else by the word
    weight = features.get("weight", 0) if isinstance(features, Mapping) else 0
    parts = {"labels": labels, "teacher": 1 - labels if teacher is None else teacher, "features": weight}
    weights = {name: weight for name, weight in parts.items() if weight}
    return " + ".join(
        name if len(weights) == 1 else f"{name} {number(weight, 'g')}" for name, weight in weights.items()
    )
