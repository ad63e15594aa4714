"""The Python of a script or of a notebook's cells."""

from __future__ import annotations

import ast
import json
import os.path
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.issues import mistake

OF_IPYTHON = re.compile(r"\s*[%!?]|\s*[\w.]+\?{1,2}\s*$")
"""A notebook line that IPython reads: a magic, a shell command, a question."""

ASKS = re.compile(r"(\s*)(\w+(?:\s*,\s*\w+)*)\s*=\s*[!%]")
"""Such a line whose answer is assigned to a variable."""

OF_PYTHON = ("time", "timeit", "capture")
"""Cell magics whose body is Python."""


@dataclass(frozen=True)
class Source:
    """A script's text, or that of a notebook's cells."""

    name: str
    text: str
    cells: Sequence[int] = ()
    """Of a notebook: the cell of each line, from 1."""
    skipped: Sequence[int] = ()
    """Of a notebook: cells that are not Python, and were not read."""

    def parsed(self) -> ast.Module:
        """The syntax tree. Raises UserError if it is not Python."""
        try:
            return _parsed(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f", {self.where(error.lineno)}" if isinstance(error, SyntaxError) and error.lineno else ""
            why = error.args[0] if error.args else "too deeply nested"
            raise mistake("FILE", f"{self.name}{line}: {why}", "correct the Python") from None

    def where(self, line: int) -> str:
        """`line 12`, or `cell 3, line 2`."""
        if not self.cells or not 0 < line <= len(self.cells):
            return f"line {line}"
        cell = self.cells[line - 1]
        return f"cell {cell}, line {line - self.cells.index(cell)}"

    def path(self, given: str) -> str:
        """A path in the script, seen from the current folder: a notebook runs in its own folder, a script where it is started."""
        if not self.cells or os.path.isabs(given):
            return given
        return os.path.normpath(os.path.join(os.path.dirname(self.name), given))


def read(file: Path) -> Source:
    """Read a Python script or a Jupyter notebook.

    Raises:
        UserError: there is no such file, or it is neither.
    """
    if file.suffix not in (".py", ".ipynb"):
        valid = "a file that ends with .py or .ipynb"
        raise mistake("FILE", str(file), "name a Python script or a notebook", valid=valid)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise mistake("FILE", found, "name a script or a notebook") from None
    if file.suffix == ".py":
        return Source(str(file), text)
    try:
        cells = json.loads(text)["cells"]
        code = [(place, "".join(cell["source"])) for place, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    except (LookupError, TypeError, ValueError, RecursionError):
        raise mistake("FILE", f"{file}: no Jupyter notebook of format 4", "save it again with Jupyter") from None
    lines, places, skipped = list[str](), list[int](), list[int]()
    for place, cell in code:
        written, is_python = _python(cell)
        lines += written
        places += [place] * len(written)
        skipped += [] if is_python else [place]
    return Source(str(file), "\n".join(lines), tuple(places), tuple(skipped))


def _python(cell: str) -> tuple[list[str], bool]:
    """A cell's lines as Python, and whether it was understood. IPython's own lines do nothing, and what they assign is unknown."""
    magic = re.match(r"\s*%%(\w*)", cell)
    raw = textwrap.dedent(cell).split("\n")
    if magic is not None and magic[1] not in OF_PYTHON:
        return ["pass"] * len(raw), True  # of another language, as it says
    for lines in (raw, _without_ipython(raw)):
        try:
            _parsed("\n".join(lines))
            return lines, True
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    assigned = (re.match(r"\s*([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?[-+|*/]?=[^=]", line) for line in raw)
    return [f"{found[1]} = a_cell_that_is_no_Python" if found else "pass" for found in assigned], False


def _without_ipython(raw: Sequence[str]) -> list[str]:
    """The lines, with IPython's own and their continuations replaced by Python."""
    lines, indent, goes_on = list[str](), "", False
    for line in raw:
        asks = ASKS.match(line)
        if not goes_on:
            indent = line[: len(line) - len(line.lstrip())]
        if asks is not None:
            lines.append(f"{asks[1]}{asks[2].replace(',', ' =')} = an_answer_of_IPython")
        elif goes_on or OF_IPYTHON.match(line):
            lines.append(f"{indent}pass")
        else:
            lines.append(line)
            continue
        goes_on = line.rstrip().endswith("\\")
    return lines


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script's own
        return ast.parse(text)
