"""Reports what the observer cannot do: once, in one line. Imports next to nothing."""

from __future__ import annotations

import sys


def report(what: str) -> None:
    """Write one line to standard error, if there is one."""
    try:
        sys.stderr.write(f"launcher observer: {what}; the script goes on without it\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # none, or closed
        return
