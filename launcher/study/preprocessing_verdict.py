"""The answer of a preprocessing study: the best pipeline for each model and load, and the instance type to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from launcher.aws import catalog
from launcher.config.job import Job
from launcher.show.text import dollars, three_digits
from launcher.study import sizing
from launcher.study.preprocessing_cells import INPUT_BOUND, Cell, heaviest, improvement, places, tried
from launcher.study.preprocessing_cost import NO_PRICE
from launcher.study.preprocessing_demand import demands
from launcher.study.results import NOT_MEASURED


def sentences(cells: Sequence[Cell], pipelines: Sequence[str], job: Job) -> list[str]:
    """A line for each model and load, one for all cells, and one for each model's instance type."""
    there = tried(cells, pipelines)
    lines = [_best(model, load, cells, there) for model, load in places(cells)]
    waiting = [cell for cell in cells if cell.verdict == INPUT_BOUND]
    lines.append(f"{len(waiting)} of {len(cells)} cells are input-bound")
    return lines + [_instance_type(model, speeds, cells, there, job) for model, speeds in demands(cells, job).items()]


def _best(model: str, load: int, cells: Sequence[Cell], pipelines: Sequence[str]) -> str:
    """The fastest pipeline, if the repeats can tell."""
    about = f"{model}, load {load}"
    here = {cell.pipeline: cell for cell in cells if (cell.model, cell.load) == (model, load)}
    first = next(here[name] for name in pipelines if name in here)
    if len(here) < 2:
        return f"{about}: only {first.pipeline} was tried; it is {first.verdict}"
    clear = [cell for cell in here.values() if len(cell.rows) == 1 or cell.seconds.apart(first.seconds)]
    best = min([first, *clear], key=lambda cell: cell.seconds.median)
    if best is first:
        return f"{about}: no pipeline is clearly faster than {first.pipeline}, which is {first.verdict}"
    less = improvement(first, best).median
    doubt = "" if min(len(first.rows), len(best.rows)) > 1 else "; one run each, so it may be chance"
    return (
        f"{about}: {best.pipeline} takes {less:.2f} % less time than {first.pipeline} "
        f"({first.pipeline} is {first.verdict}, {best.pipeline} {best.verdict}){doubt}"
    )


def _instance_type(
    model: str, speeds: Mapping[str, sizing.Demand], cells: Sequence[Cell], pipelines: Sequence[str], job: Job
) -> str:
    """The one that feeds the model at the lowest cost; without prices, the one with the fewest vCPUs."""
    load, rates = heaviest(cells, pipelines)
    about = f"instance type for {model}, load {load}"
    if not rates:
        return f"{about}: unknown, because the input side alone was {NOT_MEASURED}"
    known = [
        {name: sizing.fit(instance_type, rate, speeds, job) for name, rate in rates.items()}
        for instance_type in sizing.instance_types()
    ]
    known = [fits for fits in known if any(each.demand for each in fits.values())]
    best = max(rates, key=lambda name: rates[name])
    if not known:
        vcpus = ", ".join(f"{1000 / rate:.1f} with {name}" for name, rate in rates.items())
        return f"{about}: unknown, because no GPU's speed was measured; 1000 images/s need these vCPUs: {vcpus}"

    def price(fits: Mapping[str, sizing.Fit]) -> tuple[float, float]:
        one = fits[best]
        return (one.usd_per_million if one.usd_per_million is not None else inf, one.vcpus_per_gpu)

    enough = [fits for fits in known if fits[best].share == 1]
    fits = min(enough, key=price) if enough else max(known, key=lambda fits: fits[best].share or 0)
    one = fits[best]
    assert one.demand is not None
    cost = f"{dollars(one.usd_per_million)} a million images" if one.usd_per_million is not None else NO_PRICE
    if catalog.is_before_turing(one.gpu):
        last, _ = catalog.last_image_before_turing()
        cost += f", only with PyTorch {last} or older"
    feeding = [name for name, each in fits.items() if each.share == 1]
    how = f"fed by {' and '.join(feeding)}" if feeding else f"no pipeline feeds it, {best} comes closest"
    supply = ", ".join(f"{three_digits(each.fed)} with {name}" for name, each in fits.items())
    return (
        f"{about}: {one.instance_type}, {cost}, {how}. Its {one.gpu} takes {three_digits(one.demand.images_per_second)} images/s "
        f"({one.demand.source}); its CPUs prepare for each GPU {supply}"
    )
