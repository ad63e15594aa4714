"""The DALI post's two charts: seconds an epoch, and the time saved compared with the first pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.show.bars import BarChart, bar_charts
from launcher.show.spread import Spread
from launcher.show.svg import Picture
from launcher.study.preprocessing_cells import Cell, improvement, places, tried
from launcher.study.preprocessing_hosts import REMOTE


def charts(cells: Sequence[Cell], pipelines: Sequence[str], *, on_one_machine: bool) -> Picture:
    """Both charts as SVG.

    Args:
        on_one_machine: whether all hosts share one machine, so that remote is not compared.
    """
    there = tried(cells, pipelines)
    first, *others = [name for name in there if name != REMOTE or not on_one_machine] or there
    by_place = {(cell.model, cell.load, cell.pipeline): cell for cell in cells}
    where = places(cells)
    models = dict.fromkeys(model for model, _ in where)
    axis = tuple((model, tuple(str(load) for name, load in where if name == model)) for model in models)

    def seconds(pipeline: str) -> tuple[Spread | None, ...]:
        found = (by_place.get((*place, pipeline)) for place in where)
        return tuple(None if cell is None else cell.seconds for cell in found)

    def savings(pipeline: str) -> tuple[Spread | None, ...]:
        pairs = [(by_place.get((*place, first)), by_place.get((*place, pipeline))) for place in where]
        return tuple(improvement(one, other) if one and other else None for one, other in pairs)

    title, below = "Training time by model and augmentation load", "augmentation load"
    drawn = [BarChart(title, "seconds an epoch", axis, below, tuple((name, seconds(name)) for name in there))]
    if others:
        saved = tuple((name, savings(name)) for name in others)
        drawn.append(BarChart(f"Time saved beside {first}", "% of an epoch's time", axis, below, saved, first_colour=1))
    return bar_charts(drawn)
