"""The sizes of a scaling study with their trials, and the lines they form: weak and strong scaling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.show.spread import Spread
from launcher.study.scaling_model import Point, ScalingModel
from launcher.study.trial_table import Repeats, Row

WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Size(Repeats):
    """A number of hosts with one batch."""

    hosts: int
    global_batch: int
    rows: tuple[Row, ...]
    """A row of the table for each repeat."""
    shares_cores: bool = False
    """Whether the hosts are on one machine and have more threads and data workers than it has cores."""

    @property
    def processes(self) -> int:
        """On all hosts."""
        return int(self.rows[0]["world_size"])

    @property
    def batch(self) -> float:
        """Images per process."""
        return self.global_batch / self.processes

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.global_batch / self.rate.median

    def share(self, column: str) -> float | None:
        """A column's share of a step, the median over the repeats; None if it was not measured."""
        shares = [float(row[column]) / float(row["step_seconds"]) for row in self.rows if row[column]]
        return median(shares) if shares else None

    @property
    def exposed(self) -> float | None:
        """Share of a step that is exposed exchange of gradients."""
        return self.share("exposed_seconds")

    @property
    def images(self) -> int | None:
        """Training images; None: not recorded."""
        return next((int(row["training_images"]) for row in self.rows if row["training_images"]), None)

    def point(self, one_machine: bool) -> Point:
        """The size as the model takes it.

        Args:
            one_machine: whether all hosts run on the same machine.
        """

        def seconds(column: str) -> float | None:
            share = self.share(column)
            return None if share is None else share * self.seconds

        return Point(
            hosts=self.hosts,
            batch=self.batch,
            seconds=self.seconds,
            exposed=seconds("exposed_seconds"),
            waited=seconds("data_wait_seconds") or 0.0,
            backward=seconds("backward_seconds"),
            neighbours=self.hosts - 1 if one_machine else 0,
            side_by_side=any(row["data_workers"] not in ("", "0") for row in self.rows),
        )


@dataclass(frozen=True)
class Line:
    """Sizes that may be compared: with one batch per process (weak), or with one global batch (strong)."""

    kind: str
    """weak or strong."""
    batch: int
    """Images per process (weak) or in all (strong)."""
    sizes: tuple[Size, ...]
    """In ascending order of hosts; at least one."""

    def __str__(self) -> str:
        return f"weak, batch {self.batch} per process" if self.kind == WEAK else f"strong, global batch {self.batch}"

    @property
    def processes_per_host(self) -> int:
        return self.sizes[0].processes // self.sizes[0].hosts

    @property
    def first(self) -> Size | None:
        """The size that the others are compared with: the smallest whose hosts share no cores; None: all of them do."""
        return next((size for size in self.sizes if not size.shares_cores), None)

    @property
    def clean(self) -> tuple[Size, ...]:
        """The sizes whose hosts share no cores."""
        return tuple(size for size in self.sizes if not size.shares_cores)

    def efficiency(self, size: Size) -> Spread | None:
        """Images a second per host, as a share of the first size's. The median is computed from both medians; low and high come from
        the repeats, each compared with the first size's same repeat. None if the hosts share cores."""
        first = self.first
        if first is None or size.shares_cores:
            return None
        hosts = size.hosts / first.hosts
        turns = {row["repeat"]: float(row["images_per_second"]) for row in first.rows}
        shares = tuple(
            float(row["images_per_second"]) / turns[row["repeat"]] / hosts
            for row in size.rows
            if row["repeat"] in turns
        )
        middle = size.rate.median / first.rate.median / hosts
        return Spread(shares or (middle,), middle)

    def global_batch(self, processes: int) -> int | None:
        """For a number of processes; None if they cannot share it evenly."""
        if self.kind == WEAK:
            return self.batch * processes
        return None if self.batch % processes else self.batch


def sizes(rows: Iterable[Row], cores: int | None) -> list[Size]:
    """The sizes that have at least one trial, by hosts and batch.

    Args:
        cores: of the one machine that all hosts share; None: each host has its own machine or GPU.
    """
    grouped: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((int(row["hosts"]), int(row["global_batch"])), []).append(row)
    return [
        Size(hosts, batch, tuple(mine), cores is not None and _threads_and_workers(mine) > cores)
        for (hosts, batch), mine in sorted(grouped.items())
    ]


def _threads_and_workers(rows: Sequence[Row]) -> int:
    """Of all processes: what may take a core at the same time."""
    return max(int(row["world_size"]) * (int(row["threads"] or 1) + int(row["data_workers"] or 0)) for row in rows)


def lines(found: Sequence[Size], batches: Sequence[int], planned: int, global_batch: int | None) -> list[Line]:
    """The lines that the sizes form.

    Args:
        batches: images per planned process, one weak-scaling line each.
        planned: processes per host. On an emulator fewer may run, each with more images.
        global_batch: of strong scaling; None: without strong scaling.
    """
    made = []
    for batch in batches:
        fitting = tuple(size for size in found if size.global_batch == batch * planned * size.hosts)
        if fitting:
            made.append(Line(WEAK, round(fitting[0].batch), fitting))
    fitting = tuple(size for size in found if size.global_batch == global_batch)
    if fitting and global_batch is not None:
        made.append(Line(STRONG, global_batch, fitting))
    return made


def beyond(line: Line, model: ScalingModel | None) -> list[tuple[int, float, float]]:
    """Predicted (hosts, images a second, exposed share of a step) at two doublings of the largest size that shares no cores."""
    found = []
    if model is None or len(line.clean) < 2:
        return []
    largest = line.clean[-1].hosts
    for hosts in (2 * largest, 4 * largest):
        processes = hosts * line.processes_per_host
        batch = line.global_batch(processes)
        if batch is not None:
            step = model.step(hosts, batch / processes)
            found.append((hosts, batch / step.seconds, step.exposed / step.seconds))
    return found
