"""Two runs in one picture: where a step's time goes before and after, and how busy cores and GPUs were meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from launcher.insight import charts, summary
from launcher.insight.evidence import Evidence
from launcher.insight.findings import percent
from launcher.insight.measurements import Host, Series
from launcher.show import palette, svg
from launcher.show.bars import StackedBars, stacked_bars
from launcher.show.heat import Band, heat_map

LEFT, WIDTH, RIGHT = 70, 560, 110
"""Pixels of the names, the drawing, and the totals."""

MAX_CELLS, MAX_BINS, MIN_BINS = 2400, 112, 16
"""Limits of a heat map: each cell is an element of the picture."""

MAX_ROWS = 96
"""Of a heat map; a larger host shows only its first cores."""

Course = Sequence[tuple[str, float | None, float | None]]


def one_run(evidence: Evidence) -> svg.Picture:
    """A stacked bar of where the training time goes, as SVG; "" if no step was timed."""
    course = summary.course(evidence)
    whole = sum(course.values())
    if not whole:
        return svg.Picture()
    shares = {
        part: (f"{part} {percent(seconds / whole)}", seconds / whole) for part, seconds in course.items() if seconds
    }
    bars = StackedBars(
        title="Where the training time goes",
        unit="%",
        rows=("",),
        parts=tuple((name, _colour(part), (100 * share,)) for part, (name, share) in shares.items()),
        totals=(None,),
    )
    elements, y = stacked_bars(bars, 12, LEFT + WIDTH + RIGHT - 24, 12)
    about = f"{bars.title}: {', '.join(name for name, _ in shares.values())}"
    return svg.document(LEFT + WIDTH + RIGHT, round(y), about, elements)


def before_and_after(course: Course, unit: str, about: str, runs: Sequence[tuple[str, Evidence]]) -> svg.Picture:
    """Stacked bars of where the training time goes, and heat maps of the cores and the GPUs, for two runs, as SVG.

    Args:
        course: (phase, before, after), then the time outside the steps, and last the whole.
        unit: of these.
        about: a line below the title; "" for none.
        runs: (name, evidence) of the one before and the one after.
    """
    *parts, (_, *totals) = course
    bars = StackedBars(
        title="Where the training time goes",
        unit=unit,
        rows=tuple(name for name, _ in runs),
        parts=tuple((phase, _colour(phase), tuple(seconds)) for phase, *seconds in parts),
        totals=tuple(totals),
        about=about,
    )
    elements, y = stacked_bars(bars, LEFT, WIDTH, RIGHT)
    for what in ("core", "GPU"):
        more, y = _heat_maps(runs, what, y)
        elements = [*elements, *more]
    return svg.document(LEFT + WIDTH + RIGHT, round(y), "Before and after", elements)


def _heat_maps(runs: Sequence[tuple[str, Evidence]], what: str, y: float) -> tuple[list[str], float]:
    """How busy each core or GPU of the first host was while steps ran, both runs on one time scale; and where the maps end."""
    found = [(name, *_during_steps(evidence, what)) for name, evidence in runs]
    rare = [name for name, series, _ in found if any(len(one.values) < charts.MIN_SAMPLES for one in series)]
    found = [one for one in found if one[0] not in rare and one[1]]
    longest = max((seconds for _, _, seconds in found), default=0.0)
    if not longest:
        why = f"no map of the {what}s: {' and '.join(rare)} sampled them only once"
        return ([svg.text(12, y, why, "faint")], y + 24) if rare else ([], y)
    number = max(len(series) for _, series, _ in found)
    bins = max(MIN_BINS, min(MAX_BINS, MAX_CELLS // number))
    bands = []
    for name, series, seconds in found:
        here = max(1, round(bins * seconds / longest))
        means = (charts.binned(one, one.times[0], one.times[0] + seconds, here)[0] for one in series)
        rows = tuple(_filled(row).tolist() for row in means)  # a sample covers the time since the one before
        bands.append(Band(name, rows, f"{seconds:.0f} s"))
    title = f"How busy each {what} is during the steps: the stronger the colour, the busier"
    title += f" ({' and '.join(rare)}: sampled only once)" if rare else ""
    return heat_map(title, bands, LEFT, y, WIDTH / bins, max(4, min(16, 160 // number)))


def _filled(values: np.ndarray) -> np.ndarray:
    """(n,) with each missing value replaced by the next known one; after the last, 0."""
    known = np.flatnonzero(np.isfinite(values))
    following = np.searchsorted(known, np.arange(len(values)))
    return np.where(following < len(known), values[known[np.minimum(following, len(known) - 1)]], 0.0)


def _during_steps(evidence: Evidence, what: str) -> tuple[list[Series], float]:
    """Records of the first watched host's cores or GPUs while steps ran, and how many seconds that was."""
    host = next(iter(evidence.hosts), Host(name=""))
    every: Mapping[str, Series] = host.cores if what == "core" else host.gpus
    stepping = (evidence.while_stepping(one) for one in list(every.values())[:MAX_ROWS])
    found = [one for one in stepping if len(one.values)]
    return found, max((float(one.times[-1] - one.times[0]) for one in found), default=0.0)


def _colour(phase: str) -> str:
    if phase == summary.PAUSES:
        return palette.BESIDE[0]
    return (palette.UNNAMED if phase == summary.UNNAMED else palette.PHASES[summary.colour(phase)])[0]
