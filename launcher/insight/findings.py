"""A finding: what makes a run slow, with its evidence, cause, fixes and gain."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from launcher.config.yaml_file import as_override
from launcher.insight import outside
from launcher.insight.calibration import CONFIDENCE
from launcher.insight.ratio import Ratio
from launcher.insight.script import Address

NOTICEABLE = 0.10
"""Share of the training time from which something is a bottleneck: without it the speed-up is 1.11. OpenXLA's profiler calls a step
moderately input-bound from 5 % and highly input-bound from 20 %; below 10 % a fix is lost in a run's noise."""

MAX_SHARE = 0.999
"""Cap on a share, since gains divide by the rest of the time; a damaged measurement may say that a phase takes more than all."""

Level = Literal["bottleneck", "risk"]

Scope = Literal["any", "job", "kit"]
"""Which runs can apply a fix: any run; one that a config describes; one of this kit's scripts."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change to a job's config or to a line of the script; or advice that no setting expresses."""

    setting: str | None
    """The config key, such as hyperparameters.num_workers; for a user script what the fix sets, such as num_workers; None: no setting
    expresses it."""
    value: Any
    """The new value; if `setting` is None, what to do, in words."""
    now: Any = None
    """Its value in this run; None: not known."""
    why: str = ""
    at: Address | None = None
    """The line that it is about; None: no particular one."""
    change: str = ""
    """The change in words, if it is made in the script."""
    scope: Scope = "any"
    """For a fix without a setting."""
    key: str | None = None
    """For a change in the script: the key of the run's config that sets the line's value; None: not known."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further config keys that change with it, and their values."""
    first: tuple[str, ...] = ()
    """Words of the command to run first, because it creates what the keys name."""
    run: str | None = None
    """The run that `launcher replay` repeats with other keys; None: there is none."""
    watched: outside.Watched | None = None
    """The command that `launcher watch` runs again; None: another run, or part of it is not recorded."""

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the run's config that apply the fix, with their values."""
        key = self.key if self.change else self.setting
        return {**({} if key is None else {key: self.value}), **self.also}

    @property
    def command(self) -> str | None:
        """The shell command that runs the job, or the watched command, again with the fix, ready to paste. None: none applies it."""
        if self.watched is not None and (changes := outside.changes_of(self.setting, self.value)):
            return self.watched.command(changes)
        if self.run is None or not self.keys:
            return None
        again = shlex.join(("launcher", "replay", self.run))
        return " && ".join(text for text in (shlex.join(self.first), f"{again} {self.overrides}") if text)

    @property
    def overrides(self) -> str:
        """The keys that apply the fix as a command's `key=value`, quoted for a shell; "" if there are none."""
        return shlex.join(as_override(key, value) for key, value in self.keys.items())

    @property
    def label(self) -> str:
        """`fix`, or `advice` if neither a setting nor a command expresses it."""
        return "advice" if self.setting is None and self.command is None else "fix"

    def set_to(self, value: Any, why: str) -> Fix:
        """The same change, to another value."""
        change = re.sub(rf"={re.escape(written(self.value))}\b", f"={written(value)}", self.change)
        return replace(self, value=value, why=why, change=change)

    @property
    def reason(self) -> str:
        """The setting's value in this run, and why to change it."""
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
    """The training speed-up that a fix can bring. `launcher/insight/gains.py` makes it."""

    share: float
    """Share of the training time that the fix can touch, 0 to 1."""
    formula: str
    """How `expected` is computed, with its numbers; without it, how the bound is, or why only the bound is known."""
    expected: Ratio | None = None
    """Speed-up, with the range that holds the obtained one with CONFIDENCE; None: only the bound is known."""

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1 and (self.expected is None or self.expected.value >= 1)

    @property
    def at_most(self) -> float:
        """Speed-up if all of the share goes away: Amdahl's law, 1 / (1 - share)."""
        return 1 / (1 - min(self.share, MAX_SHARE))

    @property
    def text(self) -> str:
        """The range and the point, or the bound, in words."""
        if self.expected is None:
            return f"at most {self.at_most:.2f}"
        value, low, high = self.expected.value, self.expected.low, self.expected.high
        if low is None or high is None:
            return f"about {value:.2f}, too few logged windows for a range"
        return f"{low:.2f} to {high:.2f} ({percent(CONFIDENCE)}), about {value:.2f}"

    def __str__(self) -> str:
        return f"speed-up {self.text}{f' ({self.formula})' if self.expected is None else f'; {self.formula}'}"

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
    """Share of the training time that it takes, 0 to 1; None: a risk that takes no time yet."""
    evidence: tuple[str, ...]
    """Numbers, with their units."""
    cause: str
    fixes: tuple[Fix, ...]
    """In the order in which to try them."""
    gain: Gain | None = None
    """Of the first fix; None: not about speed."""
    level: Level = "bottleneck"
    urgent: bool = False
    """Whether a risk would end the run soon, and so ranks above what only slows it."""
    rank: int | None = None
    """The process that it is about; None: all of them."""
    experiment: str | None = None
    """For a suspicion: the experiment that settles it. None: the evidence does."""
    probe: str | None = None
    """What a probe says about it, starting with confirmed or refuted; None: no probe ran, or it cannot tell."""

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
    """A setting's value as written in a config."""
    return json.dumps(value) if isinstance(value, (bool, Mapping, list, type(None))) else str(value)


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
