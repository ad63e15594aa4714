"""Two runs in one picture, as SVG text: where a step's time goes before and after, and how busy the cores were meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

import numpy as np

from launcher.insight import charts, summary
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Series

STYLE = """
.before-after { background: #ffffff; font-family: system-ui, sans-serif; font-size: 12px }
.before-after text { fill: #1a1a1a } .before-after .faint { fill: #555555 } .before-after .title { font-size: 15px; font-weight: 600 }
.before-after .on { fill: #ffffff } .before-after .heat { fill: #08306b } .before-after .cold { fill: #edf1f7 }
@media (prefers-color-scheme: dark) {
  .before-after { background: #16181c } .before-after text { fill: #e8e8e8 } .before-after .faint { fill: #b0b0b0 }
  .before-after .heat { fill: #ffd76a } .before-after .cold { fill: #232a36 }
}
"""
"""Of this picture alone: in a notebook it stands in the page of others."""

PHASE_COLOURS = (
    *("#d1495b", "#e9a23b", "#8f6bb3", "#2a9d8f", "#3a7ebf"),
    *("#7fb2e5", "#9aa56b", "#1f5f8b", "#6c757d", "#b08968"),
)
"""Those of the diagnosis's page, by the number of a phase's colour."""

UNNAMED_COLOUR, BESIDE_COLOUR = "#c3c9d0", "#8d96a0"
"""Of what of a step is in no phase, and of what passes beside the steps."""

LEFT, WIDTH, RIGHT = 70, 560, 110
"""Pixels of the names, of what is drawn, and of the totals."""

BAR, ROW_GAP = 28, 12
"""Pixels."""

MOST_CELLS, MOST_BINS, FEWEST_BINS = 2400, 112, 16
"""Of a heat map: each is an element of the picture."""

MOST_CORES = 96
"""Rows of a heat map; of a larger host the first so many."""

LEAST_LABEL = 46
"""Pixels of a bar's part that holds its number."""

Course = Sequence[tuple[str, float | None, float | None]]


def before_and_after(course: Course, unit: str, about: str, runs: Sequence[tuple[str, Evidence]]) -> str:
    """Stacked bars of where the training time goes, and a heat map of the cores, for two runs.

    Args:
        course: (phase, before, after), what passed beside the steps, and last the whole.
        unit: of these.
        about: a line below the title; "" for none.
        runs: (name, evidence) of the one before and the one after.
    """
    lines, y = _bars(course, unit, about, [name for name, _ in runs])
    more, y = _heat_maps(runs, y)
    width = LEFT + WIDTH + RIGHT
    size = f'width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="before-after" {size} role="img">'
    return "\n".join([head, "<title>Before and after</title>", f"<style>{STYLE}</style>", *lines, *more, "</svg>", ""])


def _bars(course: Course, unit: str, about: str, names: Sequence[str]) -> tuple[list[str], int]:
    """The bars with their legend, and where they end."""
    *parts, (_, *whole) = course
    longest = max([value for value in whole if value is not None], default=0.0) or 1.0
    lines = [f'<text class="title" x="12" y="26">Where the training time goes, {escape(unit)}</text>']
    lines += [f'<text class="faint" x="12" y="44">{escape(about)}</text>'] if about else []
    y = 62
    for place, name in enumerate(names):
        x = float(LEFT)
        lines.append(f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        for phase, *seconds in parts:
            value = seconds[place]
            if not value:
                continue
            wide = value / longest * WIDTH
            told = f"{name}, {phase}: {value:.4g} {unit}"
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{_colour(phase)}"><title>{escape(told)}</title></rect>'
            )
            if wide >= LEAST_LABEL:
                lines.append(
                    f'<text class="on" x="{x + wide / 2:.1f}" y="{y + 18}" text-anchor="middle">{value:.3g}</text>'
                )
            x += wide
        total = whole[place]
        if total is not None:
            lines.append(f'<text x="{x + 8:.1f}" y="{y + 18}" font-weight="600">{total:.4g}</text>')
        y += BAR + ROW_GAP
    x = LEFT
    for phase, *_ in parts:
        wide = 26 + int(7 * len(phase))
        if x + wide > LEFT + WIDTH + RIGHT:
            x, y = LEFT, y + 20
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_colour(phase)}"/>')
        lines.append(f'<text class="faint" x="{x + 17}" y="{y + 10}">{escape(phase)}</text>')
        x += wide
    return lines, y + 40


def _heat_maps(runs: Sequence[tuple[str, Evidence]], y: int) -> tuple[list[str], int]:
    """How busy each core of the first host was while steps ran, both runs on one scale of time; and where the maps end."""
    rows = [(name, *_cores(evidence)) for name, evidence in runs]
    seconds = max((span for _, _, span in rows), default=0.0)
    if not seconds or not any(cores for _, cores, _ in rows):
        return [], y
    number = len(max((cores for _, cores, _ in rows), key=len))
    high = max(4, min(16, 160 // number))
    bins = max(FEWEST_BINS, min(MOST_BINS, MOST_CELLS // number))
    cell = WIDTH / bins
    title = "How busy each core is while the steps run: the stronger the colour, the busier"
    lines = [f'<text class="title" x="12" y="{y}">{title}</text>']
    y += 16
    for name, cores, span in rows:
        here = max(1, round(bins * span / seconds))
        top = y
        for core in cores:
            means, _ = charts.binned(core, core.times[0], core.times[0] + span, here)
            lines.append(f'<rect class="cold" x="{LEFT}" y="{y}" width="{here * cell:.1f}" height="{high - 1}"/>')
            means = _filled(means)  # a sample tells of the time since the one before
            strengths = [round(min(max(value, 0), 100) / 5) * 5 for value in means]
            place = 0
            for strength, alike in itertools.groupby(strengths):
                count = len(list(alike))
                at = f'x="{LEFT + place * cell:.1f}" y="{y}" width="{count * cell:.1f}" height="{high - 1}"'
                lines += [f'<rect class="heat" {at} opacity="{strength / 100:g}"/>'] if strength else []
                place += count
            y += high
        lines.append(f'<text x="{LEFT - 10}" y="{(top + y) // 2 + 4}" text-anchor="end">{escape(name)}</text>')
        lines.append(
            f'<text class="faint" x="{LEFT + here * cell + 8:.0f}" y="{(top + y) // 2 + 4}">{span:.0f} s</text>'
        )
        y += ROW_GAP
    return lines, y + 12


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
