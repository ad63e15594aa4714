"""Bar charts as SVG: groups of bars with the range of each value, and stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.show import svg
from launcher.show.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, ValueAxis
from launcher.show.palette import text_upon
from launcher.show.spread import Spread
from launcher.show.text import three_digits

BAR, GAP, SECTION_GAP = 30, 14, 26
"""Pixels: the width of a bar, and the gaps between groups and between sections."""

STACK_HEIGHT, STACK_GAP = 28, 12
"""Pixels of a stacked bar."""

MIN_LABEL = 46
"""Pixels from which a part of a stacked bar shows its number."""


@dataclass(frozen=True)
class BarChart:
    """Bars of several series over the same groups."""

    title: str
    unit: str
    """Of the values, along the axis."""
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    """A name, and the names of its groups, from left to right."""
    group_axis: str
    """What the groups' names are, for example "batch size"."""
    series: tuple[tuple[str, tuple[Spread | None, ...]], ...]
    """A name, and a value for each group of all sections; None: no bar."""
    first_colour: int = 0
    """Index in svg.COLOURS of the first series' colour."""


def bar_charts(charts: Sequence[BarChart]) -> svg.Picture:
    """One SVG document: the charts below each other."""
    width = max(_width(chart) for chart in charts)
    whole = TOP + HEIGHT + BOTTOM
    parts = [line for place, chart in enumerate(charts) for line in _draw(chart, place * whole, width)]
    return svg.document(width, whole * len(charts), "; ".join(chart.title for chart in charts), parts)


def _width(chart: BarChart) -> int:
    wide = _groups(chart) * (BAR * len(chart.series) + GAP) + SECTION_GAP * len(chart.sections)
    legend = sum(svg.legend_width(name) for name, _ in chart.series)
    return LEFT + RIGHT + max(wide, legend, 10 * len(chart.title))


def _groups(chart: BarChart) -> int:
    return sum(len(names) for _, names in chart.sections)


def _draw(chart: BarChart, top: int, width: int) -> list[str]:
    values = [value for _, series in chart.series for value in series if value is not None]
    base = top + TOP + HEIGHT
    axis = ValueAxis([end for value in values for end in (value.low, value.high)], base)
    colours = [svg.COLOURS[(chart.first_colour + place) % len(svg.COLOURS)] for place in range(len(chart.series))]
    entries = [(name, colour) for (name, _), colour in zip(chart.series, colours)]
    legend, _ = svg.legend(entries, LEFT, top + 36, width)
    parts = [svg.text(LEFT, top + 24, chart.title, "title"), *legend, *axis.drawn(chart.unit, width)]
    group_width = (width - LEFT - RIGHT - SECTION_GAP * len(chart.sections)) / _groups(chart)
    x, group = LEFT + SECTION_GAP / 2, 0
    for name, names in chart.sections:
        began = x
        for label in names:
            center = x + group_width / 2
            parts.append(svg.text(center, base + 18, label, "faint", "middle"))
            left = center - BAR * len(chart.series) / 2
            for place, (colour, (series, column)) in enumerate(zip(colours, chart.series)):
                value = column[group]
                if value is not None:
                    tip = f"{name}, {chart.group_axis} {label}, {series}"
                    parts += _bar(value, left + place * BAR, axis, colour, tip, chart.unit)
            x += group_width
            group += 1
        parts.append(svg.text((began + x) / 2, base + 36, name, anchor="middle"))
        x += SECTION_GAP
    return [*parts, svg.text(LEFT, base + 54, chart.group_axis, "faint")]


def _bar(value: Spread, x: float, axis: ValueAxis, colour: str, tip: str, unit: str) -> list[str]:
    """A bar from 0 to the median, its range if any, its number, and its tooltip."""
    top, bottom = sorted((axis.y(value.median), axis.y(0)))
    ends = f"{three_digits(value.low)} to {three_digits(value.high)}, n = {len(value.values)}"
    tip = f"{tip}: {three_digits(value.median)} {unit}, {ends}"
    parts = [svg.rect(x + 2, top, BAR - 4, bottom - top, f'fill="{colour}"', tip)]
    middle, upper, lower = x + BAR / 2, axis.y(value.high), axis.y(value.low)
    if value.high > value.low:
        parts.append(svg.range_bar(middle, upper, lower))
    label = min(top, upper) - 4 if value.median >= 0 else max(bottom, lower) + 11
    return [*parts, svg.text(middle, label, three_digits(value.median), "value", "middle")]


@dataclass(frozen=True)
class StackedBars:
    """Horizontal bars of the same parts below each other, on one scale."""

    title: str
    unit: str
    rows: tuple[str, ...]
    parts: tuple[tuple[str, str, tuple[float | None, ...]], ...]
    """A part's name, its colour, and its value in each row; None or 0: not drawn."""
    totals: tuple[float | None, ...]
    """Of each row, written after it; None: not known."""
    about: str = ""
    """A line below the title."""


def stacked_bars(chart: StackedBars, left: int, width: int, right: int) -> tuple[list[str], float]:
    """The bars with their legend, as elements of a document.

    Args:
        left, width, right: pixels of the rows' names, of the longest bar, and of the totals.

    Returns:
        The elements, and where they end.
    """
    lengths = [total or sum(values[row] or 0.0 for *_, values in chart.parts) for row, total in enumerate(chart.totals)]
    longest = max(lengths, default=0.0) or 1.0
    elements = [svg.text(12, 26, f"{chart.title}, {chart.unit}", "title")]
    elements += [svg.text(12, 44, chart.about, "faint")] if chart.about else []
    y = 62.0 if chart.about else 40.0
    for row, name in enumerate(chart.rows):
        x = float(left)
        elements.append(svg.text(left - 10, y + 18, name, anchor="end"))
        for part, colour, values in chart.parts:
            value = values[row]
            if not value:
                continue
            wide = value / longest * width
            tip = f"{f'{name}, ' if name else ''}{part}: {value:.4g} {chart.unit}"
            elements.append(svg.rect(x, y, wide, STACK_HEIGHT, f'fill="{colour}"', tip))
            if wide >= MIN_LABEL:
                label = svg.text(x + wide / 2, y + 18, three_digits(value), anchor="middle", fill=text_upon(colour))
                elements.append(label)
            x += wide
        total = chart.totals[row]
        if total is not None:
            elements.append(svg.text(x + 8, y + 18, three_digits(total), "total"))
        y += STACK_HEIGHT + STACK_GAP
    legend, y = svg.legend([(part, colour) for part, colour, _ in chart.parts], left, y, left + width + right)
    return [*elements, *legend], y + 40
