"""Small HTML for a notebook's output, in the page's own colours, light or dark; it loads nothing.

JupyterLab removes scripts, SVG elements and some styles from a notebook that it does not trust, so none are used: pictures are
images, and each style is one that it keeps, which needs a digit before a decimal point:
https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from launcher.show import palette
from launcher.show.text import written

DIM, LINE, FILLED = "opacity:0.75", "border-bottom:1px solid rgba(127,127,127,0.3)", palette.PROGRESS
"""They suit any text and background of a notebook: an output cannot know its theme."""

CELL = f"text-align:left;vertical-align:top;{LINE}"

CURVE_POINTS, CURVE_WIDTH, CURVE_HEIGHT = 120, 260, 56
"""Of a drawn curve: most points, and pixels."""

Rows = Sequence[tuple[str, str]]

Renderer = Callable[[str], str]
"""How an SVG document is shown: as an `image` in a notebook, `inline` on a page."""


def box(title: str, about: str, body: str, end: str = "") -> str:
    """A title with what it is about, a body, and a line below it."""
    head = f"<b>{escape(title)}</b>" + (f" <span style='{DIM}'>{escape(about)}</span>" if about else "")
    tail = f"<div style='{DIM};margin-top:4px'>{escape(end)}</div>" if end else ""
    return f"<div style='max-width:56em;font-size:13px;line-height:1.5'><div>{head}</div>{body}{tail}</div>"


def pairs(rows: Rows) -> str:
    """A table of names and values; "" if there are none."""
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td style='white-space:nowrap;padding:1px 12px 1px 0;{DIM};{CELL}'>{escape(name)}</td>"
        f"<td style='white-space:pre-wrap;padding:1px 0;{CELL}'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    table = f"<table style='border-collapse:collapse;margin:4px 0'><tbody>{lines}</tbody></table>"
    return f"<div style='overflow-x:auto'>{table}</div>"


def more(title: str, rows: Rows) -> str:
    """Rows that a click unfolds."""
    return f"<details><summary>{len(rows)} {escape(title)}</summary>{pairs(rows)}</details>" if rows else ""


def note(level: str, text: str) -> str:
    """A paragraph with an edge in the colour of its level: error, warning, or anything else."""
    colour = {"error": palette.SEVERITIES["bad"][0], "warning": palette.SEVERITIES["risk"][0]}.get(
        level, "rgba(127,127,127,0.6)"
    )
    return (
        f"<div style='border-left:4px solid {colour};padding:2px 8px;margin:6px 0;white-space:pre-wrap'>"
        f"<b>{escape(level)}</b> {escape(text)}</div>"
    )


def bar(share: float) -> str:
    """A progress bar for a share, 0 to 1."""
    return (
        "<div style='height:6px;margin:4px 0;background:rgba(127,127,127,0.25);border-radius:3px' role='progressbar' "
        f"aria-valuemin='0' aria-valuemax='100' aria-valuenow='{share * 100:.0f}'>"
        f"<div style='height:6px;border-radius:3px;width:{share * 100:.1f}%;background:{FILLED}'></div></div>"
    )


def xml_text(text: str) -> str:
    """Text escaped for XML, without the characters that it forbids: https://www.w3.org/TR/xml/#charsets"""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text))


def image(svg: str) -> str:
    """An SVG document as an image, "" for none. Its title is the alternative text."""
    if not svg:
        return ""
    title = re.search(r"<title>(.*?)</title>", svg, re.DOTALL)
    data = base64.b64encode(svg.encode()).decode()
    alt = title[1].replace("'", "&#x27;") if title else ""
    return f"<img alt='{alt}' src='data:image/svg+xml;base64,{data}' style='max-width:100%;height:auto'/>"


def inline(svg: str) -> str:
    """An SVG document as part of a page, with searchable text and tooltips; "" for none."""
    return f"<div class='picture'>{svg}</div>" if svg else ""


def curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """A small line of one number over the steps, "" for fewer than two points."""
    points = [point for point in points if abs(point[1]) < float("inf")]  # nan and inf are nowhere on it
    if len(points) < 2:
        return ""
    every = -(-len(points) // CURVE_POINTS)
    points = [*points[:-1:every], points[-1]]
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    drawn = " ".join(
        f"{(step - first) / max(last - first, 1) * CURVE_WIDTH:.1f},{(high - value) / ((high - low) or 1) * CURVE_HEIGHT + 2:.1f}"
        for step, value in points
    )
    ends = f"{name.replace('_', ' ')}: {points[0][1]:.4g} at step {first}, {points[-1][1]:.4g} at step {last}"
    line = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{CURVE_WIDTH}' height='{CURVE_HEIGHT + 4}'>"
        f"<title>{xml_text(name.replace('_', ' '))}</title>"
        f"<polyline points='{drawn}' fill='none' stroke='{FILLED}' stroke-width='1.5'/></svg>"
    )
    return (
        f"<div style='display:inline-block;margin:4px 24px 4px 0'>{image(line)}"
        f"<div style='{DIM};font-size:11px'>{escape(ends)}</div></div>"
    )


def rows(values: Mapping[str, Any]) -> Rows:
    """Nested values, one row per name."""
    return [(name, written(value)) for name, value in values.items()]
