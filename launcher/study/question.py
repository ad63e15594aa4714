"""A study's question: which trials answer it, and what is measured in each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from launcher.backends.plans import plan
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job, StudySection
from launcher.config.loading import load
from launcher.runner.run import Run

WARM_UP_STEPS = 5
"""As in entrypoints/training/measure/timeline.py: the first steps of a run, which are not counted."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    key: dict[str, Any]
    """The columns that identify its row in the table, including `repeat`."""
    job: Job
    name: str
    """For people, without the repeat."""
    group: Hashable
    """Trials of one group fail alike: after one fails, the others are skipped."""
    needs: tuple[Hashable, ...] = ()
    """Groups whose failure also skips this trial."""

    def __str__(self) -> str:
        return f"{self.name}, repeat {self.key['repeat']}"


@dataclass(kw_only=True)
class Question(ABC):
    """What one study asks about one config. It exists only once the config has no mistakes."""

    kind: ClassVar[str]
    """The study's name."""
    keys: ClassVar[tuple[str, ...]]
    """The columns of a trial's key."""
    measured: ClassVar[tuple[str, ...]]
    """The columns of what `measure` returns."""

    job: Job
    """As the config and the overrides describe it."""
    base: Job
    """The job that each trial varies."""
    on: str
    """The backend."""
    small: bool
    """Whether the config's `smoke` section applies."""
    grid: StudySection
    """With all defaults filled in."""
    notes: list[str] = field(default_factory=list)
    """Shown before the first trial and below the answer."""

    @abstractmethod
    def trials(self) -> Iterator[Trial]:
        """Every trial, in the order in which they run."""

    @abstractmethod
    def settings(self) -> str:
        """The job's settings that all trials share, as JSON."""

    @abstractmethod
    def measure(self, run: Run) -> dict[str, Any]:
        """The measured columns of a completed run; None: not measured.

        Raises:
            UserError: the run is too short to be measured.
        """

    @abstractmethod
    def progress(self, measured: dict[str, Any]) -> str:
        """A trial's result in a few words."""


def alternating(values: Sequence[Value], repeat: int) -> Sequence[Value]:
    """The values, forwards in odd repeats and backwards in even ones, so that none always gets the warmer machine."""
    return values if repeat % 2 else values[::-1]


def read(config: str | Path, overrides: Sequence[str], smoke: bool) -> tuple[Job, list[Issue]]:
    """As much of a config's job as can be read, with every mistake in it.

    Raises:
        UserError: no job can be read from it.
    """
    try:
        return load(config, overrides, smoke=smoke), []
    except UserError as error:
        if error.rest is None:
            raise UserError(error.issues, str(config)) from None
        return error.rest, list(error.issues)


def planning_errors(jobs: Iterable[Job], on: str, found: Sequence[Issue]) -> list[Issue]:
    """Every error in the jobs' plans, once each, except those about a key already in `found`."""
    known = {issue.key.split(" (line")[0] for issue in found}
    seen = {str(issue) for issue in found}
    new = []
    for job in jobs:
        for issue in plan(job, on=on).errors:
            if issue.key not in known and str(issue) not in seen:
                seen.add(str(issue))
                new.append(issue)
    return new
