"""A cell of the grid, its trials put together: how fast it is, how much less time than another way, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.study.measures import Spread, spread
from launcher.study.trials import Row

INPUT_BOUND, PARTLY, COMPUTE_BOUND = "input-bound", "partly input-bound", "compute-bound"

HIGHLY, MODERATELY = 0.20, 0.05
"""Shares of a step that the input side costs, from which a step is input-bound, and partly. TensorFlow's profiler draws its lines
there: kHighlyInfeedBoundThresholdInPercent and kModeratelyInfeedBoundThresholdInPercent in
tensorflow/core/profiler/convert/op_stats_to_input_pipeline_analysis.cc."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Cell:
    """One model with one way of preprocessing under one load."""

    model: str
    way: str
    load: int
    rows: tuple[Row, ...]
    """A line of the table for each repeat."""
    alone: Spread | None
    """Images a second of the model on one batch over and over; None: not measured."""

    def of(self, column: str) -> Spread | None:
        """A measure over the repeats; None where none has it."""
        return spread(row[column] for row in self.rows)

    @property
    def seconds(self) -> Spread:
        """An epoch's."""
        found = self.of("epoch_seconds")
        assert found is not None, "every trial that completed has told it"
        return found

    @property
    def rate(self) -> Spread:
        """Images a second."""
        found = self.of("images_per_second")
        assert found is not None, "every trial that completed has told it"
        return found

    @property
    def core_rate(self) -> float | None:
        """Images that one core gives a second on this way, with nothing else to do."""
        seconds = self.of("input_cpu_seconds_an_image")
        return 1 / seconds.median if seconds is not None and seconds.median > 0 else None

    @property
    def lost(self) -> float | None:
        """The share of a step's time that would be gone if the input side cost nothing; None: not measured."""
        return None if self.alone is None else max(0.0, 1 - self.rate.median / self.alone.median)

    @property
    def verdict(self) -> str:
        """What the step waits for: by the model's own speed where it was measured, otherwise by the share of data_wait."""
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


def cells(rows: Iterable[Row], models: Sequence[str], ways: Sequence[str], loads: Sequence[int]) -> list[Cell]:
    """The cells that have at least one trial, in the grid's order."""
    rows = list(rows)
    found = []
    for model in models:
        alone = spread(row["images_per_second"] for row in rows if (row["part"], row["model"]) == ("model", model))
        for load in loads:
            for way in ways:
                wanted = ("training", model, way, str(load))
                mine = tuple(row for row in rows if (row["part"], row["model"], row["way"], row["load"]) == wanted)
                if mine:
                    found.append(Cell(model, way, load, mine, alone))
    return found


def improvement(first: Cell, other: Cell) -> Spread:
    """How much less time an epoch takes the other way, in percent of the first: the median's is that of the medians, as the post
    computes it; low and high are those of the repeats, each compared with the one that ran in its turn."""
    pairs = {row["repeat"]: row for row in first.rows}
    turns = [
        saving(float(pairs[row["repeat"]]["epoch_seconds"]), float(row["epoch_seconds"]))
        for row in other.rows
        if row["repeat"] in pairs
    ]
    return Spread(tuple(turns), saving(first.seconds.median, other.seconds.median))


def saving(first: float, other: float) -> float:
    """Percent of the first that the other is less."""
    return (first - other) / first * 100
