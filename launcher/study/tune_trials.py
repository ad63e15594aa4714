"""The trials of a tuning: each runs once, within the budget, and is a row of the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.config.issues import UserError, mistake
from launcher.record import records
from launcher.runner.run import Run
from launcher.show.text import counted, dollars
from launcher.study import engine
from launcher.study.trial_table import Row, TrialTable
from launcher.study.tune_search import Spent, Trial
from launcher.study.tune_subject import Changes, Subject, Until

START = 900.0
"""Seconds that a trial may take until its first step: on SageMaker hosts start and data are copied."""

UNSEEN_START = 120.0
"""Seconds from the start of a script to its first step, where its steps are seen only when its output has come."""

TIME_IS_OVER, STEPS_ARE_MADE = "its {:.0f} s as a trial are over", "it made the {} steps of the first trial"
"""Why a trial was stopped that shows what it was to show."""

KEYS = ("changes", "repeat")
"""Columns of a trial's key: the changes as JSON, and which of the trials with them it is."""

MEASURED = (
    "label",
    "state",
    "failure",
    "allowed_seconds",
    "seconds",
    "cost_usd",
    "step_seconds",
    "images_per_second",
    "mfu",
    "headline",
)
"""The other columns of the table; allowed_seconds of training, after which a trial is stopped; cost_usd with what was paid for earlier
attempts."""


@dataclass
class Trials:
    """Runs the trials that the table lacks, within the budget.

    Args:
        most: trials.
        most_seconds: of all trials together.
        each: seconds of training of a trial.
        max_cost: US dollars, of all trials together; None: no limit.
        ceiling: US dollars of a trial at most; None: nothing, or not known.
    """

    subject: Subject
    known: TrialTable
    most: int
    most_seconds: float
    each: float
    max_cost: float | None
    ceiling: float | None
    say: Callable[[str], None]
    used: list[Row] = field(default_factory=list)

    def __call__(self, changes: Changes, label: str, steps: int | None = None) -> Trial:
        text = json.dumps(changes, sort_keys=True)
        key = {"changes": text, "repeat": 1 + sum(row["changes"] == text for row in self.used)}
        row = self.known.find(key)
        left = None if row is None else self._left(row)
        if row is None or self._runs_again(row, changes, steps):
            if left is None and (spent := self._spent(1, self.known.rows)):  # also what an earlier call paid for
                raise Spent(spent)
            trial = self._run(key, changes, label, steps, left)
            row = self.known.rows[-1]
        else:
            trial = Trial(changes, self._recorded(row["run"]), row["failure"])
        self.used.append(row)
        return trial

    def _runs_again(self, row: Row, changes: Changes, steps: int | None) -> bool:
        """Whether a trial was interrupted, or is the job as it is, whose failure may be mended, or had no hosts, or was stopped by less
        time than there is now."""
        if row["state"] == records.IN_PROGRESS or (row["failure"] and not changes):
            return True
        if row["failure"] and not _began(self._recorded(row["run"])):
            return True
        if row["state"] != records.STOPPED or float(row["allowed_seconds"]) >= self.each:
            return False
        return steps is None or _last_step(self._recorded(row["run"]).metrics()) < steps

    def spent(self, trials: int) -> str:
        """Why the budget does not allow that number of trials; "" where it does. By the trials so far, so that the same command takes the
        same course again with those of the table."""
        return self._spent(trials, self.used)

    def _spent(self, trials: int, paid_for: Sequence[Row]) -> str:
        seconds = [float(row["seconds"]) for row in self.used]
        if len(self.used) + trials > self.most:
            return f"{counted(self.most, 'trial is', 'trials are')} spent (--trials)"
        if seconds and sum(seconds) + (trials - 0.5) * max(seconds) > self.most_seconds:
            return f"{self.most_seconds / 60:g} minutes are spent (--minutes)"
        paid = sum(map(self._paid, paid_for))
        if self.max_cost is not None and self.ceiling is not None and paid + trials * self.ceiling > self.max_cost:
            return f"{dollars(paid)} of {dollars(self.max_cost)} are spent, and a trial may cost {dollars(self.ceiling)} (--max-cost)"
        return ""

    def _paid(self, row: Row) -> float:
        """US dollars for a trial and for its earlier attempts; of one that was interrupted what it may have cost."""
        own = 0.0
        if row["state"] == records.IN_PROGRESS:
            own = self._recorded(row["run"]).outcome().get("cost_usd", self.ceiling) or 0.0
        return float(row["cost_usd"] or 0.0) + own

    def _recorded(self, name: str) -> Run:
        try:
            return Run(records.find(name))
        except UserError:
            fix = f"name another file with --table, or remove this one: rm {self.known.file}"
            raise mistake("--table", f"{self.known.file} names the run {name}, which was removed", fix) from None

    def _run(self, key: dict[str, Any], changes: Changes, label: str, steps: int | None, left: Run | None) -> Trial:
        """Run a trial, or take one that was `left`, and write it down."""
        began, before = time.monotonic(), self.known.find(key)
        paid, allowed = 0.0, self.each
        if before is not None and left is not None:
            paid, allowed = float(before["cost_usd"] or 0.0), float(before["allowed_seconds"] or self.each)
        elif before is not None:
            paid = self._paid(before)

        def started(run: Run) -> None:
            if self.ceiling is not None:  # it counts after an interrupt or a kill
                values = {"label": label, "state": records.IN_PROGRESS, "allowed_seconds": self.each, "cost_usd": paid}
                self.known.add(key, values, run)

        run = left or self.subject.run(changes, self._until(steps), self.say, started)
        trial = Trial(changes, run, began=_began(run))
        cost = run.outcome().get("cost_usd", self.ceiling)
        values: dict[str, Any] = {"label": label, "state": run.state, "allowed_seconds": allowed}
        values["cost_usd"] = cost if cost is None else paid + cost
        if run.state == records.FAILED:
            trial.failed = " ".join(run.outcome().get("failure", run.state).split())[: engine.LONGEST_REASON]
        else:
            try:
                values |= _figures(trial)
            except UserError as error:
                if not self.used:  # the job as it is cannot be measured, so nothing can
                    raise
                trial.failed = error.issues[0].found
        self.known.add(key, {**values, "failure": trial.failed, "seconds": time.monotonic() - began}, run)
        said = trial.failed or f"{float(values['step_seconds']):.3g} s a step, all pauses counted; {values['headline']}"
        self.say(f"{len(self.used) + 1}/{self.most}  {label}: {said}")
        return trial

    def _left(self, row: Row) -> Run | None:
        """The run of a trial that an interrupt left to itself, where it shows what it was to show. Any other that goes on is stopped."""
        if row["state"] != records.IN_PROGRESS:
            return None
        run = self._recorded(row["run"])
        if run.wait(0, progress=False) not in records.OVER:
            self.say(f"stopping {run.name}, which was left running")
            run.stop("its tuning was interrupted")
            run.wait(150, progress=False)
            return None
        reason = run.outcome().get("stop_reason", "")
        ends = (TIME_IS_OVER.partition("}")[2], STEPS_ARE_MADE.partition("}")[2])
        return run if run.state == records.COMPLETED or reason.endswith(ends) else None

    def _until(self, steps: int | None) -> Until:
        """Why to stop a trial; "" while it is to go on. Its time counts from its first steps on; of a script whose steps are not seen while
        it runs from its start on."""
        began = first = script = 0.0

        def until(run: Run) -> str:
            nonlocal began, first, script
            now, lines = time.monotonic(), run.metrics()
            began = began or now
            if lines:
                first = first or now
                if steps is not None and _last_step(lines) >= steps:
                    return STEPS_ARE_MADE.format(steps)
                return TIME_IS_OVER.format(self.each) if now - first > self.each else ""
            if not self.subject.shows_steps and _began(run):
                script = script or now
                return TIME_IS_OVER.format(self.each) if now - script > UNSEEN_START + self.each else ""
            return f"no step within {START:.0f} s" if now - began > START else ""

        return until


def _began(run: Run) -> bool:
    """Whether a run's script was started. On SageMaker hosts may be lacking, or data not be there; no setting of the script is to blame for
    that."""
    remote = run.folder.read(run.folder.remote)
    if not remote:  # not on SageMaker
        return True
    stages = remote.get("SecondaryStatusTransitions", [])
    return any(stage["Status"] == "Training" for stage in stages)


def _last_step(metrics: Sequence[Mapping[str, Any]]) -> int:
    """0 where none was logged."""
    step = metrics[-1].get("step") if metrics else None
    return step if isinstance(step, int) else 0


def whole(first: Trial) -> float | None:
    """Images of the whole job; None: not known.

    Args:
        first: of the job as it is. What it says of its length counts; else what it did, where it came to its end.
    """
    batch = first.diagnosis.evidence.settings.get("global_batch_size")
    steps = [metric.steps for metric in first.run.progress() if metric.steps]
    if steps and isinstance(batch, int):
        return float(steps[-1] * batch)
    return first.course.last if first.run.state == records.COMPLETED else None


def _figures(trial: Trial) -> dict[str, Any]:
    """Columns for people. Raises a UserError where the run is too short."""
    course, evidence = trial.course, trial.diagnosis.evidence
    batch = evidence.settings.get("global_batch_size")
    each = course.each(course.last)
    return {
        "step_seconds": each * batch if isinstance(batch, int) else each,
        "images_per_second": 1 / each if isinstance(batch, int) else None,
        "mfu": evidence.mfu,
        "headline": trial.diagnosis.headline,
    }
