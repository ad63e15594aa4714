"""Fixes that a second run applied: the speed-up that was expected, and the one obtained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.insight import windows
from launcher.insight.control import changes
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Gain, written
from launcher.insight.ratio import Ratio
from launcher.insight.touches import SERVING
from launcher.show.text import listed, shortened, shortened_apart

LONGEST = 40
"""Characters of a setting's value that are shown."""


@dataclass(frozen=True)
class Kept:
    """A fix from the first run's diagnosis that the second run applied, as advised or at least in that direction."""

    setting: str
    before: Any
    after: Any
    advised: Any
    gain: Gain
    """The expected one."""
    obtained: Ratio | None
    """None: it is not judged, as `why` says."""
    beside: tuple[str, ...]
    """What else changed and can touch the time."""
    why: str = ""
    """Why it is not judged; "" if it is."""

    @property
    def is_inside(self) -> bool | None:
        """Whether the obtained speed-up lies in the expected range; None: one of the two is not known."""
        return None if self.obtained is None else inside(self.gain, self.obtained)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "gain": self.gain.to_dict(), "is_inside": self.is_inside}

    def __str__(self) -> str:
        if self.obtained is None:
            obtained = self.why
        else:
            obtained = f"obtained {self.obtained}{'' if self.obtained.differs else ', no difference shown'}"
            obtained += "" if self.is_inside is None else f", {'inside' if self.is_inside else 'outside'} the range"
        return (
            f"{self.setting} from {short(self.before)} to {short(self.after)} (advised: {short(self.advised)}): "
            f"expected speed-up {self.gain.text}, {obtained}{f', together with {listed(self.beside)}' if self.beside else ''}"
        )


def inside(gain: Gain, obtained: Ratio) -> bool | None:
    """Whether an obtained speed-up lies in the expected range; None: there is no range."""
    expected = gain.expected
    if expected is None or expected.low is None or expected.high is None:
        return None
    return bool(expected.low <= obtained.value <= expected.high)


def fixes_kept(
    findings: Sequence[Finding],
    before: Evidence,
    after: Evidence,
    obtained: Ratio | None,
    why_not: str,
    compared: Evidence,
) -> list[Kept]:
    """The first fix of each finding of a run, if another run applied it.

    Args:
        findings: of the run before.
        obtained: the speed-up; None: the runs cannot be compared, as `why_not` says.
        compared: the part of the run before over which it was measured.
    """
    found = []
    takes_time = [name for name, touch in changes(before, after).items() if touch.takes_time]
    for finding in findings:
        fix, gain = finding.fixes[0], finding.gain
        if fix.setting is None or gain is None:
            continue
        name = fix.setting.removeprefix("hyperparameters.")
        values = [_counted(run, name) or run.settings for run in (before, after)]
        first, second = (one.get(name) for one in values)
        if name in values[1] and first != second and _is_towards(first, second, fix.value):
            fact = SERVING if _counted(before, name) else name
            beside = tuple(one for one in takes_time if one != fact)
            lacking = _lacks(finding, compared)
            ratio, why = (obtained, "") if obtained is not None and not lacking else (None, lacking or why_not)
            found.append(Kept(fix.setting, first, second, fix.value, gain, ratio, beside, why))
    return found


def _lacks(finding: Finding, compared: Evidence) -> str:
    """Why the compared part of the run before does not show a finding's fix: it holds none of the pauses; "" if it does."""
    pauses = {"checkpoint_stalls": ("checkpoint", "checkpoint"), "evaluation_stalls": ("evaluate", "evaluation")}
    kind, name = pauses.get(finding.kind, (None, ""))
    [steps, *_] = compared.ranks
    done = f"not judged, since the first {windows.steps_done(steps):,.0f} steps, which both runs did, hold no"
    if kind is not None and all(stall.kind != kind for stall in compared.measurements.stalls):
        return f"{done} {name}"
    if finding.kind == "slow_epoch_starts" and steps.epoch[0] == steps.epoch[-1]:
        return f"{done} start of an epoch"
    return ""


def _counted(run: Evidence, key: str) -> dict[str, int]:
    """The count of a run's serving hosts under the config's key, if this key sets it; else nothing."""
    groups = run.facts.get(SERVING) or ()
    counts = {f"compute.instance_groups.{one['index']}.instance_count": one["instance_count"] for one in groups}
    return {key: counts[key]} if key in counts else {}


def _is_towards(before: Any, after: Any, advised: Any) -> bool:
    """Whether a setting was changed as advised, or a number at least in that direction."""
    if isinstance(advised, dict) and isinstance(after, dict):
        return all(after.get(name) == value for name, value in advised.items())
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after, advised)):
        return bool((after - before) * (advised - before) > 0)
    return bool(after == advised)


def apart(before: Any, after: Any) -> tuple[str, str]:
    """Two values of a setting, each shortened as by `short`, but so that their difference shows."""
    return shortened_apart(written(before), written(after), LONGEST)


def short(value: Any) -> str:
    """A setting's value as written in a config, shortened if it is long."""
    return shortened(written(value), LONGEST)
