"""A cell of the grid with all of its trials: how fast it is, how much time it saves compared with another, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.show.spread import Spread, spread
from launcher.study.preprocessing_hosts import REMOTE
from launcher.study.results import NOT_MEASURED
from launcher.study.trial_table import Repeats, Row

INPUT_BOUND, PARTLY, COMPUTE_BOUND = "input-bound", "partly input-bound", "compute-bound"

HIGHLY, MODERATELY = 0.20, 0.05
"""Shares of a step lost to input from which a step is input-bound, and partly so: the thresholds of TensorFlow's
profiler, kHighlyInfeedBoundThresholdInPercent and kModeratelyInfeedBoundThresholdInPercent in
tensorflow/core/profiler/convert/op_stats_to_input_pipeline_analysis.cc."""


@dataclass(frozen=True)
class Cell(Repeats):
    """One model with one preprocessing pipeline under one augmentation load."""

    model: str
    pipeline: str
    load: int
    rows: tuple[Row, ...]
    """A row of the table for each repeat."""
    alone: Spread | None
    """Images a second of the model alone, on one repeated batch; None: not measured."""

    @property
    def seconds(self) -> Spread:
        """Seconds per epoch."""
        found = self.of("epoch_seconds")
        assert found is not None, "every completed trial has it"
        return found

    @property
    def core_rate(self) -> float | None:
        """Images a second that one core prepares with this pipeline, with nothing else to do."""
        seconds = self.of("input_cpu_seconds_per_image")
        return 1 / seconds.median if seconds is not None and seconds.median > 0 else None

    @property
    def lost(self) -> float | None:
        """The share of a step's time that would vanish if input cost nothing; None: not measured."""
        return None if self.alone is None else max(0.0, 1 - self.rate.median / self.alone.median)

    @property
    def verdict(self) -> str:
        """What limits the step, judged by the speed of the model alone if measured, else by the share of data_wait."""
        waits = self.of("data_wait_share")
        share = self.lost if self.lost is not None else waits.median if waits is not None else None
        if share is None:
            return NOT_MEASURED
        return INPUT_BOUND if share >= HIGHLY else PARTLY if share >= MODERATELY else COMPUTE_BOUND

    @property
    def gpu_memory_left(self) -> float | None:
        """GiB; None without a GPU."""
        there, used = self.of("gpu_memory_gib"), self.of("gpu_used_gib")
        return there.low - used.high if there is not None and used is not None else None


def cells(rows: Iterable[Row], models: Sequence[str], pipelines: Sequence[str], loads: Sequence[int]) -> list[Cell]:
    """The cells that have at least one trial, in the grid's order."""
    rows = list(rows)
    found = []
    for model in models:
        alone = spread(row["images_per_second"] for row in rows if (row["part"], row["model"]) == ("model", model))
        for load in loads:
            for pipeline in pipelines:
                wanted = ("training", model, pipeline, str(load))
                mine = tuple(row for row in rows if (row["part"], row["model"], row["pipeline"], row["load"]) == wanted)
                if mine:
                    found.append(Cell(model, pipeline, load, mine, alone))
    return found


def improvement(first: Cell, other: Cell) -> Spread:
    """How much less time an epoch takes in the other cell, in percent of the first. The median is computed from both medians, as the
    DALI post does; low and high come from the repeats, each compared with the first cell's same repeat."""
    pairs = {row["repeat"]: row for row in first.rows}
    turns = [
        saving(float(pairs[row["repeat"]]["epoch_seconds"]), float(row["epoch_seconds"]))
        for row in other.rows
        if row["repeat"] in pairs
    ]
    return Spread(tuple(turns), saving(first.seconds.median, other.seconds.median))


def saving(first: float, other: float) -> float:
    """How much less the other is, in percent of the first."""
    return (first - other) / first * 100


def places(cells: Sequence[Cell]) -> list[tuple[str, int]]:
    """(model, load) of the cells, in their order."""
    return list(dict.fromkeys((cell.model, cell.load) for cell in cells))


def tried(cells: Sequence[Cell], pipelines: Sequence[str]) -> list[str]:
    """The pipelines that have a cell, in the grid's order."""
    return [name for name in pipelines if any(cell.pipeline == name for cell in cells)]


def heaviest(cells: Sequence[Cell], pipelines: Sequence[str]) -> tuple[int, dict[str, float]]:
    """The heaviest load, and the images a second that a core prepares under it, by pipeline. dali is left out if it had no GPU to
    work on, and remote, whose images the cores of other hosts prepare."""
    load, on_a_gpu = max(cell.load for cell in cells), any(row["gpu"] for cell in cells for row in cell.rows)
    names = [name for name in pipelines if name != REMOTE and (name != "dali" or on_a_gpu)]
    return load, {name: rate for name in names if (rate := core_rate(cells, name, load)) is not None}


def core_rate(cells: Sequence[Cell], pipeline: str, load: int) -> float | None:
    """Images a second that a core prepares: the median over the models, since it does not depend on them."""
    rates = [cell.core_rate for cell in cells if (cell.load, cell.pipeline) == (load, pipeline) and cell.core_rate]
    return median(rates) if rates else None
