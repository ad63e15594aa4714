"""What backends have in common."""

from __future__ import annotations

from dataclasses import dataclass, field


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
