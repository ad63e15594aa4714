"""The table of a study's trials: a CSV file with a row for each finished trial, and the conditions that all of them share."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.config.issues import Issue, UserError, mistake
from launcher.record import records, trial_tables
from launcher.runner.run import Run
from launcher.show.spread import Spread, spread
from launcher.study.conditions import CONDITIONS, Code, difference

Row = dict[str, str]


class Repeats:
    """A base for dataclasses of repeated measurements: they hold the rows of the repeats and read their columns."""

    rows: tuple[Row, ...]

    def of(self, column: str) -> Spread | None:
        """A column over the repeats; None if it was not measured."""
        return spread(row[column] for row in self.rows)

    @property
    def rate(self) -> Spread:
        """Images a second."""
        found = self.of("images_per_second")
        assert found is not None, "every completed trial has it"
        return found


class TrialTable:
    """The finished trials.

    Args:
        file: created with its folder if missing; an existing one grows.
        keys: the columns that identify a trial.
        measured: the columns of what was measured.
        conditions: the current value of each of CONDITIONS.
        commit: of the code, for people.
        replaceable: whether trials under other conditions are forgotten if all of them failed.

    Raises:
        UserError: the file is not such a table, or its trials ran under other conditions.
    """

    def __init__(
        self,
        file: Path,
        keys: Sequence[str],
        measured: Sequence[str],
        conditions: Mapping[str, str],
        commit: str = "",
        *,
        replaceable: bool = False,
    ):
        self.file, self.keys, self.conditions = file, tuple(keys), {**conditions, "commit": commit}
        self.columns = (*keys, *measured, "run", "finished", "commit", *CONDITIONS)
        self.rows = self._read(replaceable)

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """A trial's row; None if it has not finished."""
        wanted = {name: str(key[name]) for name in self.keys}
        return next((row for row in self.rows if all(row[name] == wanted[name] for name in wanted)), None)

    def add(self, key: Mapping[str, Any], measured: Mapping[str, Any], run: Run) -> None:
        """Record a trial, replacing an earlier one with the same key. A reader sees the file with or without its row. None becomes an
        empty field."""
        values = {**key, **measured, **self.conditions, "run": run.name, "finished": run.outcome().get("ended", "")}
        row = {name: _text(values.get(name)) for name in self.columns}
        self.rows = [one for one in self.rows if any(one[name] != row[name] for name in self.keys)] + [row]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        records.write_atomically(self.file, text.getvalue())

    def _read(self, replaceable: bool) -> list[Row]:
        if not self.file.exists():
            return []
        columns, rows = read(self.file)
        fix = f"name another file with --table, or remove this one: rm {self.file}"
        if columns != self.columns or any(None in row.values() for row in rows):
            raise mistake("--table", f"{self.file} is not a table of this study", fix)
        found = []
        for name in CONDITIONS:
            for value in dict.fromkeys(row[name] for row in rows if row[name] != self.conditions[name]):
                commit = next(row["commit"] for row in rows if row[name] == value)
                how = difference(name, value, self.conditions[name], commit, self.conditions["commit"])
                found.append(Issue(key="--table", found=f"{self.file} holds trials of {how}", fix=fix))
        if found and replaceable and all(row.get("failure") for row in rows):
            return []
        if found:
            raise UserError(found, "the table: its trials cannot be compared with new ones")
        return rows


def read(file: Path) -> tuple[tuple[str, ...], list[Row]]:
    """The columns and rows of a CSV file, whatever it is; none of it if it is missing."""
    if not file.exists():
        return (), []
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        reader = csv.DictReader(stream)
        return tuple(reader.fieldnames or ()), list(reader)


def first_code(table: Path, now: Code) -> Code:
    """The code without files that are newer than a table's trials: a trial may have written them, such as a model's beside a checkpoint.
    The paths from before the first trial are kept beside the table.

    Args:
        table: held; without a trial that succeeded, all files are its code.
        now: of the command, as it is now.
    """
    file = trial_tables.code_list(table)
    if all(row.get("failure") for row in read(table)[1]):
        records.write_json(file, [one.path for one in now.files])
    first = None
    with suppress(OSError, ValueError):  # it stayed where the table was copied from, or is damaged
        first = json.loads(file.read_bytes())
    if not isinstance(first, list):
        return now
    return Code([one for one in now.files if one.path in first])


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Lock a table for this process: until then `launcher rm` and `prune` leave its trials.

    Raises:
        UserError: another process holds it, or the file's name is no table's.
    """
    if file.is_dir() or file.suffix != ".csv":
        found = f"{file} {'is a folder' if file.is_dir() else 'does not end in .csv'}"
        raise mistake("--table", found, "name a file", valid="FILE.csv")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(trial_tables.lock(file), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or name another file"
            raise mistake("--table", f"another study is using {file}", fix) from None
        with suppress(OSError):  # a store that cannot be written to gets no runs either
            trial_tables.remember(file)
        yield


def typed(row: Row) -> dict[str, Any]:
    """A row with its numbers as numbers, None for what was not measured, and the columns that describe the run unchanged."""
    described = ("run", "finished", "commit", *CONDITIONS)
    return {name: text if name in described else _value(text) for name, text in row.items()}


def _text(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _value(text: str) -> str | float | int | None:
    """The value that `_text` wrote."""
    for kind in (int, float):
        with suppress(ValueError):
            number: float | int = kind(text)
            return number if math.isfinite(number) else None
    return text or None
