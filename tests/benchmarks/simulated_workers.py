"""What too many data workers cost, and what fewer gain: a small version of KT's fault, on the simulated accelerator. `make bench-workers`.

Each round trains once with each number of workers, one after the other. Medians of all rounds; a speed-up is the median of the rounds'
ratios, with their quartiles.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.show.table import Table

SCRIPT = Path(__file__).parents[2] / "notebooks/simulated_training.py"
STEP = re.compile(r"dataloader: (\S+) sec, forward: (\S+) sec, backward: (\S+) sec")
END = re.compile(r"\d+ steps in (\S+) s, device busy (\d+) %")


@dataclass(frozen=True)
class Training:
    """What one run printed; seconds."""

    whole: float
    busy: int
    """Percent."""
    waits: np.ndarray
    steps: np.ndarray


def trained(workers: int, more: Sequence[str]) -> Training:
    command = [sys.executable, str(SCRIPT), "--workers", str(workers), *more]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    phases = np.array([[float(number) for number in found] for found in STEP.findall(said)])
    [(whole, busy)] = END.findall(said)
    return Training(float(whole), int(busy), phases[:, 0], phases.sum(axis=1))


def row(workers: int, runs: Sequence[Training], most: Sequence[Training]) -> list[str]:
    """
    Args:
        most: the same rounds with the most workers.
    """
    waits, steps = np.concatenate([run.waits for run in runs]), np.concatenate([run.steps for run in runs])
    gains = [before.whole / after.whole for before, after in zip(most, runs)]
    low, high = np.percentile(gains, [25, 75])
    return [
        str(workers),
        f"{1000 * np.median(waits):.1f} ms",
        f"{1000 * np.median(steps):.0f} ms",
        f"{1000 * np.percentile(steps, 90):.0f} ms",
        f"{1000 * steps.max():.0f} ms",
        f"{statistics.median(run.busy for run in runs):.0f} %",
        f"{statistics.median(run.whole for run in runs):.1f} s",
        f"{statistics.median(gains):.2f} ({low:.2f} to {high:.2f})" if runs is not most else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[16, 8, 4, 2, 1], help="the most first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("more", nargs="*", help="options of simulated_training.py, behind --")
    options = parser.parse_args()
    runs: dict[int, list[Training]] = {workers: [] for workers in options.workers}
    for _ in range(options.rounds):
        for workers, before in runs.items():
            before.append(trained(workers, options.more))
            print(workers, before[-1].whole, flush=True)
    head = [
        "workers",
        "wait for data, median",
        "step, median",
        "90 % below",
        "longest",
        "device busy",
        "whole",
        "speed-up",
    ]
    print(Table(head, [row(workers, done, runs[options.workers[0]]) for workers, done in runs.items()]))


if __name__ == "__main__":
    main()
