"""A finding: what makes a run slow, with its evidence, cause, fixes and gain."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher.config.yaml_file import as_override
from launcher.insight.calibration import CONFIDENCE
from launcher.insight.ratio import Ratio
from launcher.insight.script import Address

NOTICEABLE = 0.10
"""Share of the training time from which something is called a bottleneck: without it the speed-up is 1.11. OpenXLA's profiler calls
a step moderately input-bound from 5 % and highly from 20 %; below 10 % a fix is lost in a run's noise."""

MOST_SHARE = 0.999
"""What a share counts as at most, as the rest of the time is divided by; a damaged measurement may say that a phase takes more than all."""

Level = Literal["bottleneck", "risk"]

Scope = Literal["any", "job", "kit"]
"""Whose runs can follow a fix: any run; one that a config describes; one of this kit's scripts."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change of a job's config or of a line of the script; or advice, which no setting says."""

    setting: str | None
    """The config key, such as hyperparameters.num_workers; of a script that is not the kit's what it sets, such as num_workers; None:
    no setting says it."""
    value: Any
    """Its new value; where no setting says it, what to do, in words."""
    now: Any = None
    """Its value in this run; None: not known."""
    why: str = ""
    at: Address | None = None
    """The line that it is about; None: none in particular."""
    change: str = ""
    """The setting's change in words, where it is made in the script."""
    scope: Scope = "any"
    """Of a fix that is no setting."""
    key: str | None = None
    """Of a change in the script: the key of the run's config that the line takes its value from; None: not known."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the config that change with it, with their values."""
    first: tuple[str, ...] = ()
    """Words of the command that has to come before, because it makes what the keys name."""
    run: str | None = None
    """The run that `launcher replay` runs again with other keys; None: there is none."""

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the run's config that apply it, with their values."""
        key = self.key if self.change else self.setting
        return {**({} if key is None else {key: self.value}), **self.also}

    @property
    def command(self) -> str | None:
        """What applies it: the run again, with the change, ready to paste into a shell. None: no command does."""
        if self.run is None or not self.keys:
            return None
        again = shlex.join(("launcher", "replay", self.run))
        return " && ".join(text for text in (shlex.join(self.first), f"{again} {self.overrides}") if text)

    @property
    def overrides(self) -> str:
        """The keys that apply it as a command's `key=value`, quoted for a shell; "" where no key does."""
        return shlex.join(as_override(key, value) for key, value in self.keys.items())

    @property
    def label(self) -> str:
        """`fix`, or `advice` where neither a setting nor a command says it."""
        return "advice" if self.setting is None and self.command is None else "fix"

    def set_to(self, value: Any, why: str) -> Fix:
        """The same change, to another value."""
        change = re.sub(rf"={re.escape(written(self.value))}\b", f"={written(value)}", self.change)
        return replace(self, value=value, why=why, change=change)

    @property
    def reason(self) -> str:
        """The setting's value in this run, and why it is to change."""
        return ": ".join(
            [*([] if self.now is None else [f"now {written(self.now)}"]), *([self.why] if self.why else [])]
        )

    def __str__(self) -> str:
        if self.change:
            return f"{self.change} ({self.why})" if self.why else self.change
        before = "" if self.now is None else f" (now {written(self.now)})"
        text = str(self.value) if self.setting is None else f"{self.setting}={written(self.value)}{before}"
        return f"{text}: {self.why}" if self.why else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        at = None if self.at is None else asdict(self.at)
        own = {name: getattr(self, name) for name in ("setting", "value", "now", "why", "change", "command")}
        return {**own, "at": at}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The speed-up of training that a fix can bring. `launcher/insight/gains.py` makes it."""

    share: float
    """Of the training time that the fix can touch, 0 to 1."""
    formula: str
    """How `expected` is computed, with its numbers; without it, how the bound is, or why there is no more than that."""
    expected: Ratio | None = None
    """Speed-up, with the range that holds what the fix brings with CONFIDENCE; None: only the bound is known."""

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1 and (self.expected is None or self.expected.value >= 1)

    @property
    def at_most(self) -> float:
        """Speed-up if all of the share goes away: Amdahl's law, 1 / (1 - share)."""
        return 1 / (1 - min(self.share, MOST_SHARE))

    @property
    def said(self) -> str:
        """The range and the point, or the bound, in words."""
        if self.expected is None:
            return f"at most {self.at_most:.2f}"
        value, low, high = self.expected.value, self.expected.low, self.expected.high
        if low is None or high is None:
            return f"about {value:.2f}, too few logged windows for a range"
        return f"{low:.2f} to {high:.2f} ({percent(CONFIDENCE)}), about {value:.2f}"

    def __str__(self) -> str:
        return f"speed-up {self.said}{f' ({self.formula})' if self.expected is None else f'; {self.formula}'}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "at_most": self.at_most, "confidence": CONFIDENCE}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that makes the run slow, or puts it at risk."""

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
    urgent: bool = False
    """Whether a risk would end the run soon, and so comes before what only makes it slow."""
    rank: int | None = None
    """The process that it is about; None: all of them."""
    experiment: str | None = None
    """Where it is a suspicion: what settles it. None: the evidence does."""
    probe: str | None = None
    """What a probe says of it, starting with confirmed or refuted; None: there was no probe, or it cannot tell."""

    @property
    def at(self) -> Address | None:
        """The line to change first; None: none in particular."""
        return next((fix.at for fix in self.fixes if fix.at is not None), None)

    @property
    def refuted(self) -> bool:
        return self.probe is not None and self.probe.startswith("refuted")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        gain = None if self.gain is None else self.gain.to_dict()
        at = None if self.at is None else asdict(self.at)
        return {**asdict(self), "at": at, "fixes": [fix.to_dict() for fix in self.fixes], "gain": gain}


def written(value: Any) -> str:
    """A setting's value as a config takes it."""
    return json.dumps(value) if isinstance(value, (bool, Mapping, list, type(None))) else str(value)


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
