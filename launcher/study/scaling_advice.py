"""How many hosts to use: for a deadline, for a budget, for the lowest cost, and for the shortest time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.show.text import counted, dollars
from launcher.study.scaling_model import ScalingModel
from launcher.study.scaling_sizes import Line

MAX_EXTRAPOLATION = 4
"""Multiple of the largest measured host count up to which the model predicts."""


@dataclass(frozen=True)
class Offer:
    """A number of hosts, with the training's time and cost on them."""

    hosts: int
    rate: float
    """Images a second."""
    measured: bool
    """false: predicted by the model."""
    images: int
    """Of the whole training: images an epoch times epochs."""
    usd_per_hour: float | None
    """Of one host."""
    apart: bool = False
    """Predicted with a machine per host, though the measured hosts shared one."""

    @property
    def hours(self) -> float:
        return self.images / self.rate / 3600

    @property
    def host_hours(self) -> float:
        return self.hours * self.hosts

    @property
    def usd(self) -> float | None:
        return None if self.usd_per_hour is None else self.host_hours * self.usd_per_hour

    def __str__(self) -> str:
        cost = f"{self.host_hours:.3g} host-hours" if self.usd is None else dollars(self.usd)
        how = "measured" if self.measured else f"predicted{' with a machine per host' if self.apart else ''}"
        return f"{counted(self.hosts, 'host')}, {self.hours:.3g} h, {cost}, {how}"


def offers(
    line: Line, model: ScalingModel | None, processes_per_host: int, images: int, usd_per_hour: float | None
) -> list[Offer]:
    """The measured sizes of a line, and those that the model predicts. Of hosts that shared a machine and slowed each other, all sizes
    but the first are predicted with a machine per host.

    Args:
        processes_per_host: processes per host.
        model: None: only the measured sizes.
        images: of the whole training.
        usd_per_hour: of one host; None: no price known.
    """
    found = {
        size.hosts: Offer(size.hosts, size.rate.median, True, images, usd_per_hour) for size in line.clean if images
    }
    apart = model is not None and model.crowding > 0
    if model is None or not found:
        return list(found.values())
    exchanges = any(hosts > 1 for hosts in found)
    for hosts in range(1, (MAX_EXTRAPOLATION * max(found) if exchanges else 1) + 1):
        batch = line.global_batch(hosts * processes_per_host)
        if (hosts not in found or (apart and hosts > 1)) and batch is not None:
            seconds = model.step(hosts, batch / (hosts * processes_per_host)).seconds
            found[hosts] = Offer(hosts, batch / seconds, False, images, usd_per_hour, apart)
    return [found[hosts] for hosts in sorted(found)]


def advice(choices: Sequence[Offer], deadline_hours: float | None, budget_usd: float | None) -> list[str]:
    """A sentence for each question that can be answered.

    Args:
        choices: of one line; at least one.
    """
    priced = choices[0].usd is not None
    fastest, cheapest = (
        min(choices, key=lambda one: (one.hours, one.hosts)),
        min(choices, key=lambda one: (one.host_hours, one.hosts)),
    )
    sentences = []
    if deadline_hours is not None:
        fitting = [offer for offer in choices if offer.hours <= deadline_hours]
        answer = (
            str(min(fitting, key=lambda offer: offer.hosts))
            if fitting
            else f"no size meets it; the fastest is {fastest}"
        )
        sentences.append(f"deadline of {deadline_hours:g} h: {answer}")
    if budget_usd is not None:
        fitting = [offer for offer in choices if offer.usd is not None and offer.usd <= budget_usd]
        if not priced:
            answer = "no price known; set compute.price_per_hour, in US dollars"
        elif fitting:
            answer = str(min(fitting, key=lambda offer: offer.hours))
        else:
            answer = f"no size fits; the cheapest is {cheapest}"
        sentences.append(f"budget of {dollars(budget_usd)}: {answer}")
    sentences.append(f"cheapest{'' if priced else ' by host-hours, as no price is known'}: {cheapest}")
    return [*sentences, f"fastest: {fastest}"]
