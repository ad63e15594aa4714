"""The trials of a tuning: each runs once, within the budget, and is a row of the table."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.issues import UserError, mistake
from launcher.record import records
from launcher.runner.run import Run
from launcher.runner.run_to_completion import run_to_completion
from launcher.show.text import counted, dollars
from launcher.study import engine
from launcher.study.trial_table import Row, TrialTable, read
from launcher.study.tune_search import BudgetExhausted, Trial
from launcher.study.tune_subject import Changes, Subject, Until

START = 900.0
"""Seconds that a trial may take until its first step: on SageMaker hosts start and data are copied."""

UNSEEN_START = 120.0
"""Seconds from the start of a script to its first step, if its steps are seen only once its output has arrived."""

TIME_IS_OVER, STEPS_ARE_MADE = EXPECTED_STOPS = "s as a trial are over", "steps of the first trial"
"""Endings of the stop reasons of a trial that showed what it was meant to."""

KEYS = ("changes", "repeat")
"""Columns of a trial's key: the changes as JSON, and which repeat of them it is."""

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
"""The other columns of the table; allowed_seconds of training, after which a trial is stopped; cost_usd, including what earlier attempts
cost."""


@dataclass
class Trials:
    """Runs the trials that the table lacks, within the budget.

    Args:
        most: maximum trials.
        most_seconds: of all trials together.
        each: seconds of training per trial.
        max_cost: US dollars for all trials together; None: no limit.
        ceiling: maximum US dollars per trial; None: free, or unknown.
        begun: receives the run of each trial, including those in the table.
    """

    subject: Subject
    known: TrialTable
    most: int
    most_seconds: float
    each: float
    max_cost: float | None
    ceiling: float | None
    log: Callable[[str], None]
    begun: list[Run] = field(default_factory=list)
    used: list[Row] = field(default_factory=list)
    first: Trial | None = None
    """Of the unchanged subject."""

    def __call__(self, changes: Changes, label: str, steps: int | None = None) -> Trial:
        text = json.dumps(changes, sort_keys=True)
        key = {"changes": text, "repeat": 1 + sum(row["changes"] == text for row in self.used)}
        row = self.known.find(key)
        left = None if row is None else self._left(row, steps)
        if row is None or self._runs_again(row, changes, steps):
            if left is None and (spent := self._spent(1, self.known.rows)):  # also what an earlier call paid for
                raise BudgetExhausted(spent)
            trial = self._run(key, changes, label, steps, left)
            row = self.known.rows[-1]
        else:
            trial = Trial(changes, self._recorded(row["run"]), row["failure"], first=self.first)
            self.begun.append(trial.run)
        self.used.append(row)
        self.first = self.first or trial
        return trial

    def _runs_again(self, row: Row, changes: Changes, steps: int | None) -> bool:
        """Whether a trial was interrupted, is the unchanged job, whose failure may be fixed by now, had no hosts, or was stopped by less
        time than there is now."""
        if row["state"] == records.IN_PROGRESS or (row["failure"] and not changes):
            return True
        if row["failure"] and not _began(self._recorded(row["run"])):
            return True
        return row["state"] == records.STOPPED and self._had_less_time(row, steps)

    def _had_less_time(self, row: Row, steps: int | None) -> bool:
        """Whether a stopped trial had less time than there is now, and did not make the steps."""
        if float(row["allowed_seconds"]) >= self.each:
            return False
        return steps is None or _last_step(self._recorded(row["run"]).metrics()) < steps

    def spent(self, trials: int) -> str:
        """Why the budget does not allow that number of trials; "" if it does. It counts the trials so far, so that the same command takes
        the same course again with those in the table."""
        return self._spent(trials, self.used)

    def _spent(self, trials: int, paid_for: Sequence[Row]) -> str:
        seconds = [float(row["seconds"]) for row in self.used]
        if len(self.used) + trials > self.most:
            return f"{counted(self.most, 'trial is', 'trials are')} spent (--trials)"
        if seconds and sum(seconds) + (trials - 0.5) * max(seconds) > self.most_seconds:
            minutes = self.most_seconds / 60
            return f"{minutes:g} {'minute is' if minutes == 1 else 'minutes are'} spent (--minutes)"
        if self.max_cost is None or self.ceiling is None:
            return ""
        paid = sum(map(self._paid, paid_for))
        if paid + trials * self.ceiling > self.max_cost:
            return f"{dollars(paid)} of {dollars(self.max_cost)} are spent, and a trial may cost {dollars(self.ceiling)} (--max-cost)"
        return ""

    def _paid(self, row: Row) -> float:
        """US dollars for a trial and its earlier attempts, including its warm pool; for an unknown cost, the ceiling."""
        paid = float(row["cost_usd"] or 0.0)
        if self.ceiling is None:
            return paid
        if row["state"] == records.IN_PROGRESS:
            outcome = self._recorded(row["run"]).outcome()
            if not outcome:
                return paid + self.ceiling  # with its warm pool
            paid += self._cost(self._recorded(row["run"])) or 0.0
        try:
            run = self._recorded(row["run"])
        except UserError:  # it was removed, and is paid for
            return paid if row["cost_usd"] else self.ceiling
        if not row["cost_usd"]:  # its price was not known when it was recorded
            paid = self._cost(run) or 0.0
        with contextlib.suppress(UserError):
            run.settle()
            paid += run.usd_after_end
        return paid

    def _cost(self, run: Run) -> float | None:
        """US dollars for a finished trial, or the ceiling if unknown; a job that never had hosts reports none, and cost nothing."""
        unknown = self.ceiling if self.ceiling is None or _had_hosts(run) else 0.0
        cost: float | None = run.outcome().get("cost_usd", unknown)
        return cost

    def _recorded(self, name: str) -> Run:
        try:
            return Run(records.find(name))
        except UserError:
            found = f"{self.known.file} names the run {name}, which is not in {records.store()}"
            fix = "set LAUNCHER_RUNS=… if it is in another store; else remove its row, and the same command runs only that trial again"
            raise mistake("--table", found, fix) from None

    def _run(self, key: dict[str, Any], changes: Changes, label: str, steps: int | None, left: Run | None) -> Trial:
        """Run a trial, or take one that was `left`, and record it."""
        if left is None:
            self.subject.code.refuse_changes(self.known.file)
        began, before = time.monotonic(), self.known.find(key)
        paid, allowed = 0.0, self.each
        if before is not None and left is not None:
            paid, allowed = float(before["cost_usd"] or 0.0), float(before["allowed_seconds"] or self.each)
        elif before is not None:
            paid = self._paid(before)

        def started(run: Run) -> None:
            self.begun.append(run)
            if (
                self.ceiling is not None or not run.on_this_machine
            ):  # after an interrupt or a kill it counts, and may go on
                values = {"label": label, "state": records.IN_PROGRESS, "allowed_seconds": self.each, "cost_usd": paid}
                self.known.add(key, values, run)

        run = left or self.subject.run(changes, self._until(steps), self.log, started)
        if before is not None and left is None:
            paid = self._paid(before)  # this run may have ended the warm pool of the one before
        trial = Trial(changes, run, began=_began(run), first=self.first)
        cost = self._cost(run)
        values: dict[str, Any] = {"label": label, "state": run.state, "allowed_seconds": allowed}
        values["cost_usd"] = cost if cost is None else paid + cost
        outcome = run.outcome()
        reason = outcome.get("stop_reason", "")
        if run.state == records.FAILED:
            trial.failed = " ".join(outcome.get("failure", run.state).split())[: engine.LONGEST_REASON]
        elif run.state == records.STOPPED and not reason.endswith(EXPECTED_STOPS) and not run.metrics():
            trial.failed = f"stopped: {reason}"[: engine.LONGEST_REASON]
        not_measured: UserError | None = None
        if not trial.failed:
            try:
                values |= _figures(trial)
            except UserError as error:
                not_measured, trial.failed = error, error.issues[0].found
        self.known.add(key, {**values, "failure": trial.failed, "seconds": time.monotonic() - began}, run)
        if not_measured is not None and not self.used:  # the job as it is cannot be measured, so nothing can
            raise not_measured
        failed = trial.failed if self.used else "failed"  # the search ends with the reason
        said = (
            failed
            if trial.failed
            else f"{float(values['step_seconds']):.3g} s a step, all pauses counted; {values['headline']}"
        )
        self.log(f"{len(self.used) + 1}/{self.most}  {label}: {said}")
        return trial

    def _left(self, row: Row, steps: int | None) -> Run | None:
        """The run of a trial that an interrupt left behind, once it is over, if it shows what it was meant to."""
        if row["state"] != records.IN_PROGRESS:
            return None
        run = self._recorded(row["run"])
        self.begun.append(run)
        run_to_completion(lambda: run, log=self.log, interrupted=lambda: None)
        if run.state == records.COMPLETED:
            return run
        as_meant = run.outcome().get("stop_reason", "").endswith(EXPECTED_STOPS)
        return run if as_meant and not self._had_less_time(row, steps) else None

    def _until(self, steps: int | None) -> Until:
        """Why to stop a trial; "" to let it go on. Its time counts from its first steps; for a script whose steps are not seen while
        it runs, from its start."""
        began = first = script = 0.0
        time_is_over = f"its {self.each:.0f} {TIME_IS_OVER}"

        def until(run: Run) -> str:
            nonlocal began, first, script
            now, lines = time.monotonic(), run.metrics()
            began = began or now
            if lines:
                first = first or now
                if steps is not None and _last_step(lines) >= steps:
                    return f"it made the {steps} {STEPS_ARE_MADE}"
                return time_is_over if now - first > self.each else ""
            if not self.subject.shows_steps and _began(run):
                script = script or now
                return time_is_over if now - script > UNSEEN_START + self.each else ""
            return f"no step within {START:.0f} s" if now - began > START else ""

        return until


def stop_left(table: Path, log: Callable[[str], None]) -> None:
    """Stop the trials that a killed tuning left running. Before its table is read as a TrialTable, which may be refused.

    Raises:
        UserError: SageMaker does not answer, or refuses to stop one.
    """
    for row in read(table)[1]:
        name = row.get("run")
        if row.get("state") != records.IN_PROGRESS or not name:
            continue
        try:
            run = Run(records.find(name))
        except UserError:  # it was removed, or is in another store
            continue
        if run.state not in records.OVER:  # an earlier stop may not have reached SageMaker
            log(f"stopping {run.name}, which was left running")
            run.stop("its tuning was interrupted")


def _began(run: Run) -> bool:
    """Whether a run's script was started. On SageMaker, hosts or data may be missing, for which no setting of the script is to blame."""
    remote = run.folder.read(run.folder.remote)
    if not remote:  # not on SageMaker
        return True
    stages = remote.get("SecondaryStatusTransitions", [])
    return any(stage["Status"] == "Training" for stage in stages)


def _had_hosts(run: Run) -> bool:
    """Whether a run got its hosts: SageMaker bills them from then on."""
    remote = run.folder.read(run.folder.remote)
    return not remote or "TrainingStartTime" in remote or _began(run)


def _last_step(metrics: Sequence[Mapping[str, Any]]) -> int:
    """0 if none was logged."""
    step = metrics[-1].get("step") if metrics else None
    return step if isinstance(step, int) else 0


def whole(first: Trial) -> float | None:
    """Images of the whole job; None: unknown.

    Args:
        first: of the unchanged job. The length that it reports counts; else what it did, if it completed.
    """
    batch = first.diagnosis.evidence.settings.get("global_batch_size")
    steps = [metric.steps for metric in first.run.progress() if metric.steps]
    if steps and isinstance(batch, int):
        return float(steps[-1] * batch)
    return first.course.last if first.run.state == records.COMPLETED else None


def _figures(trial: Trial) -> dict[str, Any]:
    """Columns for people. Raises UserError if the run is too short."""
    course, evidence = trial.course, trial.diagnosis.evidence
    batch = trial.batch
    each = course.each(course.last)
    return {
        "step_seconds": each * (batch or 1),
        "images_per_second": 1 / each if batch is not None else None,
        "mfu": evidence.mfu,
        "headline": trial.diagnosis.headline,
    }
