"""The Python of a script or of a notebook's cells."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.issues import mistake

NOT_CODE = re.compile(r"^\s*[%!?]")
"""A line of a notebook that IPython reads: a magic, a shell command."""


OF_PYTHON = ("time", "timeit", "capture")
"""Magics of a whole cell below which Python stands."""


@dataclass(frozen=True)
class Source:
    """A script's text, or that of a notebook's cells."""

    name: str
    text: str
    cells: Sequence[int] = ()
    """Of a notebook: the cell of each line, from 1."""

    def parsed(self) -> ast.Module:
        """The syntax tree. Raises UserError where it is not Python."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = f", {self.where(error.lineno)}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise mistake("FILE", f"{self.name}{line}: {error.args[0]}", "correct the Python") from None

    def where(self, line: int) -> str:
        """`line 12`, or `cell 3, line 2`."""
        if not self.cells or not 0 < line <= len(self.cells):
            return f"line {line}"
        cell = self.cells[line - 1]
        return f"cell {cell}, line {line - self.cells.index(cell)}"


def read(file: Path) -> Source:
    """Read a Python script or a Jupyter notebook.

    Raises:
        UserError: there is no such file, or it is neither.
    """
    if file.suffix not in (".py", ".ipynb"):
        raise mistake(
            "FILE", str(file), "name a Python script or a notebook", valid="a file that ends with .py or .ipynb"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake(
            "FILE", f"{file}: {getattr(error, 'strerror', None) or error}", "name a script or a notebook"
        ) from None
    if file.suffix == ".py":
        return Source(str(file), text)
    try:
        cells = json.loads(text)["cells"]
        code = [(place, "".join(cell["source"])) for place, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    except (LookupError, TypeError, ValueError):
        raise mistake("FILE", f"{file}: no Jupyter notebook of format 4", "save it again with Jupyter") from None
    lines, places = list[str](), list[int]()
    for place, cell in code:
        written = _plain(cell)
        lines += written
        places += [place] * len(written)
    return Source(str(file), "\n".join(lines), tuple(places))


def _plain(cell: str) -> list[str]:
    """A cell's lines without IPython's own; `pass` for each line of a cell that is no Python, so that the others can be read."""
    magic = re.match(r"\s*%%(\w*)", cell)
    lines = [_indent(line) + "pass" if NOT_CODE.match(line) else line for line in textwrap.dedent(cell).split("\n")]
    if magic is None or magic[1] in OF_PYTHON:
        try:
            ast.parse("\n".join(lines))
            return lines
        except (SyntaxError, ValueError):
            pass
    return ["pass"] * len(lines)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
