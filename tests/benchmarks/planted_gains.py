"""The gain of a planted run's fix beside the gain that its finding expected, and how far all of them are off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.insight.calibration import CONFIDENCE
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding, Gain
from launcher.insight.kept import inside
from launcher.insight.ratio import Ratio

GAINED = ["speed-up expected", "obtained", "inside"]

NEIGHBOUR = "noisy_neighbour"

LOOSE = 2.0
"""Multiple of the obtained speed-up from which a bound is loose."""


@dataclass(frozen=True)
class Row:
    """One planted run."""

    planted: str | None
    """The kind that is right; None: a healthy run."""
    form: str
    found: str | None
    """The kind of the top finding."""
    gain: Gain | None = None
    """None: there is no fix to try."""
    obtained: Ratio | None = None
    comparable: bool = True
    neighbour_first: bool = False
    """Whether the first finding is that others have the training thread's core."""
    neighbour_alone: bool = False
    """Whether that is the only finding."""

    @property
    def right(self) -> bool:
        return self.found == self.planted

    @property
    def cells(self) -> list[str]:
        found = self.found or ("none but the neighbour" if self.neighbour_alone else "none")
        found += " after the neighbour" if self.neighbour_first and not self.neighbour_alone else ""
        cells = [self.planted or "healthy", self.form, found, "yes" if self.right else "NO"]
        if self.gain is None or self.obtained is None:
            return [*cells, "-", "-", "-"]
        held = inside(self.gain, self.obtained) if self.comparable else None
        reported = f"{self.obtained}{'' if self.comparable else ' (not comparable)'}"
        return [*cells, self.gain.text, reported, "-" if held is None else "yes" if held else "no"]


def first_finding(diagnosis: Diagnosis, *, outside: bool = False) -> Finding | None:
    """The top finding; unless `outside`, without other programs on this machine, which were not planted."""
    kept = (one for one in diagnosis.findings if outside or one.kind != NEIGHBOUR)
    return next(kept, None)


def found_in(diagnosis: Diagnosis, planted: str | None, form: str, *, outside: bool = False) -> Row:
    """What was found in a planted run, before any fix; `outside` as in `first_finding`."""
    top, kinds = first_finding(diagnosis, outside=outside), [one.kind for one in diagnosis.findings]
    first, alone = kinds[:1] == [NEIGHBOUR] and not outside, {*kinds} == {NEIGHBOUR} and not outside
    return Row(planted, form, None if top is None else top.kind, neighbour_first=first, neighbour_alone=alone)


def with_gain(row: Row, gain: Gain, before: Diagnosis, after: Diagnosis) -> Row:
    """A row with the fix's gain."""
    both = Comparison(before, after)
    return replace(row, gain=gain, obtained=both.speedup or both.measured, comparable=both.speedup is not None)


def summary(rows: Sequence[Row], *, busy: bool = False) -> str:
    """How many findings were right, how far gains were off, and the pairs for launcher/insight/calibration.yaml.

    Args:
        busy: a program outside the runs was planted beside all of them, and slows some most.
    """
    healthy = [row for row in rows if row.planted is None]
    kinds = {row.planted for row in rows if row.planted is not None}
    lines = [
        f"right: {sum(row.right for row in rows)} of {len(rows)}, of {len(kinds)} kinds; healthy runs accused: "
        f"{sum(not row.right for row in healthy)} of {len(healthy)}"
    ]
    hidden = [row for row in rows if row.neighbour_alone and not row.right]
    if not busy:
        set_aside = [row for row in rows if row.neighbour_first]
        strictly = sum(row.right and not row.neighbour_first for row in rows)
        lines.append(
            f"if a neighbour that was not planted counts as a mistake, first in {len(set_aside)}: {strictly} of {len(rows)}, healthy runs "
            f"accused {sum(row.neighbour_first or not row.right for row in healthy)}"
        )
    if busy:
        either = sum(row.right or row.neighbour_first for row in rows)
        lines.append(f"the first finding of all is the fault or the program beside it: {either} of {len(rows)}")
    if hidden:
        lines.append(f"of those not right nothing but a noisy neighbour was found: {len(hidden)}")
    pairs: dict[str, list[tuple[float, float]]] = {}
    held, bounds = [], []
    for row in rows:
        if row.gain is None or row.obtained is None or not row.comparable or row.planted is None:
            continue
        if row.gain.expected is None:
            bounds.append(row.gain.at_most / row.obtained.value)
            continue
        pairs.setdefault(row.planted, []).append((row.gain.expected.value, row.obtained.value))
        held += [one for one in (inside(row.gain, row.obtained),) if one is not None]
    off = [abs(obtained / expected - 1) for many in pairs.values() for expected, obtained in many]
    if off:
        lines.append(
            f"point estimates: {len(off)}, off by {statistics.median(off):.0%} (median), {max(off):.0%} at most"
        )
        lines.append(
            f"obtained inside the range that is to hold {CONFIDENCE:.0%}: {held.count(True)} of {len(held)}; median half-width of "
            f"the ranges {statistics.median(widths(rows)):.0%}"
        )
    if bounds:
        lines.append(
            f"bounds: {len(bounds)}, of which {sum(bound < 1 for bound in bounds)} exceeded and {sum(bound > LOOSE for bound in bounds)} "
            f"beyond {LOOSE:.0f} times the obtained"
        )
    if pairs:
        lines += ["", "gains:", *(f"  {kind}: {_listed(many)}" for kind, many in sorted(pairs.items()))]
    return "\n".join(lines)


def widths(rows: Sequence[Row]) -> list[float]:
    """Half the relative widths of all ranges: a range that includes everything says nothing."""
    known = [row.gain.expected for row in rows if row.gain is not None and row.gain.expected is not None]
    return [math.sqrt(one.high / one.low) - 1 for one in known if one.low is not None and one.high is not None]


def _listed(pairs: Sequence[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{expected:.2f}, {obtained:.2f}]" for expected, obtained in pairs) + "]"
