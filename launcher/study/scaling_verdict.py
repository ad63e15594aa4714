"""The answer of a scaling study: speed-up and efficiency, how far to trust them, and how many hosts to use."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from launcher.config.job import Job, StudySection
from launcher.show.text import counted
from launcher.study.scaling_advice import Offer, advice
from launcher.study.scaling_model import HeldOut, ScalingModel
from launcher.study.scaling_sizes import STRONG, Line, Size
from launcher.study.scaling_tables import percent, percents

GOAL = 0.10
"""Above this relative error on held-out sizes, the model's predictions are called a guess; above this difference among the repeats of a
size, the trials are called noisy."""

WORTH_TELLING = 0.01
"""Share of a step."""

SLOWER = 1.03
"""Ratio to the smallest size above which the rest of a step is called longer."""


def scaling(lines: Sequence[Line], model: ScalingModel | None) -> list[str]:
    """A sentence for each line, comparing the largest size with the smallest."""
    sentences = []
    for line in lines:
        if len(line.clean) < 2:
            several = len(line.sizes) > 1
            why = "fewer than two sizes have cores of their own" if several else "only one size was measured"
            sentences.append(f"{line}: no verdict, because {why}")
            continue
        largest, first = line.clean[-1], line.clean[0]
        efficiency = line.efficiency(largest)
        assert efficiency is not None, "it shares no cores"
        speed_up = largest.rate.median / first.rate.median
        sentences.append(
            f"{line}: speed-up {speed_up:.2f} from {first.hosts} to {largest.hosts} hosts, efficiency {percents(efficiency)}"
            f"{_losses(largest, first)}{_without_crowding(line, model)}"
        )
    return sentences


def _losses(largest: Size, first: Size) -> str:
    """What the largest size loses, if it was measured."""
    parts = [
        f"{share * 100:.0f} % of the step is {what}"
        for what, share in (
            ("exposed exchange", largest.exposed),
            ("waiting for data", largest.share("data_wait_seconds")),
        )
        if share is not None and share >= WORTH_TELLING
    ]
    waits = [size.share("data_wait_seconds") for size in (largest, first)]
    if largest.batch == first.batch and largest.exposed is not None and None not in waits:
        many, few = (size.seconds * (1 - (size.exposed or 0.0)) for size in (largest, first))
        if many > few * SLOWER:
            parts.append(
                f"the rest of the step takes {(many / few - 1) * 100:.0f} % longer than on {counted(first.hosts, 'host')}"
            )
    return "".join(f"; {part}" for part in parts)


def _without_crowding(line: Line, model: ScalingModel | None) -> str:
    """The efficiency of the largest size if its hosts did not share one machine; "" if sharing was not seen to cost time."""
    first = line.first
    if model is None or not model.crowding or first is None:
        return ""
    largest = line.clean[-1]
    rate = largest.global_batch / model.step(largest.hosts, largest.batch).seconds
    return f"; with a machine per host the model predicts {percent(rate / first.rate.median / largest.hosts * first.hosts)}"


def repeats(lines: Sequence[Line]) -> list[str]:
    """A warning if repeats differ much: no figure is more certain than their agreement."""
    clean = [size for line in lines for size in line.clean]
    if not clean:
        return []
    worst = max(clean, key=lambda size: size.rate.high / size.rate.low)
    apart = worst.rate.high / worst.rate.low - 1
    if apart <= GOAL:
        return []
    return [
        f"noisy: repeats of {counted(worst.hosts, 'host')}, batch {worst.batch:g}, differ by {apart * 100:.0f} %, and no figure here is "
        "more certain than that. Use a quiet machine, or more --repeats."
    ]


def errors(held_out: Sequence[HeldOut]) -> list[str]:
    """How far the model's predictions can be trusted.

    Args:
        held_out: a size may appear twice, predicted by different models.
    """
    known = [(each, each.error) for each in held_out if each.error is not None]
    if not known:
        return ["model: no size could be held out, so its error is unknown"]
    worst, error = max(known, key=lambda pair: abs(pair[1]))
    middle = median(abs(error) for _, error in known)
    trust = "within 10 %" if abs(error) <= GOAL else "more than 10 %: take its predictions as a guess"
    return [
        f"model: its error over {counted(len(known), 'prediction')} of held-out sizes is {middle * 100:.1f} % in the median and "
        f"{abs(error) * 100:.1f} % at most ({counted(worst.point.hosts, 'host')}, batch {worst.point.batch:g}), {trust}"
    ]


def hosts_to_take(offers: Sequence[tuple[Line, Sequence[Offer]]], grid: StudySection, job: Job) -> list[str]:
    """The number of hosts for the deadline, the budget, the lowest cost and the shortest time, on each line."""
    sentences = [
        f"{line}, {sentence}"
        for line, choices in offers
        if choices
        for sentence in advice(choices, grid.deadline_hours, grid.budget_usd)
    ]
    if sentences:
        epochs = job.hyperparameters["epochs"]
        sentences.append(f"Hours are for {epochs} epochs, without start, evaluations and checkpoints.")
    return sentences


def caveats(lines: Sequence[Line]) -> list[str]:
    """What the figures do not show."""
    kinds = {line.kind for line in lines}
    if len(kinds) > 1 and STRONG in kinds:
        return ["Weak scaling changes the global batch, and with it the right learning rate: check the accuracy."]
    return []
