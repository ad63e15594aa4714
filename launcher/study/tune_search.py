"""The search of `launcher tune`: measure, find the limit, change one thing, measure both again alternately, keep it or roll it back.

The first look at a change is one trial; only if it is faster do more prove it. For a number, the best value is sought before the proof.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from launcher.config.issues import UserError
from launcher.insight.diagnose import diagnose
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding, written
from launcher.runner.run import Run
from launcher.show.spread import Spread
from launcher.study import tune_course
from launcher.study.tune_course import Course, Losses
from launcher.study.tune_settings import RULES
from launcher.study.tune_subject import OF_THE_INPUT, Changes, CommandSubject, Subject

PAIRS = 2
"""Alternating repeats of both sides after which a change that is clearly faster or slower is decided."""

PROOF_TRIALS = 2 * (PAIRS - 1)
"""Trials that a proof takes after the first look."""

MAX_PAIRS = 3
"""Pairs at most, if the repeats overlap although the change's median is faster."""

MIN_SPEEDUP = 1.02
"""Speed-up below which a change is not kept: it would be in the config for nothing."""


OWN_OPTIONS = ("--allow", "--minutes", "--trials", "--table", "--max-cost", "--write", "--html", "--json")
"""Options of `launcher tune` that a command gets instead if they stand behind --."""


class BudgetExhausted(Exception):
    """The budget is spent; the message says which."""


@dataclass
class Trial:
    """One run with some changes."""

    changes: Changes
    run: Run
    failed: str = ""
    """Why it showed nothing; "" if it did."""
    began: bool = True
    """Whether its script was started."""
    first: Trial | None = field(default=None, repr=False)
    """The first one, of the unchanged subject; None: itself."""

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(str(self.run.folder.path))

    @functools.cached_property
    def course(self) -> Course:
        return tune_course.course(self.diagnosis.evidence, self.run.name, self.batch)

    @property
    def batch(self) -> int | None:
        """Images of a step; None: not known. The first trial's unless a change may set another: of an observed script it is estimated, and
        where it varies from step to step the estimates of equal runs differ."""
        trial = self if self.first is None or not BATCHES.isdisjoint(self.changes) else self.first
        found = trial.diagnosis.evidence.settings.get(BATCH)
        return found if isinstance(found, int) else None

    @functools.cached_property
    def losses(self) -> Losses | None:
        """None: its run was removed."""
        return tune_course.losses(self.run)

    @functools.cached_property
    def printed(self) -> bool:
        """Whether its losses are those that its script printed."""
        return tune_course.are_printed(self.run)

    @property
    def printed_by_several(self) -> bool:
        """Whether several processes may have printed its losses: nothing in a log says which did, and each run mixes their lines anew."""
        return self.printed and (self.diagnosis.evidence.world_size or 1) > 1

    def not_set(self, changes: Changes) -> str:
        """The changes that its training did not actually run with; "" if no other value was seen."""
        evidence = self.diagnosis.evidence
        loader = evidence.script.loader("training") if evidence.script else None
        seen = {"num_workers": evidence.facts.get("num_workers")} if loader is None else loader.values
        other = [
            f"{name} was {written(seen[name])} instead of {written(value)}"
            for name, value in changes.items()
            if value != "auto" and seen.get(name) not in (None, value)
        ]
        return ", ".join(other)

    def steps(self, changes: Changes) -> int:
        """The number of steps to train on its images once, with some changes."""
        batch = changes.get(BATCH, self.batch)
        return math.ceil(self.course.last / (batch if isinstance(batch, int) else 1))


class Measure(Protocol):
    """Runs a trial, or finds it in the table."""

    def __call__(self, changes: Changes, label: str, steps: int | None = None) -> Trial:
        """
        Args:
            label: what it is for, in a few words.
            steps: after which it may end; None: when its time is up.

        Raises:
            BudgetExhausted: the budget does not allow it.
        """

    def spent(self, trials: int) -> str:
        """Why the budget does not allow that number of trials; "" if it does."""


@dataclass(frozen=True)
class Proposal:
    """One change to try."""

    changes: Changes
    """The setting that it is about first, then those that must change with it."""
    finding: Finding
    """The one that asks for it."""
    expected: str
    """The gain that the finding predicts for it, in words; "" if it predicts none."""
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
    """A change that was tried, and its outcome."""

    proposal: Proposal
    before: list[Trial]
    after: list[Trial]
    kept: bool = False
    why: str = ""
    """Why it was kept or rolled back, in words."""
    decided: bool = True
    """Whether the budget allowed enough trials, all could start and had hosts, and their runs are still there."""
    costs: tuple[Spread, Spread] | None = None
    """Before and after: seconds for the whole job, or per image if its length is unknown; None: a trial failed."""
    losses: str = ""
    """What the losses show."""
    same_losses: bool = True
    """True also if they were not compared, unless a trial's run was removed."""

    @property
    def verdict(self) -> str:
        return "kept" if self.kept else "rolled back" if self.decided else "not decided"

    @property
    def gain(self) -> float | None:
        """The speed-up that it brought."""
        return None if self.costs is None else self.costs[0].median / self.costs[1].median

    @property
    def promising(self) -> bool:
        """Whether its trials so far show it to be faster, so that a proof is worthwhile."""
        return not self.why and (self.gain or 0.0) >= MIN_SPEEDUP


@dataclass
class Search:
    """Looks for the fastest settings of a subject.

    Args:
        allowed: settings whose changes may change numbers.
        images: of the whole job; None: unknown. Called after the first trial.
    """

    subject: Subject
    allowed: frozenset[str]
    measure: Measure
    images: Callable[[Trial], float | None]
    log: Callable[[str], None]
    steps: list[Step] = field(default_factory=list)
    best: list[Trial] = field(default_factory=list)
    """The trials of the fastest settings so far, the latest last."""
    first: list[Trial] = field(default_factory=list)
    """Those of the unchanged subject."""
    ended: str = ""
    """Why the search ended."""
    cut_off: bool = False
    """Whether an error ended it."""

    def run(self) -> None:
        """Search until nothing helps, the budget is spent, or an error such as hosts that AWS refuses cuts it off. If the first trial
        fails, `ended` says so.

        Raises:
            UserError: the first trial could not start, or cannot be measured.
        """
        try:
            self.best = self.first = [self.measure({}, "as it is")]
            if self.best[0].failed:
                self.ended = f"the job as it is failed: {self.best[0].failed}; {self._fix(self.best[0].run)}"
                return
            while (proposal := next(self._proposals(), None)) is not None:
                self._try(proposal)
            self.ended = self._why_nothing_is_left()
        except BudgetExhausted as spent:
            self.ended = str(spent)
        except UserError as error:
            if not self.first:
                raise
            self.ended, self.cut_off = _in_a_line(error), True

    def _fix(self, run: Run) -> str:
        """What to do about the failure of the unchanged job."""
        words = self.subject.command if isinstance(self.subject, CommandSubject) else ()
        ours = [name for name in OWN_OPTIONS if any(word.partition("=")[0] == name for word in words)]
        before = f"; the command got {', '.join(ours)}: options of launcher tune stand before --" if ours else ""
        return f"its log: launcher show {run.name}{before}"

    def _why_nothing_is_left(self) -> str:
        if (short := self.best[-1].diagnosis.report.too_short) is not None:
            return f"{short}: too short to judge; allow more minutes, or fewer trials"
        if not bottlenecks(self.best[-1].diagnosis):
            return "no bottleneck is left"
        return "no allowed change helps with the bottleneck that is left"

    @property
    def whole(self) -> float | None:
        """Images of the whole job; None: not known."""
        return self.images(self.first[0])

    def refused(self) -> Iterator[tuple[Proposal, list[str]]]:
        """(proposal, settings that `--allow` would have to name) for what the best trial's findings ask for but may not be tried."""
        for proposal in self._asked_for():
            if needed := self._not_allowed(proposal.changes):
                yield proposal, needed

    def unused(self) -> list[str]:
        """Settings that are allowed, and for which no finding asked."""
        asked = (*(step.proposal for step in self.steps), *self._asked_for())
        return sorted(self.allowed.difference(*(proposal.changes for proposal in asked)))

    def _proposals(self) -> Iterator[Proposal]:
        """What to try next: what the findings ask for, the most time-consuming first."""
        return (proposal for proposal in self._asked_for() if self._may_be_tried(proposal.changes))

    def _asked_for(self) -> Iterator[Proposal]:
        """What the fastest settings' findings ask for, and what else may help."""
        evidence = self.best[-1].diagnosis.evidence
        for finding in bottlenecks(self.best[-1].diagnosis):
            for fix in finding.fixes:
                expected = str(finding.gain) if finding.gain is not None and fix is finding.fixes[0] else ""
                if changes := self.subject.changes_of(fix):
                    yield Proposal(changes, finding, expected)
            if changes := self.subject.also(finding, evidence):
                yield Proposal(changes, finding, "")

    def _neighbours(self, step: Step) -> Iterator[Proposal]:
        """Numbers near one that helped: twice or half of it, or its geometric mean with the next known one; first in the direction that
        helped. If its own trial shows the direction of the limit, only that one. None if that trial finds nothing that a loader's
        numbers affect and steps hardly wait for data."""
        setting, now = step.proposal.setting, step.proposal.value
        if setting not in NUMBERS or not _is_count(now):
            return
        came_from = self._now(setting)
        known = {*self._tried(setting), self._first(setting), came_from} - {now}
        above = min((value for value in known if _is_count(value) and value > now), default=None)
        below = max((value for value in known if _is_count(value) and value < now), default=None)
        up = 2 * now or 1 if above is None else round(math.sqrt(now * above))
        down = now // 2 if below is None else round(math.sqrt(now * below))
        helped, back = (down, up) if _is_count(came_from) and came_from > now else (up, down)
        limits = {finding.kind for finding in bottlenecks(step.after[-1].diagnosis)}
        if limits & {*MORE_HELPS}:
            values = [up]
        elif limits & {*LESS_HELPS}:
            values = [down]
        elif limits & {*OF_THE_INPUT}:
            values = [helped, back]
        else:  # the remaining wait is no finding, but may still be worth a change
            waited = step.after[-1].diagnosis.evidence.share("data_wait") or 0.0
            values = [helped] if waited >= 1 - 1 / MIN_SPEEDUP else []
        for value in values:
            if max(value, now) > APART * min(value, now) and self._may_be_tried({setting: value}):
                yield Proposal({setting: value}, step.proposal.finding, "", neighbour=True)

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
        """The value in the fastest settings; None: unknown."""
        return self.best[-1].changes.get(setting, self._first(setting))

    def _first(self, setting: str) -> Any:
        """The unchanged value."""
        evidence = self.first[0].diagnosis.evidence
        return evidence.workers if setting == "num_workers" else evidence.settings.get(setting)

    def _try(self, proposal: Proposal) -> None:
        """Look at a change and at numbers near it, prove the fastest by alternating with the best settings so far, keep it or not."""
        fastest, misses = self._look(proposal), 0
        while fastest.promising and misses < GIVE_UP and not self.measure.spent(1 + PROOF_TRIALS):
            if (neighbour := next(self._neighbours(fastest), None)) is None:
                break
            with self._undecided(fastest):
                step = self._look(neighbour)
            faster, slower = (step, fastest) if _faster(step, fastest) else (fastest, step)
            if not slower.why:
                is_slower = (slower.gain or 0.0) < (faster.gain or 0.0)
                by_too_little = f"not {100 * (MIN_SPEEDUP - 1):.0f} % faster than {faster.proposal}"
                slower.why = f"{_times(slower)}: {f'{faster.proposal} is faster' if is_slower else by_too_little}"
            misses = 0 if faster is step else misses + 1
            fastest = faster
        if fastest.promising:
            with self._undecided(fastest):
                self._prove(fastest)
        if fastest.kept:
            self.best = fastest.after
        self.log(f"{fastest.proposal}: {fastest.verdict}, {fastest.why}")

    @contextlib.contextmanager
    def _undecided(self, step: Step) -> Iterator[None]:
        """Record that the budget or an error does not allow a decision."""
        try:
            yield
        except (BudgetExhausted, UserError) as error:
            step.decided, step.why = False, _in_a_line(error) if isinstance(error, UserError) else str(error)
            raise

    def _look(self, proposal: Proposal) -> Step:
        """One trial of a change, against the fastest settings so far. If it is not faster, `why` says so."""
        step = Step(proposal, self.best[-1:], [])
        self.steps.append(step)
        with self._undecided(step):
            if self._measure(step) and not step.promising:
                step.why = f"{_times(step)}: not {100 * (MIN_SPEEDUP - 1):.0f} % faster"
        return step

    def _measure(self, step: Step) -> bool:
        """One more trial with the change. Returns whether it shows its speed; if not, `why` says why."""
        changes = {**step.before[-1].changes, **step.proposal.changes}
        trial = self.measure(changes, str(step.proposal), self.first[0].steps(changes))
        step.after.append(trial)
        if trial.failed:
            step.why, step.costs, step.decided = f"it failed: {trial.failed}", None, trial.began
            return False
        if other := trial.not_set(step.proposal.changes):
            step.why = f"it was not applied: {other}; a line of the script may set it, or keep the old value"
            return False
        step.costs = self._costs(step)
        return True

    def _prove(self, step: Step) -> None:
        """Repeat both sides alternately until it is clear whether the change helps."""
        rule, best = RULES[step.proposal.setting], step.before[-1]
        for _ in range(PAIRS - 1, MAX_PAIRS):
            again = self.measure(best.changes, "the fastest so far again", self.first[0].steps(best.changes))
            step.before.append(again)
            if again.failed:
                step.why = f"the settings without it failed this time: {again.failed}"
                step.decided = again.began
                return
            self.best = [*self.best, again]
            if not self._measure(step):
                return
            before, after = self._costs(step)
            if after.values[-1] >= before.high:
                step.why = _times(step)
                return
            sides = ([trial.losses for trial in side] for side in (step.before, step.after))
            losses = tune_course.compare(
                *sides,
                printed=any(trial.printed for trial in (*step.before, *step.after)),
                in_any_order=any(trial.printed_by_several for trial in step.after),
            )
            step.losses, step.same_losses = losses.text, losses.same
            if rule.same_numbers and not losses.same and step.proposal.setting not in self.allowed:
                if losses.removed:
                    step.why, step.decided = losses.text, False
                    return
                allow = f"--allow {step.proposal.setting} keeps it anyway"
                step.why = f"{losses.text}; it should not change any numbers: {rule.reason}; {allow}"
                return
            if after.apart(before) and before.median >= MIN_SPEEDUP * after.median:
                step.kept, step.why = True, _times(step)
                return
            if before.median < MIN_SPEEDUP * after.median:
                break
        apart = "less than 2 % faster" if after.apart(before) else "within the spread of the repeats"
        step.why = f"{_times(step)}: {apart}"

    def _costs(self, step: Step) -> tuple[Spread, Spread]:
        """Before and after. For an even number of trials the median is the middle one that is worse for the change: the mean of both would
        count half of a first run that was slow because its files were not in memory yet."""
        sides = [[trial.course for trial in side] for side in (step.before, step.after)]
        until = min(course.last for side in sides for course in side)
        before, after = (tune_course.costs(side, until, self.whole).values for side in sides)
        return Spread(before, statistics.median_low(before)), Spread(after, statistics.median_high(after))


BATCH = "global_batch_size"

BATCHES = {BATCH, "batch_size", "batch_size_per_device"}
"""Settings that may change the images of a step."""

GIVE_UP = 2
"""Consecutive neighbours without gain after which no more are tried."""

APART = 1.5
"""Ratio to a known number above which another is tried too: 3 workers bring what 2 and 4 do."""

NUMBERS = ("num_workers", "prefetch_factor")
"""Settings whose neighbours are tried too."""

MORE_HELPS, LESS_HELPS = ("too_few_workers", "storage_bound"), ("too_many_workers",)
"""Findings that show in which direction a better number lies."""


def bottlenecks(diagnosis: Diagnosis) -> list[Finding]:
    """What limits a run."""
    return [finding for finding in diagnosis.findings if finding.level == "bottleneck" and not finding.refuted]


def _in_a_line(error: UserError) -> str:
    return "; ".join(f"{issue.key}: {issue.found}; {issue.fix}" for issue in error.issues)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _faster(step: Step, than: Step) -> bool:
    """Whether a step is worth more than another, both measured against the same settings."""
    return step.promising and (step.gain or 0.0) >= MIN_SPEEDUP * (than.gain or 0.0)


def _times(step: Step) -> str:
    """The speed-up with its range over the repeats."""
    assert step.costs is not None and step.gain is not None
    before, after = step.costs
    low, high = before.low / after.high, before.high / after.low
    spread = "in a single trial" if len(after.values) == 1 else f"({low:.2f} to {high:.2f} by the repeats)"
    return f"speed-up {step.gain:.2f} {spread}"
