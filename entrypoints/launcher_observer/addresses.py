"""Where in the user's own code something happens: its file, line and text, and the framework that did it on the user's behalf."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from launcher_observer.secret_shapes import shows_a_secret

LONGEST_TEXT, LONGEST_SEARCHED = 200, 1000
"""Characters of a line that are recorded, and that are searched for a secret, which may begin in the first and go on."""

OURS = os.path.dirname(__file__) + os.sep
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that the user did not write."""


class Address(NamedTuple):
    """A line of the user's code."""

    file: str
    """Relative to the script's folder or the working folder if below one, else absolute."""
    line: int
    text: str
    """Without indentation; "" if it seems to hold a secret, which a record must not."""
    via: str | None
    """The framework whose code did it, called from that line; None: the line itself."""


def here() -> Address:
    """The innermost line of the user's code running on this thread; the outermost of all if none is the user's."""
    frame = sys._getframe(1)
    via: str | None = None
    while not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        if via is None:
            found = package(frame.f_code.co_filename)
            via = None if found == "torch" else found
        frame = frame.f_back
    return address(frame.f_code.co_filename, line_of(frame), via)


def lines_under_way() -> tuple[tuple[str, int], ...]:
    """File and number of each line of the user's code running on this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    lines = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            lines.append((frame.f_code.co_filename, line_of(frame)))
        frame = frame.f_back
    return tuple(lines)


def line_of(frame: FrameType) -> int:
    """The line that a frame executes; its function's first one at an instruction of no line, such as those that make cells for closures."""
    line: int | None = frame.f_lineno  # typeshed leaves out the None of Python 3.10 and later
    return frame.f_code.co_firstlineno if line is None else line


def address(file: str, line: int, via: str | None = None) -> Address:
    """A line as it is recorded."""
    return Address(shown(file), line, _text(linecache.getline(file, line)), via)


@functools.lru_cache(maxsize=500)
def _text(line: str) -> str:
    """An Address's text, cached: a script's few lines recur, and the search takes many times as long as the rest."""
    line = line.strip()
    return "" if shows_a_secret(line[:LONGEST_SEARCHED]) else line[:LONGEST_TEXT]


@functools.cache
def is_users(file: str) -> bool:
    """Whether a code object's file belongs to the user: it is neither installed, nor Python's, nor ours."""
    if file.startswith(("<", OURS)):
        return False
    parts = file.split(os.sep)
    return (
        not file.startswith(STANDARD_LIBRARY) and not any(name in parts for name in INSTALLED) and not _is_made(parts)
    )


def _is_made(parts: list[str]) -> bool:
    """Whether TorchInductor or Triton generated the file, which then is torch's: in /tmp/torchinductor_<user> and ~/.triton, or where a
    variable says (torch/_inductor/runtime/cache_dir_utils.py)."""
    places = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    if any(place and os.sep.join(parts).startswith(os.path.join(place, "")) for place in places):
        return True
    return ".triton" in parts or any(part.startswith("torchinductor_") for part in parts)


@functools.cache
def package(file: str) -> str | None:
    """The top-level package of an installed file; None for the user's, Python's and ours."""
    parts = file.split(os.sep)
    for name in INSTALLED:
        if name in parts:
            return parts[len(parts) - parts[::-1].index(name)].removesuffix(".py")
    return "torch" if _is_made(parts) else None


@functools.cache
def shown(file: str) -> str:
    """A file's name in a record."""
    path = Path(file)
    with contextlib.suppress(OSError):  # the working folder was removed
        path = path.absolute()
        for folder in _folders():
            if path.is_relative_to(folder):
                return str(path.relative_to(folder))
    return str(path)


def _folders() -> Iterator[Path]:
    """The script's, if there is a script, and the working folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        yield Path(script).absolute().parent
    yield Path.cwd()
