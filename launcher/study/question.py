"""A study's question: which trials answer it, and what is measured of each."""

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
    """The columns that tell its row of the table, `repeat` among them."""
    job: Job
    name: str
    """For people, without the repeat."""
    group: Hashable
    """Trials of one group fail alike: after one failed, the others are left out."""
    needs: tuple[Hashable, ...] = ()
    """Groups whose failure leaves this trial out too."""

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
    """What every trial is made of."""
    on: str
    """The backend."""
    small: bool
    """Whether the config's `smoke` section applies."""
    grid: StudySection
    """With nothing left open."""
    notes: list[str] = field(default_factory=list)
    """For people, before the first trial and below the answer."""

    @abstractmethod
    def trials(self) -> Iterator[Trial]:
        """Every trial, in the order in which they run."""

    @abstractmethod
    def settings(self) -> str:
        """What all trials share of the job's settings, as JSON."""

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
    """The values forwards in odd repeats and backwards in even ones, so that none always has the warmer machine."""
    return values if repeat % 2 else values[::-1]


def read(config: str | Path, overrides: Sequence[str], smoke: bool) -> tuple[Job, list[Issue]]:
    """A config's job as far as it can be read, with every mistake in it.

    Raises:
        UserError: nothing can be made of it.
    """
    try:
        return load(config, overrides, smoke=smoke), []
    except UserError as error:
        if error.rest is None:
            raise UserError(error.issues, str(config)) from None
        return error.rest, list(error.issues)


def planning_errors(jobs: Iterable[Job], on: str, found: Sequence[Issue]) -> list[Issue]:
    """Every error of the jobs' plans, once; without those about a key that is already among `found`."""
    known = {issue.key.split(" (line")[0] for issue in found}
    seen = {str(issue) for issue in found}
    new = []
    for job in jobs:
        for issue in plan(job, on=on).errors:
            if issue.key not in known and str(issue) not in seen:
                seen.add(str(issue))
                new.append(issue)
    return new
