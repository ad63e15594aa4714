"""Spread: a number that was measured several times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A number measured several times.

    >>> found = Spread((1.0, 4.0, 2.0))
    >>> found.median, found.low, found.high
    (2.0, 1.0, 4.0)
    """

    values: tuple[float, ...]
    middle: float | None = None
    """The value that represents them all; None: their median."""

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.middle is None else self.middle

    @property
    def low(self) -> float:
        return min(*self.values, self.median)

    @property
    def high(self) -> float:
        return max(*self.values, self.median)

    def apart(self, other: Spread) -> bool:
        """Whether all of one's values lie on one side of all of the other's."""
        return self.high < other.low or other.high < self.low


def spread(values: Iterable[str | float | None]) -> Spread | None:
    """The values that are present; None if there are none. Empty text is not a value."""
    found = tuple(float(value) for value in values if value not in (None, ""))
    return Spread(found) if found else None
