"""Which preprocessing pipeline feeds a model: the study and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from launcher import backends
from launcher.config.job import Job
from launcher.show.svg import Picture
from launcher.show.table import Table
from launcher.study import (
    engine,
    preprocessing_charts,
    preprocessing_cost,
    preprocessing_tables,
    preprocessing_verdict,
)
from launcher.study.preprocessing_cells import Cell, cells
from launcher.study.preprocessing_hosts import REMOTE
from launcher.study.preprocessing_question import PreprocessingQuestion
from launcher.study.results import Study


@dataclass(repr=False)
class PreprocessingStudy(Study):
    """What the trials show. `print` it, show it in a notebook, `plot` it; `table` and `cells` are for machines.

    >>> few = ["study.loads=[1]", "study.pipelines=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, log=lambda line: None)
    >>> found.verdict.splitlines()[0]
    'resnet18, load 1: only cpu was tried; it is ...'
    >>> found.plot("trials.svg").name
    'trials.svg'
    """

    kind: ClassVar[str] = "preprocessing"

    remote: Job | None = None
    """The job with hosts that preprocess; None: the grid has no pipeline remote."""

    @property
    def cells(self) -> list[Cell]:
        """Those with at least one trial, in the grid's order."""
        return cells(self.table, self.grid.models, self.grid.pipelines, self.grid.loads)

    def tables(self) -> list[Table]:
        found = self.cells
        if not found:
            return []
        tables = preprocessing_tables.tables(found, self.grid.pipelines, self.job, on_one_machine=self._on_one_machine)
        if self._priced:
            tables.append(preprocessing_cost.table(preprocessing_cost.costs(found, self.job, self.remote)))
        return tables

    def sentences(self) -> list[str]:
        """The best pipelines and machines, and whether remote pays off. If all hosts share one machine, remote is not judged."""
        found = self.cells
        judged = [cell for cell in found if not (self._on_one_machine and cell.pipeline == REMOTE)]
        lines = preprocessing_verdict.sentences(judged, self.grid.pipelines, self.job) if judged else []
        pays = preprocessing_cost.sentences(
            found, self.job, self.remote, on_one_machine=self._on_one_machine, priced=self._priced
        )
        return [*lines, *pays]

    def charts(self) -> Picture:
        """Seconds an epoch, and how much less the other pipelines take than the first."""
        return preprocessing_charts.charts(self.cells, self.grid.pipelines, on_one_machine=self._on_one_machine)

    @property
    def compares_prices(self) -> bool:
        """Whether it says if remote pays off: only on separate hosts that cost money."""
        return self.remote is not None and self._priced and not self._on_one_machine

    @property
    def _on_one_machine(self) -> bool:
        return backends.get(self.on).hosts_share_a_machine()

    @property
    def _priced(self) -> bool:
        """Whether the hosts cost money: this machine has no price."""
        return not backends.get(self.on).on_this_machine


def preprocessing(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = "process",
    smoke: bool = False,
    table: str | Path | None = None,
    max_cost: float | None = None,
    log: Callable[[str], None] = print,
) -> PreprocessingStudy:
    """Run the trials of a config's `study` section that the table does not hold yet, and return what all of them show.

    >>> few = ["study.loads=[1]", "study.pipelines=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, log=lambda line: None)
    >>> [(cell.model, cell.pipeline, cell.load) for cell in found.cells]
    [('resnet18', 'cpu', 1)]

    Args:
        config: a YAML file whose script is train_classifier.py.
        overrides: `key=value` texts, for example study.loads=[1,12] or hyperparameters.max_steps=50.
        on: the backend.
        smoke: apply the config's `smoke` section. A machine without a GPU applies it in any case.
        table: the CSV file. None: studies/<job>-preprocessing-<backend>[-smoke].csv in the run store.
        max_cost: refuse trials that together could cost more US dollars than this, or whose price is unknown.
        log: receives a line for people at each trial.

    Raises:
        UserError: every mistake in the config, the overrides and the grid, at once; or a table of other trials.
    """
    question = PreprocessingQuestion.of(config, overrides, on, smoke)
    done = engine.run(question, table, max_cost, log)
    found = PreprocessingStudy(
        question.job, on, done.file, question.grid, done.rows, question.notes, done.failed, question.remote
    )
    if question.remote is not None and found.compares_prices:
        preprocessing_cost.read_prices(question.job, question.remote, on)
    return found
