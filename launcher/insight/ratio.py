"""A ratio of two runs' times with its confidence interval, from the spread of their windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
"""Share of comparison ranges that hold the true ratio."""

FEWEST = 3
"""Windows. Fewer say nothing about their spread."""


@dataclass(frozen=True)
class Measured:
    """A measured number and how sure it is."""

    value: float
    variance: float
    degrees_of_freedom: float
    """Degrees of freedom of the variance; 0: too few windows for one."""

    def over(self, count: float) -> Measured:
        """The same for one of `count` things."""
        return Measured(self.value / count, self.variance / count**2, self.degrees_of_freedom)


@dataclass(frozen=True)
class Ratio:
    """One number over another, and the range that holds it with CONFIDENCE, unless it is made with another one."""

    value: float
    low: float | None
    """None: there are too few windows for a range."""
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether the range is known and lies on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def times(self, factor: float) -> Ratio:
        scaled = [None if bound is None else bound * factor for bound in (self.low, self.high)]
        return Ratio(self.value * factor, *scaled)

    def widened(self, drift: float) -> Ratio:
        """With a drift of that factor, either way, added to its error.

        Both are independent, so their squares add up.
        """
        if self.low is None or self.high is None:
            return self
        half = math.hypot(math.log(self.high / self.value), math.log(drift))
        return Ratio(self.value, self.value * math.exp(-half), self.value * math.exp(half))

    def __str__(self) -> str:
        """`1.31 (1.24 to 1.39)`, or `1.31` if the range is not known."""
        known = self.low is not None and self.high is not None
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if known else "")


def total(seconds: np.ndarray, counts: np.ndarray) -> Measured:
    """The sum over all steps of what was logged as window means.

    The variance is that of batch means: neighbouring windows are alike, so batches of the cube root of their number are taken as
    independent (Flegal and Jones 2010, https://arxiv.org/abs/0811.1729, section 3).

    Args:
        seconds: (n,) of a step, each window's mean.
        counts: (n,) steps of each window.
    """
    whole = float((seconds * counts).sum())
    if len(seconds) < FEWEST:
        return Measured(whole, 0.0, 0)
    excess = (seconds - whole / counts.sum()) * counts
    batches = np.array_split(excess, len(excess) // max(1, int(np.cbrt(len(excess)))))
    degrees_of_freedom = len(batches) - 1
    variance = len(batches) / degrees_of_freedom * sum(float(batch.sum()) ** 2 for batch in batches)
    return Measured(whole, variance, degrees_of_freedom)


def added(parts: Sequence[Measured]) -> Measured:
    """The sum of independent numbers. Its degrees of freedom are Welch's and Satterthwaite's (https://doi.org/10.2307/3002019)."""
    variance = sum(part.variance for part in parts)
    return Measured(
        sum(part.value for part in parts),
        variance,
        _degrees_of_freedom([(part.variance, part.degrees_of_freedom) for part in parts]),
    )


def ratio(top: Measured, bottom: Measured, confidence: float = CONFIDENCE) -> Ratio:
    """One number over the other. The range is that of its logarithm: relative variances add up (the delta method; for ratios of
    execution times see Kalibera and Jones 2020, https://arxiv.org/abs/2007.10899)."""
    value = top.value / bottom.value
    if not (top.degrees_of_freedom and bottom.degrees_of_freedom):
        return Ratio(value, None, None)
    relative = [(one.variance / one.value**2, one.degrees_of_freedom) for one in (top, bottom)]
    half = student(_degrees_of_freedom(relative), confidence) * math.sqrt(sum(variance for variance, _ in relative))
    return Ratio(value, value * math.exp(-half), value * math.exp(half))


def _degrees_of_freedom(parts: Sequence[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum, by (variance, degrees of freedom) of its parts; of parts without spread, the most of one."""
    spread = sum(variance**2 / degrees_of_freedom for variance, degrees_of_freedom in parts if degrees_of_freedom)
    whole = sum(variance for variance, _ in parts)
    return whole**2 / spread if spread else max(degrees_of_freedom for _, degrees_of_freedom in parts)


def student(degrees_of_freedom: float, confidence: float) -> float:
    """Two-sided quantile of Student's t: Abramowitz and Stegun, equation 26.7.5, to 1 % from 2 degrees of freedom on."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees_of_freedom ** (power + 1) for power, term in enumerate(terms))
