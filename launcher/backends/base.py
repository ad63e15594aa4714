"""What backends have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HostPlan:
    """One host of a run."""

    name: str
    """algo-1, algo-2 …, as SageMaker calls them; the run folder's names too."""
    address: str
    """What SM_CURRENT_HOST says."""
    command: tuple[str, ...]
    """What the container toolkit will start there; `<free port>` stands for the one that the run picks."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the backend sets for the toolkit, beside the SM_* that the toolkit makes of the job."""
    group: str = ""
    """The instance group, where there are several."""


@dataclass(frozen=True)
class Upload:
    """Data of this machine that a run uploads before it starts."""

    source: Path
    """A file or a folder."""
    target: str
    """The s3:// address: of the object for a file, of the prefix (it ends with /) for a folder."""
    files: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Price:
    """What all hosts of a job cost together."""

    per_hour: float | None
    """US dollars an hour of the whole cluster, on demand; None: not known."""
    ceiling: float | None
    """US dollars at most: max_hours of the cluster, and the warm pool's time after it; None: not known."""
    told: str
    """The same for people, with where the price comes from; or what to do to know it."""

    def to_dict(self) -> dict[str, Any]:
        return {"usd_per_hour": self.per_hour, "ceiling_usd": self.ceiling, "told": self.told}


def dollars(usd: float) -> str:
    """$1,234.50; below ten cents with two more digits."""
    return f"${usd:,.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.4f}"


class Unreachable(Exception):
    """The far side of a run cannot be asked just now: no network, no valid credentials, too many requests. The run goes on."""

    def __init__(self, found: str, cure: str):
        super().__init__(f"{found}; {cure}")
