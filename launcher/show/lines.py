"""Line charts as SVG: values over a count, with the range of each, beside a dashed ideal line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher.show import svg
from launcher.show.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, ValueAxis
from launcher.show.spread import Spread
from launcher.show.text import three_digits

WIDTH, ROW = 640, 18
"""Pixels: of a chart, and of a line of its legend."""

DIGIT, GAP = 7, 6
"""Pixels of a digit on the horizontal axis, and between two numbers there: one that would touch the last is left out."""

UNCOLOURED, DASHED = "#808080", 'stroke-dasharray="5 4" opacity="0.7"'
"""Colour of a legend's sign, which stands for those of every curve; and the look of an ideal line."""

Sign = Literal["dot", "cross", "ring"]
"""dot: on the solid line. ring: on the dotted line that goes on from the dots, and an estimate without a range. cross: on no line."""


@dataclass(frozen=True)
class Mark:
    """A value at a count."""

    count: int
    value: Spread
    sign: Sign = "dot"


@dataclass(frozen=True)
class Curve:
    """Values on one line."""

    name: str
    marks: tuple[Mark, ...]
    ideal: tuple[tuple[float, float], ...] = ()
    """(count, value), from left to right; in the same colour, dashed."""


@dataclass(frozen=True)
class LineChart:
    """Curves over a count."""

    title: str
    unit: str
    """Of the values, along the axis."""
    counted: str
    """What the horizontal axis counts, in the plural."""
    curves: tuple[Curve, ...]
    signs: Mapping[Sign, str] = field(default_factory=dict)
    """What each sign means, for the legend and tooltips."""


def line_charts(charts: Sequence[LineChart]) -> svg.Picture:
    """One SVG document: the charts below each other."""
    parts, top = [], 0
    for chart in charts:
        parts += _draw(chart, top)
        top += TOP + ROW * (len(chart.curves) - 1) + HEIGHT + BOTTOM
    return svg.document(WIDTH, top, "; ".join(chart.title for chart in charts), parts)


def _legend(chart: LineChart, y: float) -> list[str]:
    """The chart's signs and lines, each with its meaning."""
    there = {mark.sign for curve in chart.curves for mark in curve.marks}
    parts, x = [], float(LEFT)
    for sign, meaning in chart.signs.items():
        if sign in there:
            parts += [_sign(sign, x + 5, y - 4, UNCOLOURED), svg.text(x + 16, y, meaning, "faint")]
            x += svg.legend_width(meaning)
    if any(curve.ideal for curve in chart.curves):
        line = f'<path d="M{x:.1f} {y - 4:.1f} h22" stroke="{UNCOLOURED}" {DASHED} fill="none"/>'
        parts += [line, svg.text(x + 28, y, "ideal line", "faint")]
    return parts


def _draw(chart: LineChart, top: int) -> list[str]:
    values = [value for curve in chart.curves for mark in curve.marks for value in (mark.value.low, mark.value.high)]
    values += [value for curve in chart.curves for _, value in curve.ideal]
    counts = [mark.count for curve in chart.curves for mark in curve.marks]
    left, right = LEFT + 12, WIDTH - RIGHT - 12
    base = top + TOP + ROW * (len(chart.curves) - 1) + HEIGHT
    most, least = max(counts, default=1), min(counts, default=1)
    axis = ValueAxis(values, base)

    def x(count: float) -> float:
        return left + (count - least) / max(most - least, 1) * (right - left)

    parts = [svg.text(LEFT, top + 24, chart.title, "title")]
    for place, curve in enumerate(chart.curves):
        at = top + 46 + ROW * place
        parts += [svg.rect(LEFT, at - 10, 12, 12, f'fill="{_colour(place)}"'), svg.text(LEFT + 18, at, curve.name)]
    parts += axis.drawn(chart.unit, WIDTH)
    free = 0.0
    for count in sorted(set(counts)):
        half = DIGIT * len(str(count)) / 2
        if x(count) - half >= free:
            free = x(count) + half + GAP
            parts.append(svg.text(x(count), base + 18, str(count), "faint", "middle"))
    parts.append(svg.text(LEFT, base + 36, chart.counted, "faint"))
    parts += _legend(chart, base + 54)
    for place, curve in enumerate(chart.curves):
        parts += _curve(curve, chart, _colour(place), x, axis)
    return parts


def _colour(place: int) -> str:
    return svg.COLOURS[place % len(svg.COLOURS)]


def _curve(curve: Curve, chart: LineChart, colour: str, x: Callable[[float], float], axis: ValueAxis) -> list[str]:
    def path(points: Sequence[tuple[float, float]], style: str) -> str:
        places = " ".join(f"{x(count):.1f},{axis.y(value):.1f}" for count, value in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>'

    parts = [path(curve.ideal, DASHED)] if curve.ideal else []
    for signs, style in ((("dot",), ""), (("dot", "ring"), ' stroke-dasharray="1 3"')):
        points = [(mark.count, mark.value.median) for mark in curve.marks if mark.sign in signs]
        if len(points) > 1:
            parts.append(path(points, f'stroke-width="1.5"{style}'))
    for mark in curve.marks:
        at, value = x(mark.count), mark.value
        if value.high > value.low:
            parts.append(svg.range_bar(at, axis.y(value.low), axis.y(value.high)))
        meaning = f", {chart.signs[mark.sign]}" if mark.sign in chart.signs else ""
        tip = f"{curve.name}, {mark.count} {chart.counted}{meaning}: {three_digits(value.median)} {chart.unit}"
        if mark.sign != "ring":
            tip += f", {three_digits(value.low)} to {three_digits(value.high)}, n = {len(value.values)}"
        parts.append(_sign(mark.sign, at, axis.y(value.median), colour, tip))
    return parts


def _sign(sign: Sign, x: float, y: float, colour: str, tip: str = "") -> str:
    more = svg.title(tip) if tip else ""
    if sign == "cross":
        strokes = f"M{x - 4:.1f} {y - 4:.1f} l8 8 M{x + 4:.1f} {y - 4:.1f} l-8 8"
        return f'<path d="{strokes}" stroke="{colour}" stroke-width="2" fill="none">{more}</path>'
    look = f'fill="{colour if sign == "dot" else "none"}" stroke="{colour}" stroke-width="1.5"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}>{more}</circle>'
