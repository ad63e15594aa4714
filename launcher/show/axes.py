"""The value axis of a chart: round marks, grid lines and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.show import svg

LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 66, 24, 64, 240, 62
"""Pixels: the margins of a chart's area, and its height."""


class ValueAxis:
    """The vertical axis of a chart.

    Args:
        values: what must fit; the axis includes 0.
        base: y of the area's lower edge.
    """

    def __init__(self, values: Sequence[float], base: float):
        self.marks = ticks(min(values, default=0), max(values, default=1))
        self.base = base

    def y(self, value: float) -> float:
        """Where a value is drawn."""
        low, high = self.marks[0], self.marks[-1]
        return self.base - (value - low) / (high - low) * HEIGHT

    def drawn(self, unit: str, width: float) -> list[str]:
        """Grid lines with their numbers, and the unit beside them.

        Args:
            width: of the whole chart.
        """
        parts = []
        for mark in self.marks:
            kind, y = "axis" if mark == 0 else "grid", self.y(mark)
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(svg.text(LEFT - 8, y + 4, f"{mark:g}", "faint", "end"))
        return [*parts, svg.text(16, self.base - HEIGHT / 2, unit, anchor="middle", turned=True)]


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose all values and 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    span = high - low or 1.0
    raw = span / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]
