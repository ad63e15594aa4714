"""Bar charts as SVG text: groups of bars side by side, with the range of each value. Follows the reader's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from launcher.study.measures import Spread

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette for all kinds of colour vision (https://jfly.uni-koeln.de/color/), blue, orange, green, purple."""

STYLE = """
.bars { background: #ffffff; font-family: system-ui, sans-serif; font-size: 12px }
.bars text { fill: #1a1a1a } .bars .faint { fill: #555555 } .bars .title { font-size: 15px; font-weight: 600 }
.bars .value { font-size: 10px } .bars .axis { stroke: #888888 } .bars .grid { stroke: #dddddd }
.bars .range { stroke: #1a1a1a; fill: none }
@media (prefers-color-scheme: dark) {
  .bars { background: #16181c } .bars text { fill: #e8e8e8 } .bars .faint { fill: #b0b0b0 }
  .bars .axis { stroke: #777777 } .bars .grid { stroke: #33363c } .bars .range { stroke: #e8e8e8 }
}
"""
"""Of the charts alone: in a notebook it stands in the page of others."""

BAR, GAP, SECTION_GAP = 30, 14, 26
LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 66, 24, 64, 240, 62
"""Pixels."""


@dataclass(frozen=True)
class Chart:
    """Bars of several series over the same groups."""

    title: str
    unit: str
    """Of the values, along the axis."""
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    """A name, and below it the names of its groups, from left to right."""
    groups_are: str
    """What a group's name is, for example "augmentation load"."""
    series: tuple[tuple[str, tuple[Spread | None, ...]], ...]
    """A name, and a value for each group of all sections; None: no bar."""
    first_colour: int = 0
    """Of COLOURS, for the first series."""


def svg(charts: Sequence[Chart]) -> str:
    """The charts below each other."""
    width = max(_width(chart) for chart in charts)
    whole = TOP + HEIGHT + BOTTOM
    parts = [line for number, chart in enumerate(charts) for line in _draw(chart, number * whole, width)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="bars" width="{width}" height="{whole * len(charts)}" role="img"'
    title = escape("; ".join(chart.title for chart in charts))
    view = f'viewBox="0 0 {width} {whole * len(charts)}"'
    return "\n".join([f"{head} {view}>", f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose all values and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    span = high - low or 1.0
    raw = span / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _width(chart: Chart) -> int:
    wide = _groups(chart) * (BAR * len(chart.series) + GAP) + SECTION_GAP * len(chart.sections)
    legend = sum(_legend_width(name) for name, _ in chart.series)
    return LEFT + RIGHT + max(wide, legend, 10 * len(chart.title))


def _groups(chart: Chart) -> int:
    return sum(len(names) for _, names in chart.sections)


def _legend_width(name: str) -> int:
    return 34 + int(7.6 * len(name))


def _draw(chart: Chart, top: int, width: int) -> list[str]:
    values = [value for _, series in chart.series for value in series if value is not None]
    marks = ticks(min((value.low for value in values), default=0), max((value.high for value in values), default=1))
    low, high = marks[0], marks[-1]
    base = top + TOP + HEIGHT

    def at(value: float) -> float:
        return base - (value - low) / (high - low) * HEIGHT

    lines = [f'<text class="title" x="{LEFT}" y="{top + 24}">{escape(chart.title)}</text>']
    x: float = LEFT
    colours = [COLOURS[(chart.first_colour + place) % len(COLOURS)] for place in range(len(chart.series))]
    for colour, (name, _) in zip(colours, chart.series):
        lines.append(f'<rect x="{x}" y="{top + 36}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{top + 46}">{escape(name)}</text>')
        x += _legend_width(name)
    for mark in marks:
        kind = "axis" if mark == 0 else "grid"
        lines.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{at(mark):.1f}" y2="{at(mark):.1f}"/>')
        lines.append(f'<text class="faint" x="{LEFT - 8}" y="{at(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    middle = base - HEIGHT / 2
    group_width = (width - LEFT - RIGHT - SECTION_GAP * len(chart.sections)) / _groups(chart)
    bars = BAR * len(chart.series)
    lines.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(chart.unit)}</text>'
    )
    x, group = LEFT + SECTION_GAP / 2, 0
    for name, names in chart.sections:
        began = x
        for label in names:
            center = x + group_width / 2
            lines.append(
                f'<text class="faint" x="{center:.1f}" y="{base + 18}" text-anchor="middle">{escape(label)}</text>'
            )
            left = center - bars / 2
            for place, (colour, (series, column)) in enumerate(zip(colours, chart.series)):
                value = column[group]
                if value is not None:
                    tip = f"{name}, {chart.groups_are} {label}, {series}"
                    lines += _bar(value, left + place * BAR, at, colour, tip, chart.unit)
            x += group_width
            group += 1
        lines.append(f'<text x="{(began + x) / 2:.1f}" y="{base + 36}" text-anchor="middle">{escape(name)}</text>')
        x += SECTION_GAP
    lines.append(f'<text class="faint" x="{LEFT}" y="{base + 54}">{escape(chart.groups_are)}</text>')
    return lines


def _bar(value: Spread, x: float, at: Callable[[float], float], colour: str, tip: str, unit: str) -> list[str]:
    """A bar from 0 to the median, its range where there is one, its number, and what a pointer on it is told."""
    top, bottom = sorted((at(value.median), at(0)))
    told = f"{tip}: {number(value.median)} {unit}, {number(value.low)} to {number(value.high)}, n = {len(value.values)}"
    place = f'x="{x + 2:.1f}" y="{top:.1f}" width="{BAR - 4}" height="{bottom - top:.1f}"'
    lines = [f'<rect {place} fill="{colour}"><title>{escape(told)}</title></rect>']
    middle, upper, lower = x + BAR / 2, at(value.high), at(value.low)
    if value.high > value.low:
        ends = "".join(f" M{middle - 4:.1f} {y:.1f} H{middle + 4:.1f}" for y in (upper, lower))
        lines.append(f'<path class="range" d="M{middle:.1f} {upper:.1f} V{lower:.1f}{ends}"/>')
    above = min(top, upper) - 4 if value.median >= 0 else max(bottom, lower) + 11
    return [
        *lines,
        f'<text class="value" x="{middle:.1f}" y="{above:.1f}" text-anchor="middle">{number(value.median)}</text>',
    ]


def number(value: float) -> str:
    """Three digits, more before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
