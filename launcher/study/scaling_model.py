"""A model of a data-parallel step's time, fitted to measured sizes: compute or input, plus the exchange that backward does not hide.

    step(h, b) = max(compute(b), input(b)) + exposed(h, b)

    compute(b)    = fixed + (compute_seconds_per_image + crowding * neighbours) * b       b: images per process
    input(b)      = input_seconds_per_image * b                                           if the step waits for it, else 0
    transfer(h)   = 2 (h-1)/h * bytes / bandwidth + 2 (h-1) * buckets * latency
    exposed(h, b) = max(last * transfer(h), transfer(h) - backward * compute(b))              0 on one host

transfer: the ring all-reduce, in which each of h hosts sends (h-1)/h of the gradients to reduce them and as much to gather
the sums, in 2 (h-1) turns: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69(2), section 3; each turn has its own latency: Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH", section 2. The ring connects hosts, not processes: what the processes of one host
exchange among themselves is the same on any number of hosts and counts as compute.

crowding: hosts on one machine share its memory, caches and power, so each neighbour slows the others. Hosts with their own machine
have no neighbours.

exposed: DistributedDataParallel exchanges a bucket of gradients as soon as backward has produced it, during the rest of backward. The
last bucket has nothing to hide behind (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
https://arxiv.org/abs/2006.15704, section 3.2.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of DistributedDataParallel's first bucket and of the others: _DEFAULT_FIRST_BUCKET_BYTES of torch.distributed, and
bucket_cap_mb of https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html."""

BACKWARD = 2 / 3
"""Backward's share of compute if it was not measured: it takes two products per layer (gradients of its inputs and of its weights),
forward takes one."""

WAITS = 0.05
"""Share of a step from which waiting for data counts as the limit: MODERATELY of launcher/study/preprocessing_cells.py."""

NUMBERS = ("fixed", "compute_seconds_per_image", "seconds_per_byte", "latency", "crowding")
"""The fitted parameters, in the order of a row's columns."""

ROUNDS = 20
"""Maximum rounds of deciding what limits each step and solving again; two or three are usual."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured size. Times are seconds a step, medians of its repeats."""

    hosts: int
    batch: float
    """Images per process."""
    seconds: float
    exposed: float | None = None
    """The part that is exposed exchange of gradients; None: not measured. On one host it counts as compute."""
    waited: float = 0.0
    """The part spent waiting for data."""
    backward: float | None = None
    """The part that is backward, without the exposed exchange; None: not measured."""
    neighbours: int = 0
    """Other hosts on the same machine."""
    side_by_side: bool = True
    """Whether workers prepare the next batch during the step; false: it is prepared between two steps, as a part of compute."""

    @property
    def exchanging(self) -> float:
        """Seconds of exposed exchange between hosts."""
        return self.exposed or 0.0 if self.hosts > 1 else 0.0

    @property
    def computing(self) -> float:
        return self.seconds - self.exchanging - (self.waited if self.side_by_side else 0.0)

    @property
    def limited_by_input(self) -> bool:
        return self.side_by_side and self.waited >= WAITS * self.seconds


@dataclass(frozen=True)
class Step:
    """The parts of a step, in seconds."""

    computing: float
    input: float
    exposed: float

    @property
    def seconds(self) -> float:
        return max(self.computing, self.input) + self.exposed


@dataclass(frozen=True, kw_only=True)
class ScalingModel:
    """The fitted parameters; `step` predicts."""

    gradient_bytes: float
    fixed: float
    """Seconds a step, whatever the batch."""
    compute_seconds_per_image: float
    """Compute seconds per image of a process's batch."""
    input_seconds_per_image: float
    """Input seconds per image; 0: input never limited a measured step."""
    seconds_per_byte: float
    """The inverse of the bandwidth between hosts."""
    latency: float
    """Seconds per turn of the ring."""
    backward: float
    """Backward's share of compute."""
    crowding: float = 0.0
    """Seconds per image that each neighbour adds."""
    assumptions: tuple[str, ...] = ()
    """What the measured sizes do not show, and what is assumed instead."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second; None: no part of the time grows with the bytes."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else None

    def step(self, hosts: int, batch: float, neighbours: int = 0) -> Step:
        """A step at one size.

        Args:
            batch: images per process.
            neighbours: other hosts on the same machine.
        """
        computing = self.fixed + (self.compute_seconds_per_image + self.crowding * neighbours) * batch
        transfer = self.transfer(hosts)
        _, last = buckets(self.gradient_bytes)
        exposed = max(last * transfer, transfer - self.backward * computing) if hosts > 1 else 0.0
        return Step(computing, self.input_seconds_per_image * batch, exposed)

    def predict(self, point: Point) -> Step:
        """A step at a measured size, by the model alone."""
        return self.step(point.hosts, point.batch, point.neighbours)

    def transfer(self, hosts: int) -> float:
        """Seconds of a step's all-reduce between hosts, without any overlap."""
        turns, share = ring(hosts)
        count, _ = buckets(self.gradient_bytes)
        return share * self.gradient_bytes * self.seconds_per_byte + turns * count * self.latency


def ring(hosts: int) -> tuple[int, float]:
    """The turns of a ring all-reduce between hosts, and how many times over each host sends the bytes."""
    return 2 * (hosts - 1), 2 * (hosts - 1) / hosts


def buckets(gradient_bytes: float) -> tuple[int, float]:
    """The number of DistributedDataParallel's buckets, and the last one's share of the bytes, 0 to 1."""
    rest = gradient_bytes - FIRST_BUCKET
    if rest <= 0:
        return 1, 1.0
    count = math.ceil(rest / BUCKET)
    return 1 + count, (rest - (count - 1) * BUCKET) / gradient_bytes


def extrapolated_efficiency(share: float, hosts: int, other: int) -> tuple[float, float]:
    """Weak-scaling efficiency on `other` hosts, relative to one host: if the ring's bytes limit it, and if its turns do.

    >>> [round(found, 3) for found in extrapolated_efficiency(0.93, 8, 16)]
    [0.925, 0.861]

    Args:
        share: the efficiency on `hosts`, which is more than one; all that is lost there is exposed exchange.
    """
    exposed = 1 / share - 1  # relative to the rest of the step
    (turns, volume), (other_turns, other_volume) = ring(hosts), ring(other)
    return 1 / (1 + exposed * other_volume / volume), 1 / (1 + exposed * other_turns / turns)


def fit(points: Sequence[Point], gradient_bytes: float) -> ScalingModel:
    """The model whose predictions are closest to the measured sizes.

    Non-negative least squares on errors relative to each step's time: of its seconds, and of its exposed exchange if that was measured.
    The problem is linear once it is known which part limits each step, so the two are solved alternately.

    Args:
        points: at least one; no sizes whose hosts share cores.
        gradient_bytes: exchanged by a process in each step.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("nothing was measured: there is nothing to fit")
    assumed = []
    free = [True] * len(NUMBERS)
    if len({point.batch for point in points}) == 1:
        free[0] = False
        assumed.append("one batch per process: computing is taken as proportional to it")
    exchanging = {point.hosts for point in points if point.hosts > 1}
    if len(exchanging) <= 1:
        free[3] = False
    if len(exchanging) == 1:
        assumed.append(
            f"only the size of {exchanging.pop()} hosts exchanges gradients: its exposed time is put down to bandwidth, not latency"
        )
    elif not exchanging:
        free[2] = False
        assumed.append("no size has several hosts: the exchange is taken to need no time")
    if len({point.neighbours for point in points}) == 1:
        free[4] = False
    measured = [point.backward / point.computing for point in points if point.backward and point.computing > 0]
    backward = min(1.0, median(measured)) if measured else BACKWARD
    if not measured:
        assumed.append("backward was not measured: taken as two thirds of computing")
    waiting = [(point.seconds - point.exchanging) / point.batch for point in points if point.limited_by_input]
    limited = [point.limited_by_input for point in points]
    model = ScalingModel(
        gradient_bytes=gradient_bytes,
        fixed=0.0,
        compute_seconds_per_image=0.0,
        input_seconds_per_image=median(waiting) if waiting else 0.0,
        seconds_per_byte=0.0,
        latency=0.0,
        backward=backward,
        assumptions=tuple(assumed),
    )
    best, least = model, math.inf
    hidden = [False] * len(points)  # whether backward ends before the exchange, not only before its last bucket
    for _ in range(ROUNDS):
        solved = _solve(points, limited, hidden, free, model)
        error = sum(((solved.predict(p).seconds - p.seconds) / p.seconds) ** 2 for p in points)
        if error < least:
            best, least = solved, error
        again = [_backward_leaves_more(solved, point) for point in points]
        if again == hidden:
            break
        hidden = again
    return best


def _backward_leaves_more(model: ScalingModel, point: Point) -> bool:
    _, last = buckets(model.gradient_bytes)
    transfer = model.transfer(point.hosts)
    left = transfer - model.backward * model.predict(point).computing
    return point.hosts > 1 and left > last * transfer


def _solve(
    points: Sequence[Point], limited: Sequence[bool], hidden: Sequence[bool], free: Sequence[bool], model: ScalingModel
) -> ScalingModel:
    """The solution of the linear problem, given what limits each step."""
    rows, targets = [], []
    count, last = buckets(model.gradient_bytes)
    for point, waits, behind in zip(points, limited, hidden):
        turns, share = ring(point.hosts)
        transfer = [0.0, 0.0, share * model.gradient_bytes, float(turns * count), 0.0]
        computing = [1.0, point.batch, 0.0, 0.0, point.batch * point.neighbours]
        longer = [sent - model.backward * computed for sent, computed in zip(transfer, computing)]  # than backward
        exchange = longer if behind else [last * value for value in transfer]
        whole, measured = [value * (point.hosts > 1) for value in exchange], point.seconds
        if waits:
            measured -= model.input_seconds_per_image * point.batch
            rows.append([value / point.seconds for value in computing])
            targets.append(point.computing / point.seconds)
        else:
            whole = [exposed + computed for exposed, computed in zip(whole, computing)]
        rows.append([value / point.seconds for value in whole])
        targets.append(measured / point.seconds)
        if point.hosts > 1 and point.exposed is not None:
            rows.append([value / point.seconds for value in exchange])
            targets.append(point.exposed / point.seconds)
    fitted: dict[str, Any] = dict(zip(NUMBERS, _non_negative(rows, targets, free)))
    return replace(model, **fitted)


def _non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float], free: Sequence[bool]) -> list[float]:
    """Exact non-negative least squares: with few unknowns, every set of them that may be above 0 can be tried."""
    import numpy as np  # here: only fitting needs it

    matrix, wanted = np.array(rows), np.array(targets)
    names = [column for column, is_free in enumerate(free) if is_free]
    best, least = [0.0] * len(free), float(wanted @ wanted)
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            part = matrix[:, chosen]
            scale = np.abs(part).max(axis=0)  # bytes and images differ in magnitude
            if not scale.all():
                continue
            found, _, rank, _ = np.linalg.lstsq(part / scale, wanted, rcond=None)
            if rank < size or (found < 0).any():
                continue
            error = float(((part / scale) @ found - wanted) @ ((part / scale) @ found - wanted))
            if error < least * (1 - 1e-9):
                least, best = error, [0.0] * len(free)
                for column, value in zip(chosen, found / scale):
                    best[column] = float(value)
    return best


@dataclass(frozen=True)
class HeldOut:
    """A size that the model was not fitted to."""

    point: Point
    predicted: float | None
    """Seconds per step; None: the other sizes cannot predict it."""
    why: str = ""
    """Why it cannot be predicted."""

    @property
    def error(self) -> float | None:
        """Relative; above 0 if the model is slower than the measurement."""
        return None if self.predicted is None else self.predicted / self.point.seconds - 1


def held_out(points: Sequence[Point], gradient_bytes: float) -> list[HeldOut]:
    """Each size, predicted by a model that was fitted to the others."""
    return [_without(points, [point], point, gradient_bytes) for point in points]


def hosts_held_out(points: Sequence[Point], gradient_bytes: float) -> list[HeldOut]:
    """Each size, predicted by a model that saw no size with this number of hosts; empty with fewer than three host counts."""
    counts = sorted({point.hosts for point in points})
    if len(counts) < 3:
        return []
    return list(_by_hosts(points, counts, gradient_bytes))


def _by_hosts(points: Sequence[Point], counts: Sequence[int], gradient_bytes: float) -> Iterator[HeldOut]:
    for count in counts:
        away = [point for point in points if point.hosts == count]
        yield from (_without(points, away, point, gradient_bytes) for point in away)


def _without(points: Sequence[Point], away: Sequence[Point], point: Point, gradient_bytes: float) -> HeldOut:
    shown = [other for other in points if other not in away]
    if not shown:
        return HeldOut(point, None, "it is the only size")
    if point.hosts > 1 and not any(other.hosts > 1 for other in shown):
        return HeldOut(point, None, "no other size exchanges gradients between hosts")
    return HeldOut(point, fit(shown, gradient_bytes).predict(point).seconds)
