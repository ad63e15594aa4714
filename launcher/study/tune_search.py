"""The search of `launcher tune`: measure, find the limit, change one thing, measure both again in turns, keep it or roll it back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.insight.diagnose import diagnose
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding, written
from launcher.runner.run import Run
from launcher.show.spread import Spread
from launcher.study import tune_course
from launcher.study.tune_course import Course, Losses
from launcher.study.tune_settings import RULES
from launcher.study.tune_subject import Changes, Subject

PAIRS = 2
"""Repeats of both sides, in turns, after which a change that is clearly faster or slower is decided."""

MOST_PAIRS = 3
"""Where the repeats overlap although the change's median is faster."""

WORTH = 1.02
"""Speed-up below which a change is not kept: it would be in the config for nothing."""


class Spent(Exception):
    """The budget is spent; its text says which."""


@dataclass
class Trial:
    """One run with some changes."""

    changes: Changes
    run: Run
    failed: str = ""
    """Why it showed nothing; "" where it did."""

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(str(self.run.folder.path))

    @functools.cached_property
    def course(self) -> Course:
        return tune_course.course(self.diagnosis.evidence, self.run.name)

    @functools.cached_property
    def losses(self) -> Losses:
        return tune_course.losses(self.run)

    def not_set(self, changes: Changes) -> str:
        """What of some changes its training did not run with; "" where nothing else was seen."""
        evidence = self.diagnosis.evidence
        loader = evidence.script.loader("training") if evidence.script else None
        seen = {"num_workers": evidence.facts.get("num_workers")} if loader is None else loader.values
        other = [
            f"{name} was {written(seen[name])} instead of {written(value)}"
            for name, value in changes.items()
            if value != "auto" and seen.get(name) not in (None, value)
        ]
        return ", ".join(other)


class Measure(Protocol):
    """Runs a trial, or finds it in the table."""

    def __call__(self, changes: Changes, label: str, steps: int | None = None) -> Trial:
        """
        Args:
            label: what it is for, in a few words.
            steps: after which it may end; None: after its time.

        Raises:
            Spent: the budget does not allow it.
        """


@dataclass(frozen=True)
class Proposal:
    """One change to try."""

    changes: Changes
    """The setting that it is about first, then what has to change with it."""
    finding: Finding
    """That asks for it."""
    expected: str
    """The gain that the finding promises of it, in words; "" where it promises none."""
    neighbour: bool = False
    """Whether it is near a value that was tried before."""

    @property
    def setting(self) -> str:
        return next(iter(self.changes))

    @property
    def value(self) -> Any:
        return self.changes[self.setting]

    def __str__(self) -> str:
        return " ".join(f"{name}={written(value)}" for name, value in self.changes.items())


@dataclass
class Step:
    """A change that was tried, and what came of it."""

    proposal: Proposal
    before: list[Trial]
    after: list[Trial]
    kept: bool = False
    why: str = ""
    """Why it was kept or rolled back, in words."""
    decided: bool = True
    """Whether the budget allowed enough trials."""
    costs: tuple[Spread, Spread] | None = None
    """Before and after: seconds of the whole job, or of an image where its length is not known; None: a trial failed."""
    losses: str = ""
    """What the losses say."""
    same_losses: bool = True
    """Also where they were not compared."""

    @property
    def verdict(self) -> str:
        return "kept" if self.kept else "rolled back" if self.decided else "not decided"

    @property
    def gain(self) -> float | None:
        """The speed-up that it brought."""
        return None if self.costs is None else self.costs[0].median / self.costs[1].median


@dataclass
class Search:
    """Looks for the fastest settings of a subject.

    Args:
        allowed: settings whose changes may change numbers.
        images: of the whole job; None: not known. Asked after the first trial.
    """

    subject: Subject
    allowed: frozenset[str]
    measure: Measure
    images: Callable[[Trial], float | None]
    say: Callable[[str], None]
    steps: list[Step] = field(default_factory=list)
    best: list[Trial] = field(default_factory=list)
    """The trials of the fastest settings so far, the latest last."""
    first: list[Trial] = field(default_factory=list)
    """Those of the subject as it is."""
    ended: str = ""
    """Why the search ended."""

    def run(self) -> None:
        """Search until nothing helps or the budget is spent. Where the first trial fails, `ended` says so."""
        try:
            self.best = self.first = [self.measure({}, "as it is")]
            if self.best[0].failed:
                self.ended = f"the job as it is failed: {self.best[0].failed}"
                return
            while (proposal := next(self._proposals(), None)) is not None:
                self._try(proposal)
            self.ended = self._why_nothing_is_left()
        except Spent as spent:
            self.ended = str(spent)

    def _why_nothing_is_left(self) -> str:
        if (short := self.best[-1].diagnosis.report.too_short) is not None:
            return f"{short} are too short to judge: allow more minutes, or fewer trials"
        if next(self._findings(), None) is None:
            return "no bottleneck is left"
        return "nothing that may be changed helps against what is left"

    @property
    def whole(self) -> float | None:
        """Images of the whole job; None: not known."""
        return self.images(self.first[0])

    def refused(self) -> Iterator[tuple[Proposal, list[str]]]:
        """(proposal, settings that `--allow` would have to name) of what the best trial's findings ask for and may not be tried."""
        for proposal in self._asked_for():
            if needed := self._not_allowed(proposal.changes):
                yield proposal, needed

    def _findings(self) -> Iterator[Finding]:
        """What limits the fastest settings."""
        for finding in self.best[-1].diagnosis.findings:
            if finding.level == "bottleneck" and not finding.refuted:
                yield finding

    def _proposals(self) -> Iterator[Proposal]:
        """What to try next: neighbours of the latest number, then what the findings ask for, the one that takes most time first."""
        yield from self._neighbours()
        yield from (proposal for proposal in self._asked_for() if self._may_be_tried(proposal.changes))

    def _asked_for(self) -> Iterator[Proposal]:
        """What the fastest settings' findings ask for, and what may help too."""
        evidence = self.best[-1].diagnosis.evidence
        for finding in self._findings():
            for fix in finding.fixes:
                expected = str(finding.gain) if finding.gain is not None and fix is finding.fixes[0] else ""
                if changes := self.subject.changes_of(fix):
                    yield Proposal(changes, finding, expected)
            if changes := self.subject.also(finding, evidence):
                yield Proposal(changes, finding, "")

    def _neighbours(self) -> Iterator[Proposal]:
        """Numbers near the best so far, after a number was tried: beyond it twice or half of it, towards others their geometric mean. It
        goes on in the direction that helped, and gives up after GIVE_UP that did not."""
        latest = self.steps[-1] if self.steps else None
        setting = latest.proposal.setting if latest else ""
        now = self._now(setting)
        if latest is None or setting not in NUMBERS or not _is_count(now) or not _is_count(latest.proposal.value):
            return
        of_the_setting = [step for step in self.steps if step.proposal.setting == setting]
        if not any(step.kept for step in of_the_setting[-GIVE_UP:]):
            return
        known = {*self._tried(setting), self._first(setting)} - {now}
        above = min((value for value in known if _is_count(value) and value > now), default=None)
        below = max((value for value in known if _is_count(value) and value < now), default=None)
        up = 2 * now or 1 if above is None else round(math.sqrt(now * above))
        down = now // 2 if below is None else round(math.sqrt(now * below))
        kept = next(step for step in reversed(of_the_setting) if step.kept)
        came_from = kept.before[0].changes.get(setting, self._first(setting))
        for value in (down, up) if _is_count(came_from) and came_from > now else (up, down):
            if abs(value - now) > now / 4 and self._may_be_tried({setting: value}):
                yield Proposal({setting: value}, latest.proposal.finding, "", neighbour=True)

    def _not_allowed(self, changes: Changes) -> list[str]:
        return [name for name in changes if not RULES[name].same_numbers and name not in self.allowed]

    def _may_be_tried(self, changes: Changes) -> bool:
        setting, value = next(iter(changes.items()))
        if self._not_allowed(changes) or value in (*self._tried(setting), self._now(setting), self._first(setting)):
            return False
        return self.subject.possible({**self.best[-1].changes, **changes})

    def _tried(self, setting: str) -> list[Any]:
        return [step.proposal.value for step in self.steps if step.proposal.setting == setting]

    def _now(self, setting: str) -> Any:
        """The value in the fastest settings; None: it is not known."""
        return self.best[-1].changes.get(setting, self._first(setting))

    def _first(self, setting: str) -> Any:
        """The value as it is."""
        evidence = self.first[0].diagnosis.evidence
        return evidence.workers if setting == "num_workers" else evidence.settings.get(setting)

    def _try(self, proposal: Proposal) -> None:
        """Measure a change in turns with the fastest settings so far, and keep it or not."""
        step = Step(proposal, self.best[-1:], [])
        self.steps.append(step)
        try:
            self._measure_in_turns(step, {**self.best[-1].changes, **proposal.changes})
        except Spent as spent:
            step.decided, step.why = False, str(spent)
            raise
        if step.kept:
            self.best = step.after
        self.say(f"{proposal}: {step.verdict}, {step.why}")

    def _measure_in_turns(self, step: Step, changes: Changes) -> None:
        rule, best = RULES[step.proposal.setting], step.before[-1]
        for pair in range(1, MOST_PAIRS + 1):
            if pair > 1:
                again = self.measure(best.changes, "the fastest so far again", self._steps(best.changes))
                if again.failed:
                    step.why = f"the settings before it failed this time: {again.failed}"
                    return
                step.before.append(again)
                self.best = [*self.best, again]
            trial = self.measure(changes, str(step.proposal), self._steps(changes))
            if trial.failed:
                step.why = f"it failed: {trial.failed}"
                return
            step.after.append(trial)
            if other := trial.not_set(step.proposal.changes):
                step.why = f"it was not set: {other}; a line of the script may set it, or keep it as it is"
                return
            before, after = step.costs = self._costs(step)
            if after.low >= before.high:
                step.why = _times(step)
                return
            if pair < PAIRS:
                continue
            losses = tune_course.compare(*([trial.losses for trial in side] for side in (step.before, step.after)))
            step.losses, step.same_losses = losses.text, losses.same
            if rule.same_numbers and not losses.same and step.proposal.setting not in self.allowed:
                allow = f"--allow {step.proposal.setting} keeps it all the same"
                step.why = f"{losses.text}; it should change no numbers: {rule.reason}; {allow}"
                return
            if after.apart(before) and before.median >= WORTH * after.median:
                step.kept, step.why = True, _times(step)
                return
            if before.median < WORTH * after.median:
                break
        step.why = f"{_times(step)}: no more than the repeats differ by"

    def _costs(self, step: Step) -> tuple[Spread, Spread]:
        sides = [[trial.course for trial in side] for side in (step.before, step.after)]
        until = min(course.last for side in sides for course in side)
        before, after = (tune_course.costs(side, until, self.whole) for side in sides)
        return before, after

    def _steps(self, changes: Changes) -> int:
        """As many steps as the images of the first trial need."""
        batch = changes.get(BATCH, self.first[0].diagnosis.evidence.settings.get(BATCH))
        return math.ceil(self.first[0].course.last / (batch if isinstance(batch, int) else 1))


BATCH = "global_batch_size"

GIVE_UP = 3
"""Neighbours in a row that did not help."""

NUMBERS = ("num_workers", "prefetch_factor")
"""Settings whose neighbours are tried too."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _times(step: Step) -> str:
    """The speed-up with its range over the repeats."""
    assert step.costs is not None
    before, after = step.costs
    low, high = before.low / after.high, before.high / after.low
    return f"speed-up {before.median / after.median:.2f} ({low:.2f} to {high:.2f} by the repeats)"
