"""`launcher tune` beside an exhaustive grid of what it may change, on slow jobs with a planted limit. `make bench-tune`.

Every cell of a job's grid is measured by a trial like tune's, in shuffled order; the best ones again. Then the job is tuned. Finally the
job as it is, tune's settings and the grid's best are measured in turns, and their medians compared: the best of many cells measured once
is partly luck. Name jobs to run only those; an interrupted call resumes where it stopped:

    .venv/bin/python tests/benchmarks/tune_grid.py slow-reads healthy
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planted_cases import photographs
from tune_grid_jobs import PLANTED, Planted, Settings

import launcher
from launcher.config.loading import load
from launcher.show.table import Table
from launcher.study import tune_course
from launcher.study.trial_table import TrialTable, held
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import Trial
from launcher.study.tune_subject import CommandSubject, JobSubject, Subject
from launcher.study.tune_trials import KEYS, MEASURED, START, Trials, whole

TRIALS = 20
"""Maximum per tuning."""

BEST, AGAIN = 3, 2
"""Cells that are measured again, and how often."""

ROUNDS = 3
"""In turns, at the end."""

ENOUGH, FEW = 0.95, 0.25
"""The targets: of the best cell's speed, and of the grid's trials."""


@dataclass
class Measured:
    """The trials of one job's grid, and the job's cost by each."""

    trials: Trials
    first: Trial
    costs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Settings as text -> seconds of the job, or of an image, of each trial."""

    def measure(self, cell: Settings) -> float:
        """Also for trials already in the table. A failed trial takes forever."""
        trial = self.trials(cell, words(cell), self.first.steps(cell))
        cost = math.inf if trial.failed else self.cost(trial)
        self.costs[str(cell)].append(cost)
        return cost

    def cost(self, trial: Trial) -> float:
        until = min(self.first.course.last, trial.course.last)
        return tune_course.costs([trial.course], until, whole(self.first)).median

    def median(self, cell: Settings) -> float:
        return statistics.median(self.costs[str(cell)])


def grid(job: Planted, trials: Trials) -> tuple[Measured, Settings]:
    """All cells, shuffled, then the best again. Returns the best one too."""
    measured = Measured(trials, trials({}, "as it is"))
    if measured.first.failed:
        raise RuntimeError(f"{job.name} as it is failed: {measured.first.failed}")
    measured.costs[str({})].append(measured.cost(measured.first))
    cells = [cell for cell in job.cells() if cell]
    random.Random(job.name).shuffle(cells)
    for cell in cells:
        measured.measure(cell)
    best = sorted([{}, *cells], key=measured.median)[:BEST]
    for _ in range(AGAIN):
        for cell in best:
            measured.measure(cell)
    return measured, min(best, key=measured.median)


def in_turns(measured: Measured, settings: Sequence[Settings]) -> dict[str, float]:
    """The median of each, over ROUNDS trials in turns, by its text. With a single one there is nothing to compare."""
    if len(settings) == 1:
        return {str(settings[0]): 1.0}
    costs: dict[str, list[float]] = {str(one): [] for one in settings}
    for number in range(ROUNDS):
        for one in settings if number % 2 == 0 else reversed(settings):
            costs[str(one)].append(measured.measure(one))
    return {text: statistics.median(each) for text, each in costs.items()}


@dataclass(frozen=True)
class Result:
    """One job's result."""

    job: Planted
    cells: int
    trials: int
    """Of the grid."""
    best: Settings
    best_gain: float
    """In the grid."""
    tuning: Tuning
    found: Settings
    reached: float
    """Speed of tune's settings over that of the grid's best."""
    gain: float
    """Speed of tune's settings over the job's as it is."""

    @property
    def share(self) -> float:
        """Tune's trials over the grid's."""
        return len(self.tuning.trials()) / self.trials

    def cells_of_the_table(self) -> list[str]:
        return [
            self.job.name,
            f"{self.cells} in {self.trials}",
            words(self.best),
            f"{self.best_gain:.2f}",
            words(self.found),
            str(len(self.tuning.trials())),
            f"{100 * self.share:.0f} %",
            f"{100 * self.reached:.0f} %",
            f"{self.gain:.2f}",
            self.tuning.search.ended,
        ]


def words(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "as it is"


def result(job: Planted, folder: Path) -> Result:
    """One job: its grid, its tuning, and both in turns."""
    command, config = job.command(folder / "data"), folder / f"{job.name}.yaml"
    subject: Subject = CommandSubject(command, f"{job.name}-grid")
    if not command:
        config.write_text(job.config(folder / "data"))
        subject = JobSubject(load(config, []), "process", job.seconds + START)
    file = folder / f"{job.name}-grid.csv"
    with held(file):
        table = TrialTable(file, KEYS, MEASURED, subject.conditions(), subject.commit)
        cells = len(list(job.cells()))
        most = cells + BEST * AGAIN + 3 * ROUNDS
        trials = Trials(subject, table, most, math.inf, job.seconds, None, None, lambda line: print(line, flush=True))
        measured, best = grid(job, trials)
        made, gain = len(trials.used), measured.median({}) / measured.median(best)
        tuning = launcher.tune(
            command or config,
            allow=job.allow,
            minutes=job.seconds * TRIALS / 60,
            trials=TRIALS,
            table=folder / f"{job.name}-tune.csv",
        )
        print(tuning, end="\n\n", flush=True)
        found = job.changes(tuning.changes)
        took = in_turns(measured, list({str(one): one for one in ({}, found, best)}.values()))
    own = took[str(found)]
    return Result(job, cells, made, best, gain, tuning, found, took[str(best)] / own, took[str({})] / own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", choices=[[], *(job.name for job in PLANTED)], help="only these")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("data/tune-grid"),
        help="of images, tables and runs; remove it to begin anew",
    )
    options = parser.parse_args()
    folder = options.folder.absolute()
    os.environ["LAUNCHER_RUNS"] = str(folder / "runs")
    if not (folder / "data").exists():
        photographs(folder / "data")
    results = [result(job, folder) for job in PLANTED if not options.jobs or job.name in options.jobs]
    head = ["job", "grid: cells in trials", "its best", "speed-up", "tune", "trials", "of the grid's", "of the best"]
    print(Table([*head, "speed-up", "ended"], [one.cells_of_the_table() for one in results]))
    print(
        f"at least {100 * ENOUGH:.0f} % of the best: {sum(one.reached >= ENOUGH for one in results)} of {len(results)}"
    )
    print(f"in at most {100 * FEW:.0f} % of the trials: {sum(one.share <= FEW for one in results)} of {len(results)}")
    print(f"slower than before: {sum(one.gain < 1 for one in results)} of {len(results)}")


if __name__ == "__main__":
    main()
