"""`launcher tune`: the fastest settings of a job or a command, each change proven on the whole of it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.backends.plans import check, plan
from launcher.config.issues import UserError, mistake
from launcher.config.loading import load
from launcher.planner.plan import refuse_cost, refuse_errors
from launcher.record import records
from launcher.runner.run import Run
from launcher.show.text import counted, dollars
from launcher.study import engine
from launcher.study.trial_table import Row, TrialTable, held
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import PAIRS, Search, Spent, Trial
from launcher.study.tune_settings import check_allowed
from launcher.study.tune_subject import Changes, CommandSubject, JobSubject, Subject

Say = Callable[[str], None]

MINUTES, TRIALS = 30.0, 20
"""The budget unless another is given."""

SHORTEST = 15.0
"""Seconds of training of a trial, at least: less shows little beside the noise of a machine."""

START = 900.0
"""Seconds that a trial may take until its first step: on SageMaker hosts start and data are copied."""

KEYS = ("changes", "repeat")
"""Columns of a trial's key: the changes as JSON, and which of the trials with them it is."""

MEASURED = ("label", "state", "failure", "seconds", "cost_usd", "step_seconds", "images_per_second", "headline")
"""The other columns of the table."""


def tune(
    config: str | Path | Sequence[str],
    overrides: Sequence[str] = (),
    *,
    on: str = backends.DEFAULT,
    smoke: bool = False,
    allow: Sequence[str] = (),
    minutes: float = MINUTES,
    trials: int = TRIALS,
    max_cost: float | None = None,
    table: str | Path | None = None,
    say: Say = print,
) -> Tuning:
    """Find the fastest settings: measure, change what limits, measure the whole again in turns, keep or roll back, go on.

    >>> few = ["hyperparameters.max_steps=20"]
    >>> found = launcher.tune("configs/quickstart_teacher.yaml", few, trials=1, say=lambda line: None)
    >>> found.changes, len(found.trials())
    ({}, 1)

    Args:
        config: a YAML file; or a command's words, which run on this machine as under `launcher watch`.
        overrides: `key=value` texts.
        on: the backend.
        smoke: apply the config's `smoke` section.
        allow: settings that may change the training's numbers, for example precision; or num_workers where workers draw random numbers.
        minutes, trials: the budget. A trial trains for its part of the minutes at most.
        max_cost: US dollars, of all trials together; None: no limit.
        table: the CSV file of the trials. None: studies/<job>-tune-<backend>[-smoke].csv among the runs.
        say: takes a line for people at each trial.

    Raises:
        UserError: a mistake in the arguments or the config, a table of other trials, or a job that is too short to be measured.
    """
    allowed = check_allowed(allow)
    if not minutes > 0 or trials < 1:
        key, found = ("--minutes", f"{minutes:g}") if not minutes > 0 else ("--trials", str(trials))
        raise mistake(key, found, "give a larger number", valid="above 0")
    seconds = max(SHORTEST, minutes * 60 / trials)
    subject: Subject
    if isinstance(config, (str, Path)):
        job = load(config, overrides, smoke=smoke)
        refuse_errors(plan(job, on=on))
        subject = JobSubject(job, on, seconds + START)
    else:
        subject = _command(config, on)
        if max_cost is not None:
            found = f"{max_cost:g}: what a command costs is not known"
            raise mistake("--max-cost", found, "leave it out; --minutes and --trials limit it")
    file = Path(table) if table is not None else _own_file(subject, smoke)
    ceiling = _tell_the_price(subject, trials, max_cost, say)
    with held(file):
        known = TrialTable(file, KEYS, MEASURED, subject.conditions(), subject.commit)
        say(
            f"at most {counted(trials, 'trial')} of {seconds:.0f} s of training and {minutes:g} minutes; {file} holds {len(known.rows)}"
        )
        measure = _Trials(subject, known, trials, minutes * 60, seconds, max_cost, ceiling, say)
        search = Search(subject, allowed, measure, _whole, say)
        search.run()
    own = Path(config) if isinstance(config, (str, Path)) else None
    return Tuning(subject, file, search, own, smoke, overrides)


def _command(words: Sequence[str], on: str) -> CommandSubject:
    if on != backends.DEFAULT:
        raise mistake("--on", f"{on}: a command runs on this machine", "leave it out, or write a config for it")
    if not words or shutil.which(words[0]) is None:
        found = f"{words[0]}: no such program" if words else "none"
        raise mistake("command", found, "write it behind --: launcher tune -- python train.py")
    script = next((Path(word).stem for word in words if word.endswith((".py", ".sh"))), Path(words[0]).name)
    name = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-")[:37].strip("-") or "command"
    return CommandSubject(words, f"{name}-tune")


def _own_file(subject: Subject, smoke: bool) -> Path:
    name = subject.name if subject.name.endswith("-tune") else f"{subject.name}-tune"
    return records.store() / "studies" / f"{name}-{subject.on}{'-smoke' if smoke else ''}.csv"


def _tell_the_price(subject: Subject, trials: int, max_cost: float | None, say: Say) -> float | None:
    """US dollars that a trial costs at most; None: nothing, or not known.

    Raises:
        UserError: `max_cost` does not pay for one change, or the price is not known.
    """
    if not isinstance(subject, JobSubject):
        return None
    engine.tell_the_price([subject.base] * trials, subject.on, None, say)
    priced = plan(subject.base, on=subject.on)
    ceiling = priced.price.ceiling if priced.price is not None else None
    if max_cost is None or priced.price is None:
        return ceiling
    if ceiling is None:
        refuse_cost(check(priced), max_cost)
    elif not 2 * PAIRS * ceiling <= max_cost:  # nan allows nothing
        found = f"one change takes {2 * PAIRS} trials of at most {dollars(ceiling)} each"
        raise mistake(
            "--max-cost", found, "allow more, or give fewer minutes", valid=f"at least {dollars(2 * PAIRS * ceiling)}"
        )
    return ceiling


def _whole(first: Trial) -> float | None:
    """Images of the whole job: as the script says, or what it did where it came to its end; None: not known."""
    batch = first.diagnosis.evidence.settings.get("global_batch_size")
    steps = [metric.steps for metric in first.run.progress() if metric.steps]
    if steps and isinstance(batch, int):
        return float(steps[-1] * batch)
    return first.course.last if first.run.state == records.COMPLETED else None


@dataclass
class _Trials:
    """Runs the trials that the table lacks, within the budget."""

    subject: Subject
    known: TrialTable
    most: int
    most_seconds: float
    each: float
    """Seconds of training of a trial."""
    max_cost: float | None
    ceiling: float | None
    """US dollars of a trial at most."""
    say: Say
    used: list[Row] = field(default_factory=list)

    def __call__(self, changes: Changes, label: str, steps: int | None = None) -> Trial:
        text = json.dumps(changes, sort_keys=True)
        key = {"changes": text, "repeat": 1 + sum(row["changes"] == text for row in self.used)}
        row = self.known.find(key)
        if row is None or (row["failure"] and not changes):  # why the job as it is failed may be mended
            self._refuse_if_spent()
            trial = self._run(key, changes, label, steps)
            row = self.known.rows[-1]
        else:
            trial = Trial(changes, self._recorded(row["run"]), row["failure"])
        self.used.append(row)
        return trial

    def _recorded(self, name: str) -> Run:
        try:
            return Run(records.find(name))
        except UserError:
            fix = f"name another file with --table, or remove this one: rm {self.known.file}"
            raise mistake("--table", f"{self.known.file} names the run {name}, which was removed", fix) from None

    def _refuse_if_spent(self) -> None:
        seconds = [float(row["seconds"]) for row in self.used]
        spent = sum(float(row["cost_usd"] or self.ceiling or 0.0) for row in self.used)
        if len(self.used) >= self.most:
            raise Spent(f"{counted(self.most, 'trial is', 'trials are')} spent (--trials)")
        if seconds and sum(seconds) + max(seconds) / 2 > self.most_seconds:
            raise Spent(f"{self.most_seconds / 60:g} minutes are spent (--minutes)")
        if self.max_cost is not None and self.ceiling is not None and spent + self.ceiling > self.max_cost:
            raise Spent(
                f"{dollars(spent)} of {dollars(self.max_cost)} are spent, and a trial may cost {dollars(self.ceiling)} (--max-cost)"
            )

    def _run(self, key: dict[str, Any], changes: Changes, label: str, steps: int | None) -> Trial:
        began = time.monotonic()
        trial = Trial(changes, self.subject.run(changes, _until(self.each, steps), self.say))
        run, values = trial.run, {}
        if run.state == records.FAILED:
            trial.failed = " ".join(run.outcome().get("failure", run.state).split())[: engine.LONGEST_REASON]
        else:
            try:
                values = _figures(trial)
            except UserError as error:
                if not self.used:  # the job as it is cannot be measured, so nothing can
                    raise
                trial.failed = error.issues[0].found
        values |= {"label": label, "state": run.state, "failure": trial.failed, "seconds": time.monotonic() - began}
        self.known.add(key, {**values, "cost_usd": run.outcome().get("cost_usd")}, run)
        said = trial.failed or f"{float(values['step_seconds']):.3g} s a step, all pauses counted; {values['headline']}"
        self.say(f"{len(self.used) + 1}/{self.most}  {label}: {said}")
        return trial


def _until(seconds: float, steps: int | None) -> Callable[[Run], str]:
    """Why to stop a trial; "" while it is to go on. Its time counts from its first steps on."""
    began, first = time.monotonic(), 0.0

    def until(run: Run) -> str:
        nonlocal first
        now, lines = time.monotonic(), run.metrics()
        if not lines:
            return f"no step within {START:.0f} s" if now - began > START else ""
        first = first or now
        done = lines[-1].get("step")
        if steps is not None and isinstance(done, int) and done >= steps:
            return f"it made the {steps} steps of the first trial"
        return f"its {seconds:.0f} s as a trial are over" if now - first > seconds else ""

    return until


def _figures(trial: Trial) -> dict[str, Any]:
    """Columns for people. Raises a UserError where the run is too short."""
    course, evidence = trial.course, trial.diagnosis.evidence
    batch = evidence.settings.get("global_batch_size")
    each = course.each(course.last)
    return {
        "step_seconds": each * batch if isinstance(batch, int) else each,
        "images_per_second": 1 / each if isinstance(batch, int) else None,
        "headline": trial.diagnosis.headline,
    }
