"""How a job scales: the study and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from launcher import backends
from launcher.aws import prices
from launcher.config.job import Job
from launcher.show.svg import Picture
from launcher.show.table import Table
from launcher.study import engine, scaling_charts, scaling_model, scaling_sizes, scaling_tables, scaling_verdict
from launcher.study.results import Study
from launcher.study.scaling_advice import Offer, offers
from launcher.study.scaling_model import HeldOut, Point, ScalingModel
from launcher.study.scaling_question import ScalingQuestion
from launcher.study.scaling_sizes import Line, Size


@dataclass(repr=False)
class ScalingStudy(Study):
    """What the trials show. `print` it, show it in a notebook, `plot` it; `table`, `lines`, `model` and `held_out` are for machines:
    `found.model.step(hosts=4, batch=8).seconds` predicts a size that was not run.

    >>> few = ["study.hosts=[1]", "study.batches=[4]", "study.mode=weak", "study.repeats=1", "study.steps=5"]
    >>> found = launcher.study.scaling("configs/hyundai_segmentation.yaml", few, smoke=True, log=lambda line: None)
    >>> found.plot("scaling.svg").name
    'scaling.svg'
    """

    kind: ClassVar[str] = "scaling"

    cores: int | None = None
    """Cores of the one machine that all hosts share; None: each has its own machine or GPUs."""
    planned: int = 1
    """Training processes per host, as planned."""

    @property
    def sizes(self) -> list[Size]:
        """By hosts and global batch."""
        return scaling_sizes.sizes(self.table, self.cores)

    @property
    def lines(self) -> list[Line]:
        """A weak-scaling line for each batch per process, then the strong-scaling line; only those the mode asks for."""
        batches = [] if self.grid.mode == "strong" else self.grid.batches
        whole = None if self.grid.mode == "weak" else self.job.hyperparameters["global_batch_size"]
        return scaling_sizes.lines(self.sizes, batches, self.planned, whole)

    @cached_property
    def model(self) -> ScalingModel | None:
        """Fitted to the sizes whose hosts share no cores; None if there are none."""
        points = self._points
        return scaling_model.fit(points, self.gradient_bytes) if points else None

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """Each measured size, predicted by a model that was fitted to the others."""
        return scaling_model.held_out(self._points, self.gradient_bytes)

    @cached_property
    def hosts_held_out(self) -> list[HeldOut]:
        """The same, by a model that saw no size with this number of hosts; empty with fewer than three host counts."""
        return scaling_model.hosts_held_out(self._points, self.gradient_bytes)

    @property
    def gradient_bytes(self) -> float:
        """Bytes that a process exchanges in each step."""
        return float(self.table[0]["gradient_bytes"])

    @property
    def usd_per_hour(self) -> float | None:
        """US dollars an hour for one host; None: no price known."""
        return host_price(self.job, self.on)

    def offers(self, line: Line) -> list[Offer]:
        """The whole training's time and cost on each number of hosts; empty if its images or epochs are unknown."""
        size, epochs = line.sizes[0], self.job.hyperparameters.get("epochs")
        images = (size.images or 0) * (epochs if isinstance(epochs, int) else 0)
        return offers(line, self.model, line.processes_per_host, images, self.usd_per_hour) if images else []

    def tables(self) -> list[Table]:
        if not self.table:
            return []
        own_price = "; this machine has no list price" if backends.get(self.on).on_this_machine else ""
        return [
            scaling_tables.measured(self.lines, self.usd_per_hour, own_price),
            scaling_tables.errors(self.model, self.held_out, self.hosts_held_out),
            scaling_tables.predictions(self.lines, self.model),
        ]

    def sentences(self) -> list[str]:
        lines, errors = self.lines, [*self.held_out, *self.hosts_held_out]
        offers = [(line, self.offers(line)) for line in lines]
        return [
            *scaling_verdict.scaling(lines, self.model),
            *scaling_verdict.repeats(lines),
            *scaling_verdict.errors(errors),
            *scaling_verdict.hosts_to_take(offers, self.grid, self.job),
            *scaling_verdict.caveats(lines),
        ]

    def charts(self) -> Picture:
        """Images a second beside the ideal line, and efficiency."""
        return scaling_charts.charts(self.lines, self.model)

    @property
    def _points(self) -> list[Point]:
        there = {(size.hosts, size.global_batch) for line in self.lines for size in line.clean}
        one_machine = backends.get(self.on).hosts_share_a_machine()
        return [size.point(one_machine) for size in self.sizes if (size.hosts, size.global_batch) in there]


def scaling(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = "process",
    smoke: bool = False,
    table: str | Path | None = None,
    max_cost: float | None = None,
    log: Callable[[str], None] = print,
) -> ScalingStudy:
    """Run the trials of a config's `study` section that the table does not hold yet, and return what all of them show.

    >>> few = ["study.hosts=[1]", "study.batches=[4]", "study.mode=weak", "study.repeats=1", "study.steps=5"]
    >>> found = launcher.study.scaling("configs/hyundai_segmentation.yaml", few, smoke=True, log=lambda line: None)
    >>> [(size.hosts, size.global_batch) for size in found.sizes]
    [(1, 4)]

    Args:
        config: a YAML file whose script is one of this kit's.
        overrides: `key=value` texts, for example study.hosts=[1,2,4] or study.mode=weak.
        on: the backend. On one machine the hosts share its cores; sizes with too few cores are listed without a verdict.
        smoke: apply the config's `smoke` section.
        table: the CSV file. None: studies/<job>-scaling-<backend>[-smoke].csv in the run store.
        max_cost: refuse trials that together could cost more US dollars than this, or whose price is unknown.
        log: receives a line for people at each trial.

    Raises:
        UserError: every mistake in the config, the overrides and the sizes, at once; or a table of other trials.
    """
    question = ScalingQuestion.of(config, overrides, on, smoke)
    done = engine.run(question, table, max_cost, log)
    known = (question.job, on, done.file, question.grid, done.rows, question.notes, done.failed)
    return ScalingStudy(*known, cores=question.cores, planned=question.processes_per_host)


def host_price(job: Job, on: str) -> float | None:
    """US dollars an hour for one host; None: unknown. This machine has only the price that the config gives it."""
    if backends.get(on).on_this_machine and job.compute.price_per_hour is None:
        return None
    compute = job.compute.model_copy(update={"instance_count": 1})
    if compute.instance_type is None:
        return compute.price_per_hour
    return prices.price(job.model_copy(update={"compute": compute})).per_hour
