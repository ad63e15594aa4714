"""Line charts as SVG text: values over the number of hosts beside a dashed ideal line. In the style of charts.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from launcher.study.charts import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, STYLE, TOP, number, ticks
from launcher.study.measures import Spread

WIDTH, ROW = 640, 18
"""Pixels: of a chart, and of a line of its legend."""

MEASURED, APART, PREDICTED = "measured", "shares cores", "predicted"


@dataclass(frozen=True)
class Mark:
    """A value at a number of hosts."""

    hosts: int
    value: Spread
    kind: str = MEASURED
    """measured (a filled dot), shares cores (a cross), predicted (a ring)."""


@dataclass(frozen=True)
class Curve:
    """The values of a line, and what they would be if nothing was lost."""

    name: str
    marks: tuple[Mark, ...]
    ideal: tuple[tuple[float, float], ...] = ()
    """(hosts, value), from left to right; in the same colour, dashed."""


@dataclass(frozen=True)
class LineChart:
    """Curves over the number of hosts."""

    title: str
    unit: str
    """Of the values, along the axis."""
    curves: tuple[Curve, ...]


def svg(charts: Sequence[LineChart]) -> str:
    """The charts below each other."""
    heights = [_height(chart) for chart in charts]
    whole = sum(heights)
    parts, top = [], 0
    for chart, height in zip(charts, heights):
        parts += _draw(chart, top)
        top += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="bars" width="{WIDTH}" height="{whole}" role="img"'
    title = escape("; ".join(chart.title for chart in charts))
    view = f'viewBox="0 0 {WIDTH} {whole}"'
    return "\n".join([f"{head} {view}>", f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _legend(chart: LineChart) -> list[str]:
    """What the signs mean, as far as they are there."""
    kinds = {mark.kind for curve in chart.curves for mark in curve.marks}
    signs = {MEASURED: "dot: measured", PREDICTED: "ring: predicted"}
    signs[APART] = "cross: hosts share cores"
    told = [signs[kind] for kind in (MEASURED, APART, PREDICTED) if kind in kinds]
    return [*told, "dashed: ideal line"] if any(curve.ideal for curve in chart.curves) else told


def _height(chart: LineChart) -> int:
    return TOP + ROW * (len(chart.curves) - 1) + HEIGHT + BOTTOM


def _draw(chart: LineChart, top: int) -> list[str]:
    values = [value for curve in chart.curves for mark in curve.marks for value in (mark.value.low, mark.value.high)]
    values += [value for curve in chart.curves for _, value in curve.ideal]
    across = [mark.hosts for curve in chart.curves for mark in curve.marks]
    marks = ticks(min(values, default=0), max(values, default=1))
    left, right = LEFT + 12, WIDTH - RIGHT - 12
    begin = top + TOP + ROW * (len(chart.curves) - 1)
    base, most, least = begin + HEIGHT, max(across, default=1), min(across, default=1)

    def x(hosts: float) -> float:
        return left + (hosts - least) / max(most - least, 1) * (right - left)

    def y(value: float) -> float:
        return base - (value - marks[0]) / (marks[-1] - marks[0]) * HEIGHT

    lines = [f'<text class="title" x="{LEFT}" y="{top + 24}">{escape(chart.title)}</text>']
    for place, curve in enumerate(chart.curves):
        at = top + 46 + ROW * place
        lines.append(f'<rect x="{LEFT}" y="{at - 10}" width="12" height="12" fill="{_colour(place)}"/>')
        lines.append(f'<text x="{LEFT + 18}" y="{at}">{escape(curve.name)}</text>')
    for mark in marks:
        kind = "axis" if mark == 0 else "grid"
        lines.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        lines.append(f'<text class="faint" x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    last = -100.0
    for hosts in sorted(set(across)):
        if x(hosts) - last >= 18:  # numbers that would touch are left out
            last = x(hosts)
            lines.append(f'<text class="faint" x="{last:.1f}" y="{base + 18}" text-anchor="middle">{hosts}</text>')
    middle = base - HEIGHT / 2
    turned = f'transform="rotate(-90 16 {middle})"'
    lines.append(f'<text x="16" y="{middle}" text-anchor="middle" {turned}>{escape(chart.unit)}</text>')
    lines.append(f'<text class="faint" x="{LEFT}" y="{base + 36}">hosts</text>')
    lines.append(f'<text class="faint" x="{LEFT}" y="{base + 54}">{escape("; ".join(_legend(chart)))}</text>')
    for place, curve in enumerate(chart.curves):
        lines += _curve(curve, _colour(place), x, y, chart.unit)
    return lines


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _curve(curve: Curve, colour: str, x: Callable[[float], float], y: Callable[[float], float], unit: str) -> list[str]:
    lines = []
    if curve.ideal:
        lines.append(_path(curve.ideal, x, y, f'stroke="{colour}" stroke-dasharray="5 4" opacity="0.7"'))
    for kinds, style in (((MEASURED,), ""), ((MEASURED, PREDICTED), ' stroke-dasharray="1 3"')):
        way = [(mark.hosts, mark.value.median) for mark in curve.marks if mark.kind in kinds]
        if len(way) > 1:
            lines.append(_path(way, x, y, f'stroke="{colour}" stroke-width="1.5"{style}'))
    for mark in curve.marks:
        at, value = x(mark.hosts), mark.value
        if value.high > value.low:
            ends = "".join(f" M{at - 4:.1f} {y(end):.1f} H{at + 4:.1f}" for end in (value.low, value.high))
            lines.append(f'<path class="range" d="M{at:.1f} {y(value.low):.1f} V{y(value.high):.1f}{ends}"/>')
        told = f"{curve.name}, {mark.hosts} hosts, {mark.kind}: {number(value.median)} {unit}"
        if mark.kind != PREDICTED:
            told += f", {number(value.low)} to {number(value.high)}, n = {len(value.values)}"
        lines.append(_sign(mark.kind, at, y(value.median), colour, told))
    return lines


def _path(
    way: Sequence[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float], style: str
) -> str:
    points = " ".join(f"{x(hosts):.1f},{y(value):.1f}" for hosts, value in way)
    return f'<polyline points="{points}" fill="none" {style}/>'


def _sign(kind: str, at: float, level: float, colour: str, told: str) -> str:
    tip = f"<title>{escape(told)}</title>"
    if kind == APART:
        ways = f"M{at - 4:.1f} {level - 4:.1f} l8 8 M{at + 4:.1f} {level - 4:.1f} l-8 8"
        return f'<path d="{ways}" stroke="{colour}" stroke-width="2" fill="none">{tip}</path>'
    filled = colour if kind == MEASURED else "none"
    return f'<circle cx="{at:.1f}" cy="{level:.1f}" r="4" fill="{filled}" stroke="{colour}" stroke-width="1.5">{tip}</circle>'
