"""Table: rows under a head, as aligned text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head.

    >>> print(Table(("run", "seconds"), [("a", "1.5"), ("bcd", "12.0")]))
    run  seconds
    ---  -------
    a        1.5
    bcd     12.0
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    """Sentences below it."""

    def __str__(self) -> str:
        """Columns as wide as their widest cell, numbers to the right; title above, notes below."""
        widths = [max(len(row[column]) for row in [self.head, *self.rows]) for column in range(len(self.head))]
        numeric = self._numeric()

        def line(row: Sequence[str]) -> str:
            cells = zip(row, widths, numeric)
            return "  ".join(
                cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells
            ).rstrip()

        above = [self.title, ""] if self.title else []
        return "\n".join(
            [*above, line(self.head), "  ".join("-" * width for width in widths), *map(line, self.rows), *self.notes]
        )

    def without_empty(self, *names: str) -> Table:
        """The same without the named columns in which every cell is -."""
        left = [
            place
            for place, name in enumerate(self.head)
            if name not in names or any(row[place] != "-" for row in self.rows)
        ]
        rows = [[row[place] for place in left] for row in self.rows]
        return replace(self, head=[self.head[place] for place in left], rows=rows)

    def html(self) -> str:
        """A heading if there is a title, a table element, and a paragraph per note. Columns without numbers are aligned to the left by
        a style of their own, since a notebook has no other."""
        kinds = ["" if number else " style='text-align:left'" for number in self._numeric()]

        def line(row: Sequence[str], tag: str) -> str:
            cells = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(row, kinds))
            return f"<tr>{cells}</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        title = f"<h4>{escape(self.title)}</h4>" if self.title else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"{title}<table><thead>{line(self.head, 'th')}</thead><tbody>{body}</tbody></table>{notes}"

    def _numeric(self) -> list[bool]:
        """For each column, whether all its cells are numbers."""
        return [all(_is_number(row[column]) for row in self.rows) for column in range(len(self.head))]


def _is_number(text: str) -> bool:
    """Whether a cell is aligned to the right: a number, maybe followed by % or a unit of quality, or - for none."""
    return text == "-" or text.removesuffix(" mIoU").rstrip(" %").replace(",", "").replace(".", "", 1).isdigit()
