"""SVG text: a document, its style in light and dark, and the elements that charts are made of. Lengths are pixels."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.show.html import image, xml_text

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette for all kinds of colour vision (https://jfly.uni-koeln.de/color/): blue, orange, green, purple."""

STYLE = """
.figure { background: #ffffff; font-family: system-ui, sans-serif; font-size: 12px }
.figure text { fill: #1a1a1a } .figure .faint { fill: #555555 } .figure .title { font-size: 15px; font-weight: 600 }
.figure .value { font-size: 10px } .figure .total { font-weight: 600 }
.figure .axis { stroke: #888888 } .figure .grid { stroke: #dddddd } .figure .range { stroke: #1a1a1a; fill: none }
.figure .heat { fill: #08306b } .figure .cold { fill: #edf1f7 }
@media screen and (prefers-color-scheme: dark) {
  .figure { background: #16181c } .figure text { fill: #e8e8e8 } .figure .faint { fill: #b0b0b0 }
  .figure .axis { stroke: #777777 } .figure .grid { stroke: #33363c } .figure .range { stroke: #e8e8e8 }
  .figure .heat { fill: #ffd76a } .figure .cold { fill: #232a36 }
}
"""
"""Every rule names the class `figure`: a notebook puts several documents on one page."""

LEGEND_ROW = 20


class Picture(str):
    """An SVG document. A notebook shows it as an image, whether it is trusted or not."""

    def __repr__(self) -> str:
        return f"<SVG picture, {len(self):,} characters>"

    def _repr_html_(self) -> str:
        return image(self)


def document(width: int, height: int, title: str, parts: Sequence[str]) -> Picture:
    """A whole SVG document around some elements.

    Args:
        title: what a screen reader says.
    """
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" {size} role="img">'
    lines = [head, f"<title>{xml_text(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""]
    return Picture("\n".join(lines))


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "", turned: bool = False, fill: str = "") -> str:
    """A line of text.

    Args:
        kind: its class in STYLE.
        anchor: middle or end; "": x is its left end.
        turned: whether it reads from bottom to top.
        fill: its colour; "": that of its class.
    """
    more = f' class="{kind}"' if kind else ""
    more += f' text-anchor="{anchor}"' if anchor else ""
    more += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    more += f' style="fill:{fill}"' if fill else ""
    return f'<text{more} x="{x:.1f}" y="{y:.1f}">{xml_text(words)}</text>'


def rect(x: float, y: float, width: float, height: float, look: str, tip: str = "") -> str:
    """A rectangle.

    Args:
        look: attributes such as `fill="#ffffff"`.
        tip: its tooltip.
    """
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {place} {look}>{title(tip)}</rect>" if tip else f"<rect {place} {look}/>"


def title(words: str) -> str:
    """A tooltip, inside an element."""
    return f"<title>{xml_text(words)}</title>"


def range_bar(x: float, low: float, high: float) -> str:
    """A vertical line between two heights, with ends."""
    ends = "".join(f" M{x - 4:.1f} {y:.1f} H{x + 4:.1f}" for y in (low, high))
    return f'<path class="range" d="M{x:.1f} {low:.1f} V{high:.1f}{ends}"/>'


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, right: float) -> tuple[list[str], float]:
    """(name, colour) entries beside each other, on as many rows as they need.

    Returns:
        The elements, and the top of the last row.
    """
    parts, at = [], x
    for name, colour in entries:
        if at > x and at + legend_width(name) > right:
            at, y = x, y + LEGEND_ROW
        parts += [rect(at, y, 12, 12, f'fill="{colour}"'), text(at + 18, y + 10, name)]
        at += legend_width(name)
    return parts, y


def legend_width(name: str) -> int:
    """Pixels of a legend's entry."""
    return 34 + int(7.6 * len(name))
