"""What the hosts that make a run's images did: the servers' numbers from all ranks' usual windows, combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Steps

NUMBERS = (
    *("threads", "part", "images", "alone", "megabytes"),
    *("server_seconds", "teacher_seconds", "waited_seconds", "receiving_seconds"),
)
"""Numbers that shares and speeds are made of. A rank that lacks one is left out."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Speeds and shares while usual steps ran. A second is one of the steps' wall time."""

    threads: float
    """Of live servers: mean over time and ranks."""
    most_threads: float
    """The most at any time, when no server had failed."""
    images: float
    """Per second, from servers, for all ranks together."""
    alone: float
    """Per second, made by the training processes themselves."""
    megabytes: float
    """Per second, for all ranks together."""
    making: float
    """Seconds of the servers' threads per second, for all ranks: the mean number of busy threads."""
    teaching: float
    """The teacher's part of these."""
    in_flight: float
    """Mean number of parts of batches that were requested and are not there yet, without those in a thread, for all ranks."""
    receiving: float
    """CPU seconds per second of a training process's receiving thread: the median rank's."""

    @property
    def busy(self) -> float | None:
        """Share of the servers' threads that are busy, 0 to 1; None: there were none."""
        return min(1.0, self.making / self.threads) if self.threads else None

    @property
    def seconds_per_image(self) -> float | None:
        """Of one server thread; None: no image was received."""
        return self.making / self.images if self.images else None

    @property
    def teacher_share(self) -> float:
        """Share of the threads' busy time that is the teacher's."""
        return self.teaching / self.making if self.making else 0.0

    @property
    def alone_share(self) -> float:
        """Share of the images that the training processes made themselves."""
        made = self.images + self.alone
        return self.alone / made if made else 0.0


@dataclass(frozen=True, kw_only=True)
class Happened:
    """Counts over all logged windows and ranks."""

    images: int
    alone: int
    failures: int
    late: int


def served(evidence: Evidence) -> Served | None:
    """None if no rank recorded it."""
    ranks = [steps for steps in evidence.ranks if all(name in steps.servers for name in NUMBERS)]
    each = [found for steps in ranks if (found := _of_a_rank(steps)) is not None]
    if not each:
        return None
    unrecorded = max(1.0, (evidence.world_size or 0) / len(each))
    total = {name: unrecorded * sum(one[name] for one in each) for name in NUMBERS}
    return Served(
        threads=float(np.mean([one["threads"] for one in each])),
        most_threads=max(float(np.nanmax(_threads(steps))) for steps in ranks),
        images=total["images"],
        alone=total["alone"],
        megabytes=total["megabytes"],
        making=total["server_seconds"],
        teaching=total["teacher_seconds"],
        in_flight=max(0.0, total["waited_seconds"] - total["server_seconds"]),
        receiving=float(np.median([one["receiving_seconds"] for one in each])),
    )


def happened(evidence: Evidence) -> Happened | None:
    """None if no rank recorded it."""
    recorded = [steps.servers for steps in evidence.ranks if steps.servers]

    def total(name: str) -> int:
        return round(sum(float(np.nansum(found[name])) for found in recorded if name in found))

    if not recorded:
        return None
    return Happened(images=total("images"), alone=total("alone"), failures=total("failures"), late=total("late"))


def sentence(evidence: Evidence) -> str:
    """What happened to servers, in one sentence; "" if other hosts made no images."""
    counts, now = happened(evidence), served(evidence)
    if counts is None:
        return ""
    with_threads = f" ({now.most_threads:.0f} threads)" if now is not None else ""
    parts = [f"in the logged steps {counts.images:,} images came from other hosts{with_threads}"]
    if counts.alone:
        parts.append(f"the training processes made {counts.alone:,} themselves, since no server could")
    if counts.failures:
        parts.append(f"servers failed {_times(counts.failures)}; lost images were made again")
    if counts.late:
        parts.append(f"{counts.late:,} parts of batches were late and requested twice")
    return "; ".join(parts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _of_a_rank(steps: Steps) -> dict[str, float] | None:
    """Each number per second, except `threads` as its mean over time; None if no usual window has them all."""
    kept = windows.usual(steps) & _finite(steps.servers[name] for name in NUMBERS)
    seconds = (np.nan_to_num(steps.seconds["step"]) * windows.counts(steps))[kept]
    whole = float(seconds.sum())
    if not whole:
        return None
    found = {name: float(steps.servers[name][kept].sum()) / whole for name in NUMBERS}
    return {**found, "threads": float(np.average(_threads(steps)[kept], weights=seconds))}


def _threads(steps: Steps) -> np.ndarray:
    """(n,) live threads of all servers; a rank may ask only a part of them."""
    found: np.ndarray = steps.servers["threads"] / np.maximum(steps.servers["part"], 1e-3)
    return found


def _finite(columns: Iterable[np.ndarray]) -> np.ndarray:
    """(n,) where all columns are finite."""
    found: np.ndarray = np.logical_and.reduce([np.isfinite(column) for column in columns])
    return found
