"""A finding: what holds a run up, with its evidence, cause, fixes and gain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

NOTICEABLE = 0.10
"""Share of the training time from which something is called a bottleneck: removing all of it makes training 1.11 times as fast.
OpenXLA's profiler speaks of input from 5 % on (moderately) and 20 % (highly bound); below 10 % a fix is lost in a run's noise."""

Level = Literal["bottleneck", "risk"]


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change of a job's config, or of where it runs."""

    setting: str | None
    """The config key, such as hyperparameters.num_workers; None: it is no setting."""
    value: Any
    """What to set it to; where it is no setting, what to do, in words."""
    now: Any = None
    """What it was in this run; None: not known."""
    why: str = ""

    def __str__(self) -> str:
        if self.setting is None:
            text = str(self.value)
        else:
            before = "" if self.now is None else f" (now {written(self.now)})"
            text = f"{self.setting}={written(self.value)}{before}"
        return f"{text}: {self.why}" if self.why else text


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a fix can bring, as a factor of training speed."""

    share: float
    """Of the training time that the fix can touch, 0 to 1."""
    formula: str
    """How `expected` comes about, with its numbers; for a fix of which no more than the bound is known, that of the bound."""
    expected: float | None = None
    """Times as fast as now; None: only the bound is known."""

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1 and (self.expected is None or self.expected >= 1)

    @property
    def at_most(self) -> float:
        """Times as fast as now if all of the share went away: Amdahl's law, 1 / (1 - share)."""
        return 1 / (1 - min(self.share, 0.999))

    def __str__(self) -> str:
        bound = f"at most {self.at_most:.2f} times as fast (1 / (1 - {self.share:.2f}))"
        return bound if self.expected is None else f"about {self.expected:.2f} times as fast, {bound}; {self.formula}"


def bounded(share: float, expected: float | None = None, formula: str = "") -> Gain:
    """A gain whose expectation lies between none and what the share allows."""
    share = min(max(share, 0.0), 1.0)
    if expected is None:
        return Gain(share=share, formula=formula or f"1 / (1 - {share:.2f})")
    return Gain(share=share, formula=formula, expected=min(max(expected, 1.0), 1 / (1 - min(share, 0.999))))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding: what holds the run up."""

    kind: str
    """For machines: too_many_workers, teacher_bound …"""
    title: str
    """For people, one sentence."""
    share: float | None
    """Of the training time that it takes, 0 to 1; None: a risk that takes no time yet."""
    evidence: tuple[str, ...]
    """Numbers, with their units."""
    cause: str
    fixes: tuple[Fix, ...]
    """The one to try first comes first."""
    gain: Gain | None = None
    """Of the first fix; None: it is not about speed."""
    level: Level = "bottleneck"
    probe: str | None = None
    """What a probe's measurements say of it, in words that begin with confirmed or refuted; None: none was made, or it cannot tell."""

    @property
    def refuted(self) -> bool:
        return self.probe is not None and self.probe.startswith("refuted")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        gain = None if self.gain is None else {**asdict(self.gain), "at_most": self.gain.at_most}
        return {**asdict(self), "gain": gain}


def written(value: Any) -> str:
    """A setting's value as a config takes it."""
    return json.dumps(value) if isinstance(value, (bool, Mapping, list, type(None))) else str(value)


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
