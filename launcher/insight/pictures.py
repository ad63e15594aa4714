"""Two runs in one picture: where a step's time goes before and after, and how busy the cores were meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.insight import charts, summary
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Series
from launcher.show import svg
from launcher.show.bars import StackedBars, stacked_bars
from launcher.show.heat import Band, heat_map

PHASE_COLOURS = (
    *("#d1495b", "#e9a23b", "#8f6bb3", "#2a9d8f", "#3a7ebf"),
    *("#7fb2e5", "#9aa56b", "#1f5f8b", "#6c757d", "#b08968", "#c77da6"),
)
"""Those of the diagnosis's page, by the number of a phase's colour."""

UNNAMED_COLOUR, BESIDE_COLOUR = "#c3c9d0", "#8d96a0"
"""Of the part of a step that is in no phase, and of what passes beside the steps."""

LEFT, WIDTH, RIGHT = 70, 560, 110
"""Pixels of the names, of what is drawn, and of the totals."""

MOST_CELLS, MOST_BINS, FEWEST_BINS = 2400, 112, 16
"""Of a heat map: each is an element of the picture."""

MOST_CORES = 96
"""Rows of a heat map; a larger host shows its first ones."""

Course = Sequence[tuple[str, float | None, float | None]]


def before_and_after(course: Course, unit: str, about: str, runs: Sequence[tuple[str, Evidence]]) -> str:
    """Stacked bars of where the training time goes, and a heat map of the cores, for two runs, as SVG.

    Args:
        course: (phase, before, after), what passed beside the steps, and last the whole.
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
    more, y = _heat_maps(runs, y)
    return svg.document(LEFT + WIDTH + RIGHT, round(y), "Before and after", [*elements, *more])


def _heat_maps(runs: Sequence[tuple[str, Evidence]], y: float) -> tuple[list[str], float]:
    """How busy each core of the first host was while steps ran, both runs on one scale of time; and where the maps end."""
    found = [(name, *_cores(evidence)) for name, evidence in runs]
    rare = [name for name, cores, _ in found if any(len(core.values) < charts.FEWEST_SAMPLES for core in cores)]
    found = [one for one in found if one[0] not in rare]
    longest = max((seconds for _, _, seconds in found), default=0.0)
    if not longest or not any(cores for _, cores, _ in found):
        why = f"no map of the cores: {' and '.join(rare)} sampled them only once"
        return ([svg.text(12, y, why, "faint")], y + 24) if rare else ([], y)
    number = max(len(cores) for _, cores, _ in found)
    bins = max(FEWEST_BINS, min(MOST_BINS, MOST_CELLS // number))
    bands = []
    for name, cores, seconds in found:
        here = max(1, round(bins * seconds / longest))
        means = (charts.binned(core, core.times[0], core.times[0] + seconds, here)[0] for core in cores)
        rows = tuple(_filled(row).tolist() for row in means)  # a sample tells of the time since the one before
        bands.append(Band(name, rows, f"{seconds:.0f} s"))
    title = "How busy each core is during the steps: the stronger the colour, the busier"
    title += f" ({' and '.join(rare)}: sampled only once)" if rare else ""
    return heat_map(title, bands, LEFT, y, WIDTH / bins, max(4, min(16, 160 // number)))


def _filled(values: np.ndarray) -> np.ndarray:
    """(n,) each missing value as the next one that is known; after the last, 0."""
    known = np.flatnonzero(np.isfinite(values))
    following = np.searchsorted(known, np.arange(len(values)))
    return np.where(following < len(known), values[known[np.minimum(following, len(known) - 1)]], 0.0)


def _cores(evidence: Evidence) -> tuple[list[Series], float]:
    """Records of the first watched host's cores while steps ran, and how many seconds that was."""
    host = next(iter(evidence.hosts), None)
    if host is None or not host.cores:
        return [], 0.0
    began, ended = evidence.period
    found = []
    for core in list(host.cores.values())[:MOST_CORES]:
        inside = (core.times >= began) & (core.times <= ended)
        if inside.any():
            found.append(Series(core.times[inside], core.values[inside]))
    return found, max((float(core.times[-1] - core.times[0]) for core in found), default=0.0)


def _colour(phase: str) -> str:
    if phase.startswith(("(no phase)", "beside the steps")):
        return UNNAMED_COLOUR if phase.startswith("(") else BESIDE_COLOUR
    return PHASE_COLOURS[summary.colour(phase) % len(PHASE_COLOURS)]
