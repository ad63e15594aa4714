"""Exponential back-off between retries. Standard library only."""

from __future__ import annotations

DOUBLINGS = 32
"""At most: a float overflows beyond 1,023, which a server that is asked every minute reaches within a day."""


def doubling(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after that many failures in a row: `first` after one, twice as long after each further one, `longest` at most."""
    return min(longest, first * 2.0 ** min(failures - 1, DOUBLINGS))
