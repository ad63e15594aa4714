"""`launcher tune`: the fastest settings of a job or a command, each change proven on the whole of it."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import backends
from launcher.backends.plans import check, plan
from launcher.config.builtin_configs import located
from launcher.config.issues import mistake
from launcher.config.loading import load
from launcher.planner.plan import refuse_cost, refuse_errors
from launcher.record import trial_tables
from launcher.show.text import counted, dollars
from launcher.study import engine
from launcher.study.trial_table import TrialTable, first_code, held
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import PAIRS, Search
from launcher.study.tune_settings import check_allowed
from launcher.study.tune_subject import CommandSubject, JobSubject, Subject
from launcher.study.tune_trials import KEYS, MEASURED, START, Trials, stop_left, whole

Log = Callable[[str], None]

MINUTES, TRIALS = 30.0, 20
"""The default budget."""

SHORTEST = 15.0
"""Minimum seconds of training in a trial: less shows little above a machine's noise."""


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
    log: Log = print,
) -> Tuning:
    """Find the fastest settings: measure, change what limits, measure the whole again alternately, keep or roll back, repeat.

    >>> few = ["hyperparameters.max_steps=20"]
    >>> found = launcher.tune("configs/quickstart_teacher.yaml", few, trials=1, log=lambda line: None)
    >>> found.changes, len(found.trials())
    ({}, 1)

    Args:
        config: a YAML file; or a command's words, which run on this machine as under `launcher watch`.
        overrides: `key=value` texts.
        on: the backend.
        smoke: apply the config's `smoke` section.
        allow: settings that may change the training's numbers, for example precision; or num_workers if workers draw random numbers.
        minutes, trials: the budget. A trial trains for at most its share of the minutes.
        max_cost: US dollars for all trials together; None: no limit.
        table: the CSV file of the trials. None: studies/<job>-tune-<backend>[-smoke].csv in the run store.
        log: receives a line for people at each trial.

    Raises:
        UserError: a mistake in the arguments or the config, a table of other trials, or a job that is too short to be measured. One after
            the first trial, such as code that was changed meanwhile, ends the search: `ended` in the result says why.
    """
    allowed = check_allowed(allow)
    if not minutes > 0 or trials < 1:
        key, found = ("--minutes", f"{minutes:g}") if not minutes > 0 else ("--trials", str(trials))
        raise mistake(key, found, "give a larger number", valid="above 0")
    seconds = max(SHORTEST, minutes * 60 / trials)
    subject: Subject
    source, text = None, ""
    if isinstance(config, (str, Path)):
        job = load(config, overrides, smoke=smoke)
        source = located(config)
        text = source.read_text(encoding="utf-8")
        refuse_errors(plan(job, on=on))
        subject = JobSubject(job, on, seconds + START)
    else:
        subject = _command(config, on)
        if max_cost is not None:
            found = f"{max_cost:g}: what a command costs is not known"
            raise mistake("--max-cost", found, "leave it out; --minutes and --trials limit it")
    file = Path(table) if table is not None else _own_file(subject, smoke)
    with held(file), engine.what_stays(log) as begun:
        stop_left(file, log)
        if isinstance(subject, CommandSubject):
            subject.code = first_code(file, subject.code)
        ceiling = _report_price(subject, trials, max_cost, log)
        own = table is None  # it was not named, so that naming another is no fix
        known = TrialTable(file, KEYS, MEASURED, subject.conditions(), subject.commit, replaceable=own)
        time = f"{minutes:g} {'minute' if minutes == 1 else 'minutes'}"
        log(
            f"at most {counted(trials, 'trial')} of {seconds:.0f} s of training and {time}; {file} holds {len(known.rows)}"
        )
        measure = Trials(subject, known, trials, minutes * 60, seconds, max_cost, ceiling, log, begun)
        search = Search(subject, allowed, measure, whole, log)
        search.run()
    return Tuning(subject, file, search, source, text, smoke, overrides)


def _command(words: Sequence[str], on: str) -> CommandSubject:
    if on != backends.DEFAULT:
        raise mistake("--on", f"{on}: a command runs on this machine", "leave it out, or write a config for it")
    if not words or shutil.which(words[0]) is None:
        found = f"{words[0]}: no such program" if words else "none"
        fix = (
            "check its path, or activate its environment"
            if words
            else "put it after --: launcher tune -- python train.py"
        )
        raise mistake("command", found, fix)
    script = next((Path(word).stem for word in words if word.endswith((".py", ".sh"))), Path(words[0]).name)
    name = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-")[:37].strip("-") or "command"
    return CommandSubject(words, f"{name}-tune")


def _own_file(subject: Subject, smoke: bool) -> Path:
    name = subject.name if subject.name.endswith("-tune") else f"{subject.name}-tune"
    return trial_tables.folder() / f"{name}-{subject.on}{'-smoke' if smoke else ''}.csv"


def _report_price(subject: Subject, trials: int, max_cost: float | None, log: Log) -> float | None:
    """US dollars that a trial costs at most; None: free, or unknown.

    Raises:
        UserError: `max_cost` does not cover one change, or the price is unknown.
    """
    if not isinstance(subject, JobSubject):
        return None
    engine.report_price([subject.base] * trials, subject.on, None, log)
    priced = plan(subject.base, on=subject.on)
    ceiling = priced.price.ceiling if priced.price is not None else None
    if max_cost is None or priced.price is None:
        return ceiling
    if ceiling is None:
        refuse_cost(check(priced), max_cost)
    elif not 2 * PAIRS * ceiling <= max_cost:  # nan allows nothing
        found = f"one change takes {2 * PAIRS} trials of at most {dollars(ceiling)} each"
        raise mistake(
            "--max-cost",
            found,
            "allow more, or give fewer minutes",
            valid=f"at least {dollars(math.ceil(100 * 2 * PAIRS * ceiling) / 100)}",
        )
    return ceiling
