"""How far a control can correct a speed-up: one job repeated beside programs that take its cores, each run compared with each.

Nothing changed between the runs, so every true speed-up is 1. The table lists how much the control drifted, how far from 1 the measured
speed-up was, how far it is after correction by the control, and how many ranges include 1.

    .venv/bin/python tests/benchmarks/comparable_runs.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planted_bottlenecks import base, train
from planted_cases import HEAVY, Case, photographs

from launcher.insight.comparison import Comparison
from launcher.insight.control import MAX_CORRECTED
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import NOTICEABLE
from launcher.insight.measurements import read
from launcher.show.table import Table

JOBS = {
    "the model takes most": {**HEAVY, "max_steps": 24},
    "images take most": {"num_workers": 2, "augmentation_load": 4, "max_steps": 40},
}

BESIDE = ((), (0.5,), (), (1.0,), (), (1.0, 1.0), ())
"""For each run, the programs beside it, by the share of a core that each takes."""

PROGRAM = """
import time
while True:
    until = time.perf_counter() + 0.05 * {share}
    while time.perf_counter() < until:
        pass
    time.sleep(0.05 * (1 - {share}))
"""

BANDS = (1.0, 1 + NOTICEABLE, MAX_CORRECTED, 2.5, math.inf)
"""Ratio by which a control's time changed, either way."""


def run(settings: dict[str, object], shares: Sequence[float], data: Path, name: str) -> Diagnosis:
    """A run beside these programs, in a folder of that name."""
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM.format(share=share)], start_new_session=True)
        for share in shares
    ]
    case = Case(None, "", settings)
    try:
        return Diagnosis(read(str(train(case, base(case), "", data, None, name))))
    finally:
        for program in programs:
            program.kill()
            program.wait()


def compared(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Compare as if a setting with little effect had changed: `pin_memory`, which a CPU has no use for."""
    settings = {**after.measurements.settings, "pin_memory": True}
    return Comparison(before, Diagnosis(replace(after.measurements, settings=settings)))


def row(low: float, high: float, comparisons: Sequence[Comparison]) -> list[str]:
    """The pairs whose control drifted by `low` to `high`."""
    chosen = []
    for one in comparisons:
        control = one.comparability.control
        if control is not None and low <= max(control.times.value, 1 / control.times.value) < high:
            chosen.append((one.measured, control.times.value, one.speedup))
    if not chosen:
        return [f"{low:.2f} to {high:.2f}", "0", *"-" * 5]
    raw = [abs(math.log(measured.value)) for measured, _, _ in chosen]
    left = [abs(math.log(measured.value * times)) for measured, times, _ in chosen]
    reported = [speedup for *_, speedup in chosen if speedup is not None]
    held = sum(speedup.low <= 1 <= speedup.high for speedup in reported)
    figures = (statistics.median(raw), max(raw), statistics.median(left), max(left))
    shown = [f"{math.exp(figure):.2f}" for figure in figures]
    return [
        f"{low:.2f} to {high:.2f}",
        str(len(chosen)),
        *shown,
        f"{held} of {len(reported)}" if reported else "refused",
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    comparisons = []
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        photographs(data)
        for name, settings in JOBS.items():
            runs = [run(settings, shares, data, f"{name}-{number}") for number, shares in enumerate(BESIDE)]
            seconds = ", ".join(f"{one.evidence.training_seconds:.1f}" for one in runs)
            print(f"{name}: {seconds} s of training", flush=True)
            comparisons += [compared(*pair) for pair in itertools.permutations(runs, 2)]
    head = ["control drifted", "pairs", "measured off", "most", "corrected off", "most", "ranges that hold 1"]
    print(Table(head, [row(low, high, comparisons) for low, high in itertools.pairwise(BANDS)]))


if __name__ == "__main__":
    main()
