"""Whether two runs can be compared: what no change between them can touch must take as long in both.

That part is the control. If it took longer, the machine was slower or busier, and so was the rest of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from launcher.insight import windows
from launcher.insight.contention import PROGRAMS, neighbours
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE
from launcher.insight.length import common
from launcher.insight.phases import order, parents
from launcher.insight.ratio import Measured, Ratio, ratio, total
from launcher.insight.rules.workers import kept_from_core, suspected
from launcher.insight.touches import (
    BACKEND,
    CODE,
    ENVIRONMENT,
    INPUTS,
    SERVING,
    THREADS,
    UNKNOWN,
    Touch,
    touch_of,
    untouched,
)
from launcher.show.text import listed

MAX_CORRECTED = 1.5
"""Largest factor, either way, by which a control may differ for a speed-up to be corrected by it. A correction assumes that the whole run
slowed alike; for identical jobs beside other work it left up to a third (docs/results/diagnosis.md), too much if it had more to correct."""

WAITS = ("data_wait", "buffer_sync")
"""Phases that wait for something else, and say nothing about the speed of the machine."""

OF_THE_MACHINE = {
    "instance_type": "instance type",
    "device": "device",
    "device_name": "device name",
    "torch": "torch",
    "world_size": "training processes",
    "training_images": "training images",
}
"""Facts that must be the same for runs to be comparable."""

OUTSIDE = ("neighbours", "CoresOutsideTheRun", "")
"""Series of a host: cores that programs outside the run use."""


@dataclass(frozen=True)
class Control:
    """What no change between two runs can touch."""

    said: str
    """Its time after over before, in words."""
    times: Ratio
    """The same in numbers; above 1 the machine was slower after."""

    @property
    def drifted(self) -> bool:
        """Whether it changed by more than noise: more than two runs of one job on shared cores differ."""
        return abs(math.log(self.times.value)) > math.log1p(NOTICEABLE) and (
            self.times.differs or self.times.low is None
        )


@dataclass(frozen=True)
class Comparability:
    """Whether two runs' times can be compared, and how."""

    unlike: tuple[str, ...] = ()
    """What makes them runs of other jobs or on other machines."""
    control: Control | None = None
    why_no_control: str = ""

    @property
    def possible(self) -> bool:
        return not self.unlike and (self.control is None or not self._is_far(self.control))

    @property
    def is_corrected(self) -> bool:
        """Whether a speed-up is corrected by the control."""
        return self.possible and self.control is not None and self.control.drifted

    def speedup(self, measured: Ratio) -> Ratio | None:
        """The speed-up that the change brought: as it was measured, or corrected by the control; None: the runs cannot be compared.

        The range adds the control's change as an error to that of the windows, whether it is corrected or not.
        """
        if not self.possible:
            return None
        if self.control is None:
            return measured
        times = self.control.times.value
        return (measured.times(times) if self.is_corrected else measured).widened(times)

    @property
    def sentence(self) -> str:
        """Why the runs are not comparable, what was corrected, or what the control is."""
        if self.unlike:
            return f"not comparable: {'; '.join(self.unlike)}"
        if self.control is None:
            return f"no control: {self.why_no_control}, so a slower or busier machine would look like the change"
        if not self.possible:
            return f"not comparable: {self.control.said}; run both again on a quiet machine, or in alternation"
        return f"{'corrected' if self.is_corrected else 'control'}: {self.control.said}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "possible": self.possible, "corrected": self.is_corrected, "sentence": self.sentence}

    @staticmethod
    def _is_far(control: Control) -> bool:
        return control.drifted and abs(math.log(control.times.value)) > math.log(MAX_CORRECTED)


def comparability(before: Evidence, after: Evidence) -> Comparability:
    """Whether two runs can be compared, by what differs between them; like the speed-up, the control is of the part that both did."""
    before, after = common(before, after)
    touches = changes(before, after)
    unlike = _unlike(before, after, touches)
    if unlike:
        return Comparability(unlike=tuple(unlike))
    if not (before.ranks and after.ranks):
        return Comparability(why_no_control="the steps of a run were not measured")
    recorded = touches or (before.facts.get(CODE) and before.facts.get(CODE) == after.facts.get(CODE))
    control = (_of_phases(before, after, touches) if recorded else None) or _of_cores(before, after)
    if control is not None:
        return Comparability(control=control)
    if not recorded:
        return Comparability(why_no_control="what changed between the runs was not recorded")
    everywhere = [name for name, touch in touches.items() if touch.phases is None or touch.by_workers]
    return Comparability(why_no_control=f"{listed(everywhere or touches)} can touch every phase that was measured")


def changes(before: Evidence, after: Evidence) -> dict[str, Touch]:
    """Recorded differences between two runs, in settings and CODE, INPUTS, ENVIRONMENT, THREADS, BACKEND and SERVING, with what each can
    touch.

    An argument of an observed script with the same values as a known setting, and a word of its name, is that setting and not another
    difference: `--workers` and num_workers.
    """
    runs = before, after
    settings = {
        name: tuple(run.settings.get(name) for run in runs) for name in sorted({*before.settings, *after.settings})
    }
    facts = {
        name: tuple(run.facts.get(name) for run in runs)
        for name in (CODE, INPUTS, ENVIRONMENT, THREADS, BACKEND, SERVING)
    }
    pairs = {**settings, **{name: pair for name, pair in facts.items() if None not in pair}}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    known = {name: touch for name in differing if (touch := touch_of(name)) is not UNKNOWN}
    others = {name: pair for name, pair in differing.items() if name not in known}
    if before.script is not None:
        of_known = {name: differing[name] for name in known}
        others = {name: pair for name, pair in others.items() if not _is_known(name, pair, of_known)}
    return known | dict.fromkeys(others, UNKNOWN)


def _is_known(name: str, pair: tuple[Any, ...], known: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether an argument is one of the known settings under another name."""
    return any(
        tuple(map(str, pair)) == tuple(map(str, values)) and _words(name) & _words(other)
        for other, values in known.items()
    )


def _words(name: str) -> set[str]:
    """The words of a setting's name, without those that many names have."""
    return {*re.split(r"[^a-z0-9]+", name.lower())} - {"", "num", "size", "max", "min", "use", "per", "number"}


def _unlike(before: Evidence, after: Evidence, touches: dict[str, Touch]) -> list[str]:
    """What makes two runs differ in job or machine, each with its values before and after."""
    pairs = {what: (before.facts.get(name), after.facts.get(name)) for name, what in OF_THE_MACHINE.items()}
    pairs["training hosts"] = before.recorded_hosts, after.recorded_hosts
    pairs["usable cores"] = _cores(before), _cores(after)
    models = [
        run.script.trained_model.values if run.script and run.script.trained_model else {} for run in (before, after)
    ]
    for name in ("class", "parameters"):
        pairs[f"the model's {name}"] = models[0].get(name), models[1].get(name)
    sets = [_dataset(run) for run in (before, after)]
    pairs["dataset"] = sets[0], sets[1]
    differing = [f"{what} {a} before, {b} after" for what, (a, b) in pairs.items() if None not in (a, b) and a != b]
    other = [name for name, touch in touches.items() if touch.is_another_job]
    return [*differing, *([f"{listed(other)} differs, so these are different jobs"] if other else [])]


def _cores(evidence: Evidence) -> float | None:
    known = [evidence.usable_cores(host) for host in evidence.hosts if host.cores]
    return round(float(np.mean(known)), 2) if known else None


def _dataset(evidence: Evidence) -> str | None:
    loader = evidence.script.loader("training") if evidence.script else None
    return (loader.values.get("dataset") or {}).get("class") if loader else None


def _of_phases(before: Evidence, after: Evidence, touches: dict[str, Touch]) -> Control | None:
    """The phases that no change can touch, if they are a good part of the step; the whole step if no change can touch any of it."""
    in_steps = {
        name: touch
        for name, touch in touches.items()
        if touch.phases is None or touch.by_workers or {*touch.phases} & {*order()}
    }
    if not in_steps:
        phases = ["step"]
    else:
        # in backward, ranks wait for a late one
        waits = (*WAITS, "backward") if (before.world_size or 1) > 1 else WAITS
        if any(run.script is not None and run.script.is_sharded for run in (before, after)):
            waits = (*waits, "forward")
        measured = [
            name
            for name in order()
            if name not in (*waits, *parents()) and all(name in run.ranks[0].seconds for run in (before, after))
        ]
        phases = untouched(in_steps.values(), measured, apart=_apart(before) and _apart(after))
    taken = [_seconds(run, phases) for run in (before, after)]
    if any(one.value < NOTICEABLE * (run.step_seconds or math.inf) for one, run in zip(taken, (before, after))):
        return None
    times = ratio(taken[1], taken[0])
    what = "steps" if phases == ["step"] else listed(phases)
    cannot = (
        f", which {listed(in_steps or touches)} cannot touch," if touches else " of the same settings, code and input"
    )
    return Control(f"{what}{cannot} took {times} times as long", times)


def _of_cores(before: Evidence, after: Evidence) -> Control | None:
    """The cores that programs outside the run left to it, if it had use for all of them."""
    runs = before, after
    used, cores = [one for run in runs if (one := _outside(run)) is not None], _cores(before)
    if len(used) < 2 or not cores:
        return None
    needed = any((run.full or 0.0) >= NOTICEABLE for run in runs)
    left = [max(cores - one, 0.01) if needed else cores for one in used]
    said = f"programs outside the run used {used[0]:.1f} of {cores:.3g} cores before and {used[1]:.1f} after"
    return Control(said, Ratio(left[0] / left[1], None, None))


def _outside(evidence: Evidence) -> float | None:
    """Cores that programs outside the run used while it trained, the mean over its hosts, as `_cores`; None: not recorded."""
    found = [series for host in evidence.hosts if (series := host.other.get(OUTSIDE))]
    return sum(float(evidence.during(series).mean()) for series in found) / len(found) if found else None


def _apart(evidence: Evidence) -> bool:
    """Whether what makes a run's images shares neither cores nor a lock with its training processes."""
    if evidence.remote:
        return evidence.facts.get("one_machine") is False
    if evidence.workers == 0:
        return True
    by_device = evidence.settings.get("preprocessing") == "dali"
    full = evidence.full is None or evidence.full >= NOTICEABLE
    return not (evidence.worker_threads or by_device or full or _takes_a_core(evidence))


def _takes_a_core(evidence: Evidence) -> bool:
    """Whether data workers keep the training thread from its core, or may, though others are free, as in KT's job: every phase that the
    thread drives is then longer. If programs outside the run use more cores than workers do, the delay is theirs."""
    others = neighbours(evidence)
    by_programs = bool(others) and max(others, key=lambda one: others[one]) == PROGRAMS
    return suspected(evidence) or (kept_from_core(evidence) is not None and not by_programs)


def _seconds(evidence: Evidence, phases: Sequence[str]) -> Measured:
    """Seconds per step of some phases together, slow steps included, on the first rank."""
    steps = evidence.ranks[0]
    kept = windows.steady(steps)
    counts = windows.counts(steps)[kept]
    seconds = sum((np.nan_to_num(steps.seconds[name][kept]) for name in phases), np.zeros(len(counts)))
    return total(seconds, counts).over(float(counts.sum()))
