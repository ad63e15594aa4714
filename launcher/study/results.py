"""A study's result: its table of trials with the answer, for a terminal, a notebook and a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from launcher.config.job import Job, StudySection
from launcher.record import records
from launcher.show import html
from launcher.show.page import document
from launcher.show.svg import Picture
from launcher.show.table import Table
from launcher.show.text import counted
from launcher.study.trial_table import Row, typed

NOT_MEASURED = "not measured"
"""Shown in place of a number."""


@dataclass
class Study(ABC):
    """What a study's trials show."""

    kind: ClassVar[str]

    job: Job
    on: str
    """The backend."""
    file: Path
    """The table, a CSV file."""
    grid: StudySection
    """With all defaults filled in."""
    table: list[Row]
    """The rows of the grid's trials."""
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Trials that did not complete, and why; the same command tries them again."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Every figure; empty if no trial yields one."""

    @abstractmethod
    def sentences(self) -> list[str]:
        """The answer."""

    @abstractmethod
    def charts(self) -> Picture:
        """The answer as SVG, which a notebook shows as an image."""

    @property
    def verdict(self) -> str:
        """The answer in a few lines."""
        return "\n".join(self.sentences())

    @property
    def title(self) -> str:
        return f"{self.kind.capitalize()} study of {self.job.name}"

    def to_dict(self) -> dict[str, Any]:
        """For machines: the answer, and every trial."""
        return {
            "kind": self.kind,
            "backend": self.on,
            "table": str(self.file),
            "verdict": self.sentences() if self.tables() else [],
            "trials": [typed(row) for row in self.table],
            "notes": self.notes,
            "failed": self.failed,
        }

    def plot(self, file: str | Path) -> Path:
        """Write the charts as SVG."""
        records.write_named(Path(file), self.charts())
        return Path(file)

    def __str__(self) -> str:
        tables, more = self.tables(), [*self.notes, *self.failed]
        if not tables:
            return "\n".join(["no trial has completed", *more])
        return "\n\n".join([*map(str, tables), "\n".join(["verdict", "", *self.sentences(), *more])])

    def __repr__(self) -> str:
        return f"<{self.kind} study {self.file.name}: {len(self.table)} trials>"

    def _repr_html_(self) -> str:
        return self._html(html.image)

    def _html(self, render: html.Renderer) -> str:
        """The charts first, then the answer in words, the tables, the notes and the failures."""
        tables, more = self.tables(), [*self.notes, *self.failed]
        head = f"<h1>{escape(self.title)}</h1><p class='about'>{counted(len(self.table), 'trial')}: {escape(str(self.file))}</p>"
        if not tables:
            return f"{head}<p>{escape('no trial has completed: ' + '; '.join(more))}</p>"
        answer = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in self.sentences())}</ul>"
        drawn = render(self.charts())
        rest = "".join(f"<p>{escape(line)}</p>" for line in more)
        listed = "".join(f"<div class='scroll'>{table.html()}</div>" for table in tables)
        return f"<div class='diagnosis'>{head}{drawn}{answer}{listed}{rest}</div>"

    def save_html(self, file: str | Path) -> Path:
        """Write the answer with its charts and tables as one page; it needs no other file and no network."""
        records.write_named(Path(file), document(self.title, self._html(html.inline)))
        return Path(file)
