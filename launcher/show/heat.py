"""Heat maps as SVG: bands of rows; the higher a cell's value, the stronger its colour."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.show import svg

BAND_GAP = 12
"""Pixels between two bands."""

STEP = 5
"""Percent: neighbours that round to the same multiple are one element."""


@dataclass(frozen=True)
class Band:
    """Rows of percentages over the same time."""

    name: str
    rows: tuple[Sequence[float], ...]
    """Of one length each: percent, clipped to 0 to 100."""
    label: str = ""
    """Written after the band."""


def heat_map(title: str, bands: Sequence[Band], left: int, y: float, cell: float, high: int) -> tuple[list[str], float]:
    """Bands below each other, as elements of a document.

    Args:
        left: pixels of the bands' names.
        y: of the title.
        cell, high: pixels of a cell.

    Returns:
        The elements, and where they end.
    """
    parts = [svg.text(12, y, title, "title")]
    y += 16
    for band in bands:
        top, wide = y, max((len(row) for row in band.rows), default=0) * cell
        for row in band.rows:
            parts.append(svg.rect(left, y, len(row) * cell, high - 1, 'class="cold"'))
            strengths = [round(min(max(value, 0), 100) / STEP) * STEP for value in row]
            place = 0
            for strength, alike in itertools.groupby(strengths):
                count = len(list(alike))
                if strength:
                    look = f'class="heat" opacity="{strength / 100:g}"'
                    parts.append(svg.rect(left + place * cell, y, count * cell, high - 1, look))
                place += count
            y += high
        middle = (top + y) / 2 + 4
        parts += [svg.text(left - 10, middle, band.name, anchor="end"), svg.text(left + wide + 8, middle, band.label, "faint")]  # fmt: skip
        y += BAND_GAP
    return parts, y + 12
