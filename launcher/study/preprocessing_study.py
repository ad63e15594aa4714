"""Which preprocessing pipeline feeds a model: the study and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from launcher.show.table import Table
from launcher.study import engine, preprocessing_charts, preprocessing_tables, preprocessing_verdict
from launcher.study.preprocessing_cells import Cell, cells
from launcher.study.preprocessing_question import PreprocessingQuestion
from launcher.study.results import Study


class PreprocessingStudy(Study):
    """What the trials say. `print` it, show it in a notebook, `plot` it; `table` and `cells` are for machines.

    >>> few = ["study.loads=[1]", "study.pipelines=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, say=lambda line: None)
    >>> found.verdict.splitlines()[0]
    'resnet18, load 1: only cpu was tried; it is ...'
    >>> found.plot("trials.svg").name
    'trials.svg'
    """

    kind: ClassVar[str] = "preprocessing"

    @property
    def cells(self) -> list[Cell]:
        """Those with at least one trial, in the grid's order."""
        return cells(self.table, self.grid.models, self.grid.pipelines, self.grid.loads)

    def tables(self) -> list[Table]:
        found = self.cells
        return preprocessing_tables.tables(found, self.grid.pipelines, self.job) if found else []

    def sentences(self) -> list[str]:
        return preprocessing_verdict.sentences(self.cells, self.grid.pipelines, self.job)

    def charts(self) -> str:
        """Seconds an epoch, and how much less the other pipelines take than the first."""
        return preprocessing_charts.charts(self.cells, self.grid.pipelines)


def preprocessing(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = "process",
    smoke: bool = False,
    table: str | Path | None = None,
    max_cost: float | None = None,
    say: Callable[[str], None] = print,
) -> PreprocessingStudy:
    """Run the trials of a config's `study` section that the table does not hold yet, and return what all of them say.

    >>> few = ["study.loads=[1]", "study.pipelines=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, say=lambda line: None)
    >>> [(cell.model, cell.pipeline, cell.load) for cell in found.cells]
    [('resnet18', 'cpu', 1)]

    Args:
        config: a YAML file whose script is train_classifier.py.
        overrides: `key=value` texts, for example study.loads=[1,12] or hyperparameters.max_steps=50.
        on: the backend.
        smoke: apply the config's `smoke` section. A machine without a GPU applies it in any case.
        table: the CSV file. None: studies/<job>-preprocessing-<backend>[-smoke].csv among the runs.
        max_cost: refuse trials that could cost more US dollars than this together, or whose price is not known.
        say: takes a line for people at each trial.

    Raises:
        UserError: every mistake in the config, the overrides and the grid, at once; or a table of other trials.
    """
    question = PreprocessingQuestion.of(config, overrides, on, smoke)
    done = engine.run(question, table, max_cost, say)
    return PreprocessingStudy(question.job, on, done.file, question.grid, done.rows, question.notes, done.failed)
