"""What a million training images cost with each pipeline on its hosts, and whether serving hosts pay off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.aws import catalog, prices
from launcher.backends.plans import check, plan
from launcher.config.issues import UserError
from launcher.config.job import Job
from launcher.show.spread import Spread
from launcher.show.table import Table
from launcher.show.text import dollars, three_digits
from launcher.study import preprocessing_hosts, sizing
from launcher.study.preprocessing_cells import Cell, places
from launcher.study.preprocessing_hosts import REMOTE

NO_PRICE = "no price known"


@dataclass(frozen=True)
class Cost:
    """A cell with the price of its hosts."""

    cell: Cell
    hosts: str
    """For example `1 ml.g5.2xlarge, 2 ml.c6i.4xlarge`."""
    usd_per_hour: float | None
    """For all of them, on demand; None: unknown."""

    @property
    def usd_per_million(self) -> Spread | None:
        """US dollars to train on a million images, over the repeats."""
        if self.usd_per_hour is None:
            return None
        each = [sizing.usd_per_million(self.usd_per_hour, rate) for rate in self.cell.rate.values]
        return Spread(tuple(each), sizing.usd_per_million(self.usd_per_hour, self.cell.rate.median))


@dataclass(frozen=True)
class LargerMachine:
    """An estimate: the next instance type with the same GPUs and more vCPUs, without other hosts."""

    instance_type: str
    smaller: str
    vcpus: tuple[int, int]
    """Left for images on the smaller one, on which the trials ran, and on this one: all but one for each GPU's own process."""
    cell: Cell
    """The trials behind the estimate: the fastest pipeline that uses vCPUs."""
    model_rate: float
    """Images a second of the model alone."""
    usd_per_hour: float | None
    """For as many hosts."""

    @property
    def images_per_second(self) -> float:
        """An upper bound: the rate grows with the vCPUs until the model limits it."""
        before, after = self.vcpus
        return min(self.model_rate, self.cell.rate.median * after / before)

    def __str__(self) -> str:
        before, after = self.vcpus
        rate = three_digits(self.cell.rate.median)
        return (
            f"estimated from {self.cell.pipeline}'s {rate} images/s on {self.smaller}, x {after}/{before} vCPUs for images, at most "
            f"the model's own {three_digits(self.model_rate)}"
        )


def costs(cells: Sequence[Cell], job: Job, remote: Job | None) -> list[Cost]:
    """Every cell with the price of its hosts.

    Args:
        remote: the job with serving hosts.
    """
    found = []
    for cell in cells:
        own = remote if cell.pipeline == REMOTE and remote is not None else job
        found.append(Cost(cell, preprocessing_hosts.text(own), prices.price(own).per_hour))
    return found


def table(costs: Sequence[Cost]) -> Table:
    """Images a second and their price."""
    head = ["model", "load", "pipeline", "hosts", "images/s", "US$ an hour", "images a US$", "US$ a million images"]
    rows = []
    for cost in costs:
        cell, usd = cost.cell, cost.usd_per_million
        row = [cell.model, str(cell.load), cell.pipeline, cost.hosts, three_digits(cell.rate.median)]
        if usd is None or cost.usd_per_hour is None:
            rows.append([*row, *[NO_PRICE] * 3])
            continue
        several = f" ({usd.low:.2f}-{usd.high:.2f})" if len(usd.values) > 1 else ""
        rows.append([*row, f"{cost.usd_per_hour:.2f}", f"{1e6 / usd.median:,.0f}", f"{usd.median:.2f}{several}"])
    notes = ["On-demand prices of all hosts, at the speed after the warm-up; the start of a job is left out."]
    return Table(head, rows, "what the images cost", notes)


def sentences(
    cells: Sequence[Cell], job: Job, remote: Job | None, *, on_one_machine: bool, priced: bool
) -> Iterator[str]:
    """Whether serving hosts pay off, for each model and load; nothing if they have no trials.

    Args:
        on_one_machine: whether all hosts share one machine.
        priced: whether hosts cost money.
    """
    if not any(cell.pipeline == REMOTE for cell in cells):
        return
    if on_one_machine:
        price = "" if priced else ", and this machine has no price"
        yield (
            f"remote: its hosts share one machine here and bring no cores, so it cannot win by them and is not judged{price}. A "
            "difference from cpu is how threads share the cores, of which training takes fewer beside other hosts, or chance. Whether it "
            "pays is measured on SageMaker, where each host has its own"
        )
        return
    unpriced = [known.text for each in (job, remote) if each and (known := prices.price(each)).per_hour is None]
    if unpriced:
        yield f"whether remote pays is not known: {unpriced[-1]}"
        return
    every = costs(cells, job, remote)
    for model, load in places(cells):
        here = [cost for cost in every if (cost.cell.model, cost.cell.load) == (model, load)]
        yield from _about_a_place(f"{model}, load {load}", here, job)


def read_prices(job: Job, remote: Job, on: str) -> None:
    """Read AWS's price list for whatever is compared without a price: both jobs' hosts, and the next size of the job's instance type."""
    larger = sizing.next_size(job.compute.instance_type or "")
    compared = [job, remote, *([] if larger is None else [sizing.on_one(job, larger)])]
    for one in compared:
        if prices.price(one).per_hour is None:
            with contextlib.suppress(UserError):  # AWS does not answer: the verdict says that the price is unknown
                check(plan(one, on=on))


def _about_a_place(about: str, here: Sequence[Cost], job: Job) -> Iterator[str]:
    """Remote compared with the fastest of the other pipelines, and with a larger machine."""
    remote = next((cost for cost in here if cost.cell.pipeline == REMOTE), None)
    others = [cost for cost in here if cost.cell.pipeline != REMOTE]
    if remote is None or remote.usd_per_million is None:
        return
    usd = remote.usd_per_million
    shown = f"{dollars(usd.median)} a million images at {three_digits(remote.cell.rate.median)} images/s"
    if not others:
        yield f"{about}: remote costs {shown}; nothing else was tried"
        return
    best = max(others, key=lambda cost: cost.cell.rate.median)
    alone = best.usd_per_million
    assert alone is not None
    several = min(len(remote.cell.rows), len(best.cell.rows)) > 1
    pays = "pays" if usd.median < alone.median else "does not pay"
    if several and not usd.apart(alone):
        pays = "neither pays nor costs more, as far as the repeats can tell"
    once = [cost.cell.pipeline for cost in (remote, best) if len(cost.cell.rows) == 1]
    doubt = f"; one run of {' and '.join(once)}, so it may be chance" if once else ""
    yield (
        f"{about}: remote {pays}: {shown}, {dollars(alone.median)} at {three_digits(best.cell.rate.median)} with {best.cell.pipeline} on "
        f"{best.hosts} alone{doubt}"
    )
    yield from _about_a_larger_machine(about, remote, [cost.cell for cost in others], job)


def _about_a_larger_machine(about: str, remote: Cost, others: Sequence[Cell], job: Job) -> Iterator[str]:
    """An estimate for the GPU machine of the next size."""
    found, usd = larger_machine(others, job), remote.usd_per_million
    assert usd is not None
    if found is None:
        yield f"{about}: no estimate for a machine with more vCPUs: {_why_no_larger_machine(others, job)}"
        return
    most = three_digits(found.images_per_second)
    if found.usd_per_hour is None:
        yield (
            f"{about}: {found.instance_type} alone with {found.cell.pipeline} reaches at most {most} images/s, {found}; "
            "its price is not known"
        )
        return
    least = sizing.usd_per_million(found.usd_per_hour, found.images_per_second)
    which = "more than remote" if least > usd.median else "so it may be cheaper than remote"
    yield (
        f"{about}: {found.instance_type} alone with {found.cell.pipeline} costs at least {dollars(least)} a million images, {which}: "
        f"{most} images/s, {found}"
    )


def _why_no_larger_machine(others: Sequence[Cell], job: Job) -> str:
    name = job.compute.instance_type
    facts = None if name is None else catalog.instance(name)
    if facts is None:
        return (
            "the catalog does not know the instance type" if name else "the job's hosts are of several instance types"
        )
    if not facts.gpus:
        return f"{facts.name} has no GPU"
    if sizing.next_size(facts.name) is None:
        return f"the catalog has no larger {facts.name} with as many GPUs"
    return "it needs a trial of a cpu pipeline, and of the model alone"


def larger_machine(cells: Sequence[Cell], job: Job) -> LargerMachine | None:
    """An estimate for the next size of the job's instance type, from the trials of one model and load.

    Returns:
        None if there is no such type, no GPU, no trial of a pipeline that uses vCPUs, or none of the model alone.
    """
    by_cores = [cell for cell in cells if cell.pipeline not in (REMOTE, "dali") and cell.alone is not None]
    name = job.compute.instance_type
    now = catalog.instance(name) if name is not None else None
    bigger = sizing.next_size(name) if name is not None else None
    then = catalog.instance(bigger) if bigger is not None else None
    if not by_cores or now is None or then is None:
        return None
    cell = max(by_cores, key=lambda one: one.rate.median)
    assert cell.alone is not None
    price = sizing.price_of_one(job, then.name)
    usd = None if price is None else price * job.compute.instance_count
    before, after = (facts.vcpus - sizing.RESERVED * facts.gpus for facts in (now, then))
    return LargerMachine(then.name, now.name, (max(before, 1), after), cell, cell.alone.median, usd)
