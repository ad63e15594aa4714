"""Goodput: the share of a killed and resumed job's time spent on steps that count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from launcher.insight.findings import percent


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of a job's runs went, from the first start to the last end, in seconds.

    A step counts once: its usual time in the undisturbed run is useful. Steps done again from a checkpoint are not, nor is anything
    else: starts, first steps, checkpoints, evaluations, the ends of runs, and the step that a kill cut off.
    """

    seconds: float
    """In total, without the time between two runs."""
    useful: float
    redone: float
    undisturbed: float
    """Goodput of the same job without kills, 0 to 1."""

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.useful / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"share": self.share, **asdict(self)}

    def __str__(self) -> str:
        rest = max(0.0, self.seconds - self.useful - self.redone)
        return (
            f"goodput {percent(self.share)}, undisturbed {percent(self.undisturbed)}: of {self.seconds:.1f} s, {self.useful:.1f} s for "
            f"steps that count, {self.redone:.1f} s for steps done again, {rest:.1f} s for starts, checkpoints, evaluations and ends"
        )
