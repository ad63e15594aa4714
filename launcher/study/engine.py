"""The engine of every study: it runs the trials missing from the table, and records each as soon as it ends.

A study may be killed at any moment: the same call resumes where the table ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import backends
from launcher.backends.plans import check, plan
from launcher.config.issues import UserError, mistake
from launcher.config.job import Job
from launcher.planner.own_checkpoints import with_own_checkpoints
from launcher.planner.plan import Plan, refuse_cost, refuse_errors
from launcher.planner.source_package import source_files
from launcher.record import records, trial_tables
from launcher.runner.run import Run, start
from launcher.runner.run_to_completion import run_to_completion
from launcher.show.text import counted, dollars
from launcher.study.conditions import Code, commit_of, machine_of
from launcher.study.question import Question, Trial
from launcher.study.trial_table import Row, TrialTable, held
from launcher.study.under_way import RunningTrial, stopped_on_error

Log = Callable[[str], None]
"""Takes a line for people."""

LONGEST_REASON = 300
"""Maximum characters shown of a failure."""


@dataclass(frozen=True)
class Outcome:
    """What the trials produced."""

    file: Path
    """The table."""
    rows: list[Row]
    """The rows of this study's trials, in their order."""
    failed: list[str]
    """The trials that did not complete, and why."""


def run(question: Question, table: str | Path | None, max_cost: float | None, log: Log) -> Outcome:
    """Run the trials that the table does not hold yet.

    Args:
        table: a CSV file. None: studies/<job>-<study>-<backend>[-smoke].csv in the run store.
        max_cost: US dollars for all trials together; None: no limit.

    Raises:
        UserError: the table holds trials run under other conditions, another study is using it, the trials could cost too much, or the
            code is changed while they run.
    """
    for note in question.notes:
        log(note)
    file = _own_file(question) if table is None else Path(table)
    source = plan(question.base, on=question.on).source
    code = Code(source_files(source, question.base)[0])
    conditions = {
        "code": code.checksum,
        "settings": question.settings(),
        "machine": machine_of(question.base, question.on),
    }
    with held(file):
        every = list(question.trials())
        under_way = RunningTrial(file, conditions)
        left = under_way.left(every, log)  # before the table, which may be refused while this trial runs
        with stopped_on_error(left, log):
            known = TrialTable(file, question.keys, question.measured, conditions, commit_of(source))
            missing = [trial for trial in every if known.find(trial.key) is None]
            log(f"{len(every)} trials, {len(every) - len(missing)} of them in {file}")
            if missing:
                report_price([trial.job for trial in missing], question.on, max_cost, log)
        with what_stays(log) as begun:
            failed = _run(missing, question, code, known, under_way, left, log, begun)
        rows = [row for trial in every if (row := known.find(trial.key)) is not None]
    return Outcome(file, rows, failed)


@contextlib.contextmanager
def what_stays(log: Log) -> Iterator[list[Run]]:
    """On exit, even after Ctrl-C or an error, say what the runs' hosts still cost and how to end that.

    Yields:
        A list for the started runs, in their order.
    """
    begun: list[Run] = []
    try:
        yield begun
    finally:
        for one in begun:
            try:
                one.settle()  # a later run may have taken its hosts
                costs = one.remaining_costs
            except UserError as error:  # swallowed, so that an earlier error is still raised
                costs = str(error)
            if costs:
                log(costs)


def _own_file(question: Question) -> Path:
    name = f"{question.job.name}-{question.kind}-{question.on}{'-smoke' if question.small else ''}.csv"
    return trial_tables.folder() / name


def _run(
    missing: Sequence[Trial],
    question: Question,
    code: Code,
    known: TrialTable,
    under_way: RunningTrial,
    left: tuple[Trial, Run] | None,
    log: Log,
    begun: list[Run],
) -> list[str]:
    """Run trials one after the other. A trial that was `left` comes first, since `under_way` keeps only one, and is waited for.

    Args:
        code: of the table's trials.
        begun: receives the started runs.

    Returns:
        A message for each trial that did not complete.
    """
    failed: list[str] = []
    given_up: set[Hashable] = set()
    for number, trial in enumerate(sorted(missing, key=lambda trial: left is None or trial is not left[0]), 1):
        if given_up & {trial.group, *trial.needs}:
            failed.append(f"{trial}: left out after an earlier failure")
            continue
        label = f"{number}/{len(missing)}  {trial}"
        if left is not None and left[0] is trial:
            to_follow: Plan | Run = left[1]
        else:
            code.refuse_changes(known.file)
            to_follow = _planned(trial.job, question.on)

        def started(run: Run, trial: Trial = trial) -> None:
            begun.append(run)
            under_way.write(trial, run)

        done = _run_to_completion(to_follow, started, log)
        try:
            outcome = done.outcome()
            if done.state != records.COMPLETED:
                why = " ".join(outcome.get("failure", outcome.get("stop_reason", "")).split())[:LONGEST_REASON]
                raise RuntimeError(f"{done.state}{': ' if why else ''}{why}")
            if "not_saved" in outcome and not done.result():
                raise RuntimeError(f"its results are not here: {'; '.join(outcome['not_saved'])}")
            measured = question.measure(done)
        except (RuntimeError, UserError) as error:
            under_way.over()
            given_up.add(trial.group)
            failed.append(f"{trial}: {error}; launcher logs {done.name}")
            log(f"{label}: {done.state}")
            continue
        known.add(trial.key, measured, done)
        under_way.over()
        log(f"{label}: {question.progress(measured)}")
    return failed


def _planned(job: Job, on: str) -> Plan:
    """A checked plan; its issues were reported for all trials at once."""
    return check(plan(with_own_checkpoints(job, "study"), on=on))


def _run_to_completion(planned: Plan | Run, started: Callable[[Run], None], log: Log) -> Run:
    """Start a plan, or wait for a run. If this process is interrupted, the run is stopped first."""

    def interrupted() -> None:
        log("stopping the running trial; the same command resumes the study with it")

    def begin() -> Run:
        return planned if isinstance(planned, Run) else start(planned)

    return run_to_completion(begin, log=log, interrupted=interrupted, started=started)


def report_price(jobs: Sequence[Job], on: str, max_cost: float | None, log: Log) -> None:
    """Before the first trial starts, say what the trials' instance groups do and what all trials cost at most.

    Args:
        jobs: at least one.

    Raises:
        UserError: together they could cost more than `max_cost` US dollars, their price is unknown, or AWS would refuse some of them.
    """
    plans = _plans_by_hosts(jobs, on)
    for planned, _ in plans:
        refuse_errors(planned)
    for issue in dict.fromkeys(f"{issue.level}: {issue}" for planned, _ in plans for issue in planned.issues):
        log(issue)
    for planned, trials in plans:
        if planned.groups:
            log(f"{counted(trials, 'trial')} with {counted(len(planned.groups), 'instance group')}:")
        hours = None if planned.price is None else planned.job.compute.max_hours
        for group in planned.groups:
            log(f"  {group.text(hours)}")
    if plans[0][0].price is None:
        return
    known = [backends.get(on).price(job) for job in jobs]
    ceilings = [(price.ceiling, price.text) for price in known if price is not None and price.ceiling is not None]
    count = counted(len(jobs), "trial")
    if len(ceilings) < len(jobs):
        unpriced = next(planned for planned, _ in plans if planned.price is None or planned.price.ceiling is None)
        assert unpriced.price is not None
        about = f"{len(jobs) - len(ceilings)} of {count}" if ceilings else count
        log(f"{about}, each: {unpriced.price.text}")
        if max_cost is not None:
            refuse_cost(unpriced, max_cost)
        return
    total, (_, highest) = sum(ceiling for ceiling, _ in ceilings), max(ceilings, key=lambda price: price[0])
    alike = len({ceiling for ceiling, _ in ceilings}) == 1
    log(f"{count}: at most {dollars(total)} in all; {'each' if alike else 'the most expensive'} {highest}")
    if max_cost is not None and not total <= max_cost:  # nan allows nothing
        fix = "lower compute.max_hours or study.repeats, or allow more"
        raise mistake("--max-cost", f"at most {dollars(total)} in all", fix, valid=f"at most {dollars(max_cost)}")


def _plans_by_hosts(jobs: Sequence[Job], on: str) -> list[tuple[Plan, int]]:
    """A plan for each kind of hosts that trials run on, priced if AWS's list has it, and the number of trials on these hosts."""
    alike: dict[Hashable, list[Job]] = {}
    for job in jobs:
        alike.setdefault((job.compute.instance_type, *job.compute.instance_groups), []).append(job)
    # the job with the most hosts: a quota, subnets or security groups that suffice for it suffice for all
    most = [(max(each, key=lambda job: job.compute.instance_count), len(each)) for each in alike.values()]
    plans = [(plan(with_own_checkpoints(job, "study"), on=on), count) for job, count in most]
    # a check reads AWS's price list, hence the prices of all trials on these instance types; a quota is found before any trial
    return [(check(planned) if planned.price is not None else planned, count) for planned, count in plans]
