"""How many hosts to take: for a deadline, for a budget, for the least money, and for the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.show.text import dollars
from launcher.study.scaling_model import ScalingModel
from launcher.study.scaling_sizes import Line

FARTHEST = 4
"""Times the hosts of the largest measured size: further a prediction would be a guess."""


@dataclass(frozen=True)
class Offer:
    """So many hosts, and what they would take."""

    hosts: int
    rate: float
    """Images a second."""
    measured: bool
    """false: the model's word."""
    images: int
    """Of the whole training: images an epoch times epochs."""
    usd_an_hour: float | None
    """Of one host."""

    @property
    def hours(self) -> float:
        return self.images / self.rate / 3600

    @property
    def host_hours(self) -> float:
        return self.hours * self.hosts

    @property
    def usd(self) -> float | None:
        return None if self.usd_an_hour is None else self.host_hours * self.usd_an_hour

    def __str__(self) -> str:
        cost = f"{self.host_hours:.3g} host-hours" if self.usd is None else dollars(self.usd)
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return f"{hosts}, {self.hours:.3g} h, {cost}, {'measured' if self.measured else 'predicted'}"


def offers(
    line: Line, model: ScalingModel | None, processes_a_host: int, images: int, usd_an_hour: float | None
) -> list[Offer]:
    """What can be had on a line of sizes: those that were measured, and those that the model reaches.

    Args:
        model: None: the measured sizes alone.
        images: of the whole training.
        usd_an_hour: of one host; None: no price known.
    """
    found = {
        size.hosts: Offer(size.hosts, size.rate.median, True, images, usd_an_hour) for size in line.clean if images
    }
    if model is None or not found:
        return list(found.values())
    exchanges = any(hosts > 1 for hosts in found)
    for hosts in range(1, (FARTHEST * max(found) if exchanges else 1) + 1):
        batch = line.global_batch(hosts * processes_a_host)
        if hosts not in found and batch is not None:
            seconds = model.step(hosts, batch / (hosts * processes_a_host)).seconds
            found[hosts] = Offer(hosts, batch / seconds, False, images, usd_an_hour)
    return [found[hosts] for hosts in sorted(found)]


def advice(choices: Sequence[Offer], deadline_hours: float | None, budget_usd: float | None) -> list[str]:
    """A sentence for each question that can be answered.

    Args:
        choices: of one line; at least one.
    """
    priced = choices[0].usd is not None
    told = []
    if deadline_hours is not None:
        fitting = [offer for offer in choices if offer.hours <= deadline_hours]
        if fitting:
            told.append(f"for the deadline of {deadline_hours:g} h: {min(fitting, key=lambda offer: offer.hosts)}")
        else:
            fastest = min(choices, key=lambda offer: offer.hours)
            told.append(f"for the deadline of {deadline_hours:g} h: none of these sizes; the fastest is {fastest}")
    if budget_usd is not None:
        fitting = [offer for offer in choices if offer.usd is not None and offer.usd <= budget_usd]
        if not priced:
            told.append(
                f"for the budget of {dollars(budget_usd)}: no price known, give compute.price_per_hour, in US dollars"
            )
        elif fitting:
            fastest = min(fitting, key=lambda offer: offer.hours)
            told.append(f"for the budget of {dollars(budget_usd)}, the fastest: {fastest}")
        else:
            least = min(choices, key=lambda offer: offer.host_hours)
            told.append(f"for the budget of {dollars(budget_usd)}: none of these sizes; the cheapest is {least}")
    about = "cheapest" if priced else "cheapest, by host-hours because no price is known"
    told.append(f"{about}: {min(choices, key=lambda offer: (offer.host_hours, offer.hosts))}")
    told.append(f"fastest: {min(choices, key=lambda offer: (offer.hours, offer.hosts))}")
    return told
