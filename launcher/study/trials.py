"""The table of a study's trials: a CSV file with a line for each that is over, and what all of its lines have in common."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.backends.plans import check, plan
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.planner.plan import Plan, refuse_cost
from launcher.planner.source_package import COMMIT_FILE, SourceFile
from launcher.record import records
from launcher.runner.run import Run, to_its_end
from launcher.show.text import dollars

ALIKE = ("code", "settings", "machine")
"""What must be the same in all lines of a table: a checksum of the code that travels, the job's settings but those that the study
varies, as JSON, and where the trials run."""

Row = dict[str, str]


class Table:
    """A study's trials that are over, in a CSV file.

    Args:
        file: is made with its folder; an existing one is gone on with.
        keys: the columns that say which trial a line is.
        measured: the columns of what came out.
        alike: the value of each of ALIKE now.
        commit: of the code, for people.

    Raises:
        UserError: the file is no such table, or its trials were other in code, settings or machine.
    """

    def __init__(
        self, file: Path, keys: Sequence[str], measured: Sequence[str], alike: Mapping[str, str], commit: str = ""
    ):
        self.file, self.keys, self.alike = file, tuple(keys), {**alike, "commit": commit}
        self.columns = (*keys, *measured, "run", "finished", "commit", *ALIKE)
        self.rows = self._read()

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """The line of a trial; None where it is not over."""
        wanted = {name: str(key[name]) for name in self.keys}
        return next((row for row in self.rows if all(row[name] == wanted[name] for name in wanted)), None)

    def add(self, key: Mapping[str, Any], measured: Mapping[str, Any], run: Run) -> None:
        """Write a trial down; a reader sees the file with its line or without it. Not known is an empty field."""
        values = {**key, **measured, **self.alike, "run": run.name, "finished": run.outcome().get("ended", "")}
        self.rows.append({name: _text(values.get(name)) for name in self.columns})
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        records.write_atomically(self.file, text.getvalue())

    def _read(self) -> list[Row]:
        if not self.file.exists():
            return []
        with open(self.file, newline="", encoding="utf-8", errors="replace") as stream:
            reader = csv.DictReader(stream)
            columns, rows = tuple(reader.fieldnames or ()), list(reader)
        another = f"name another file by --table, or remove it: rm {self.file}"
        if columns != self.columns or any(None in row.values() for row in rows):
            raise mistake("--table", f"{self.file} is no table of this study", another)
        found = []
        for name in ALIKE:
            for value in dict.fromkeys(row[name] for row in rows if row[name] != self.alike[name]):
                commit = next(row["commit"] for row in rows if row[name] == value)
                about = _difference(name, value, self.alike[name], commit, self.alike["commit"])
                found.append(Issue(key="--table", found=f"{self.file} holds trials of {about}", fix=another))
        if found:
            raise UserError(found, "trials that are not alike cannot be compared")
        return rows


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Keep a table for this process alone. Raises UserError where another has it."""
    if file.is_dir() or file.suffix != ".csv":
        raise mistake(
            "--table",
            f"{file} {'is a folder' if file.is_dir() else 'does not end in .csv'}",
            "name a file",
            valid="FILE.csv",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(f".{file.name}.lock"), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise mistake(
                "--table", f"{file} is another study's that runs now", "wait for it, or name another"
            ) from None
        yield


def tell_the_price(planned: Sequence[Plan], max_cost: float | None, say: Callable[[str], None]) -> None:
    """What all trials that are to run cost at most, before the first of them starts.

    Args:
        planned: at least one.

    Raises:
        UserError: they could cost more US dollars than `max_cost` together, or nobody knows what they cost.
    """
    first = planned[0]
    if first.price is not None and first.price.ceiling is None:
        first = check(first)  # reads AWS's price list, and all others' prices with it
    known = [backends.get(each.backend).price(each.job) for each in planned]
    if first.price is None:
        return
    ceilings = [(price.ceiling, price.text) for price in known if price is not None and price.ceiling is not None]
    count = f"{len(planned)} trials"
    if len(ceilings) < len(planned):
        say(f"{count}, each: {first.price.text}")
        if max_cost is not None:
            refuse_cost(first, max_cost)
        return
    total, (_, dearest) = sum(ceiling for ceiling, _ in ceilings), max(ceilings, key=lambda price: price[0])
    alike = len({ceiling for ceiling, _ in ceilings}) == 1
    say(f"{count}: at most {dollars(total)} in all; {'each' if alike else 'the dearest'} {dearest}")
    if max_cost is not None and not total <= max_cost:  # nan allows nothing
        fix = "lower compute.max_hours or study.repeats, or allow more"
        raise mistake("--max-cost", f"at most {dollars(total)} in all", fix, valid=f"at most {dollars(max_cost)}")


def try_once(job: Job, on: str, max_cost: float | None = None, say: Callable[[str], None] = lambda text: None) -> Run:
    """Run a job to its end. Where this process is interrupted the run is stopped first.

    Args:
        say: takes a line while the run's far side cannot be asked, and where it is interrupted.
    """

    def stopping() -> None:
        say("stopping the trial that runs: it stays out of the table, and the same command goes on with it")

    return to_its_end(plan(job, on=on), max_cost=max_cost, say=say, interrupted=stopping)


def code_checksum(files: Sequence[SourceFile]) -> str:
    """Of the files that travel: their paths and what is in them. The commit that this kit notes among them is no code: a table is
    gone on with after a commit that changed something else."""
    checksum = hashlib.sha256()
    for file in (file for file in files if file.path != COMMIT_FILE):
        checksum.update(f"{file.path}\0{hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return checksum.hexdigest()[:16]


def commit_of(source: Path) -> str:
    """The commit around a folder, with a + where it has changes that are not committed; "" outside a repository."""
    state, _ = records.git_state(source)
    return (state["commit"][:12] + ("" if state["clean"] else "+")) if state.get("commit") else ""


def settings_of(job: Job, varied: Sequence[str]) -> str:
    """All of a job that its measurements depend on, less the hyperparameters that are varied; as JSON."""
    parts = ("script", "distribution", "inputs", "environment")
    values = {name: value for name, value in job.model_dump(exclude_none=True).items() if name in parts}
    compute = ("instance_type", "instance_count", "instance_groups", "processes_per_host", "shm_gb")
    values["compute"] = {name: value for name, value in job.compute.model_dump().items() if name in compute and value}
    values["hyperparameters"] = {name: value for name, value in job.hyperparameters.items() if name not in varied}
    if values.pop("environment", None):  # it may hold secrets, and a table is shown around
        values["environment"] = hashlib.sha256(json.dumps(job.environment, sort_keys=True).encode()).hexdigest()[:16]
    return json.dumps(values, sort_keys=True)


def machine_of(job: Job, on: str) -> str:
    """Where the trials run, with the hardware and the software that compute."""
    return f"{on}: {backends.get(on).machine(job)}"


def _text(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _difference(name: str, before: str, now: str, commit_before: str, commit: str) -> str:
    """What a table's lines and the trials to come do not share, in words."""
    if name == "code":
        return f"other code: commit {commit_before or 'unknown'}, now {commit or 'unknown'}"
    if name == "machine":
        return f"another machine: {before}; now {now}"
    try:
        one, other = _flat(json.loads(before)), _flat(json.loads(now))
    except ValueError:
        return "other settings, which cannot be read"
    changed = [
        f"{key} {one.get(key, 'not set')!r}, now {other.get(key, 'not set')!r}"
        for key in sorted({**one, **other})
        if one.get(key) != other.get(key)
    ]
    return "other settings: " + "; ".join(changed)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {key: value for name, below in values.items() for key, value in _flat(below, f"{prefix}{name}.").items()}
