"""Tables with a title and what is to be said below them, for a terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from launcher.show.table import Table

Section = tuple[str, list[str], list[list[str]], list[str]]
"""A title, a table's head and rows, and what is to be said below it."""


def as_text(sections: Iterable[Section]) -> list[str]:
    """Each for a terminal."""
    return ["\n".join([title, "", str(Table(head, rows)), *below]) for title, head, rows, below in sections]


def as_html(sections: Iterable[Section]) -> list[str]:
    """All of them as HTML elements."""
    parts = []
    for title, head, rows, below in sections:
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        names = "".join(f"<th>{escape(name)}</th>" for name in head)
        parts.append(f"<h4>{escape(title)}</h4><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>")
        parts += [f"<p>{escape(line)}</p>" for line in below]
    return parts
