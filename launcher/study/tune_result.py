"""What a tuning found: the changes that were kept, the new config as a diff, and the remaining limit."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher import backends
from launcher.config import yaml_edit, yaml_file
from launcher.config.issues import UserError, mistake
from launcher.config.redaction import REDACTED, mentions_a_secret, redact_command
from launcher.insight import outside
from launcher.insight.comparison import Comparison
from launcher.record import records
from launcher.runner.run import Run
from launcher.show import html
from launcher.show.table import Table
from launcher.show.text import counted
from launcher.study import tune_page
from launcher.study.tune_search import Search, Step, Trial
from launcher.study.tune_settings import RULES
from launcher.study.tune_subject import CommandSubject, JobSubject, Subject


@dataclass
class Tuning:
    """What a tuning found. `print` it, show it in a notebook, `save_html` its page, `write` the new config.

    >>> few = ["hyperparameters.max_steps=20"]
    >>> found = launcher.tune("configs/quickstart_teacher.yaml", few, trials=1, log=lambda line: None)
    >>> found.changes, found.speedup
    ({}, 1.0)
    """

    subject: Subject
    file: Path
    """The table of its trials, a CSV file."""
    search: Search
    config: Path | None
    """The config; None: a command was tuned."""
    text: str = ""
    """The config's, from before the first trial."""
    small: bool = False
    """Whether the config's `smoke` section applied."""
    given: Sequence[str] = ()
    """The call's own `key=value`."""

    @property
    def changes(self) -> dict[str, Any]:
        """Setting -> value, for all changes that were kept."""
        return dict(self.search.best[-1].changes) if self.search.best else {}

    @property
    def steps(self) -> list[Step]:
        """The changes that were tried, in order."""
        return self.search.steps

    @property
    def failed(self) -> bool:
        """Whether the unchanged job did not run: it failed, or the budget did not allow it."""
        return not self.search.first or bool(self.search.first[0].failed)

    @property
    def first(self) -> Run:
        """The first run of the unchanged job. Raises UserError if the budget did not allow it."""
        if not self.search.first:
            raise mistake("the budget", self.search.ended, "allow more: max_cost, trials or minutes")
        return self.search.first[0].run

    @property
    def comparison(self) -> Comparison:
        """The first run of the unchanged job against the latest of the fastest settings: the same settings if nothing was kept.
        Raises UserError if the unchanged job did not run."""
        if self.failed:
            raise mistake("the job as it is", self.search.ended, "see its log, fix it, and tune again")
        return Comparison(self.search.first[0].diagnosis, self.search.best[-1].diagnosis)

    @property
    def speedup(self) -> float:
        """Of the whole job: the product of the kept changes' speed-ups."""
        return math.prod(step.gain or 1.0 for step in self.steps if step.kept)

    @property
    def limit(self) -> str:
        """What limits the fastest settings."""
        return "" if self.failed else self.search.best[-1].diagnosis.headline

    @property
    def overrides(self) -> list[str]:
        """The changes as `key=value` overrides of a config."""
        return [yaml_file.as_override(key, value) for key, value in self._keys().items()]

    def _keys(self) -> dict[str, Any]:
        if not isinstance(self.subject, JobSubject):
            return {}
        values = self.subject.values(self.changes)
        return {f"{section}.{name}": value for section, part in values.items() for name, value in part.items()}

    def _keys_to_write(self) -> dict[str, Any]:
        """The call's own values, without secrets, and the changes."""
        given = (text.partition("=") for text in self.given if not mentions_a_secret(text))
        values = {key.strip(): yaml_file.parse(f"value: {value}", key).values["value"] for key, _, value in given}
        return {**values, **self._keys()}

    def new_config(self) -> str | None:
        """The config's text with the call's own values and the changes; None if a command was tuned, or if aliases or the layout hide
        where one belongs."""
        if self.config is None:
            return None
        keys = {f"smoke.{key}" if self.small else key: value for key, value in self._keys_to_write().items()}
        given = [yaml_file.as_override(key, value) for key, value in keys.items()]
        wanted, problems = yaml_file.override(yaml_file.parse(self.text, str(self.config)), given)
        try:
            edited = yaml_edit.with_values(self.text, keys)
            return None if problems or yaml_file.parse(edited, "").values != wanted.values else edited
        except (UserError, yaml.YAMLError):  # the edited text is no longer YAML
            return None

    def diff(self) -> str:
        """The changes to the config, as a unified diff without secrets; "" if nothing was kept, or there is no config."""
        new = self.new_config()
        if self.config is None or new is None or not self.changes:
            return ""
        before, after = (text.splitlines(keepends=True) for text in (self.text, new))
        lines = list(difflib.unified_diff(before, after, str(self.config), f"{self.config} (tuned)", n=0))
        return "".join([*lines[:2], *map(_without_secrets, lines[2:])])

    def write(self, file: str | Path) -> Path:
        """Write the new config. Secrets in the call's own values are left out.

        Raises:
            UserError: a command was tuned, or the config's layout hides where a change belongs.
        """
        new = self.new_config()
        if new is None:
            found = (
                "a command has no config"
                if self.config is None
                else f"the layout of {self.config} hides where a key belongs"
            )
            raise mistake("--write", found, f"change it yourself: {shlex.join(self._words()) or 'see the lines above'}")
        records.write_named(Path(file), new)
        return Path(file)

    def to_dict(self) -> dict[str, Any]:
        """For machines; trials by their runs' names."""
        return {
            "name": self.subject.name,
            "table": str(self.file),
            "changes": self.changes,
            "overrides": self.overrides,
            "speedup": None if self.failed else self.speedup,
            "ended": self.search.ended,
            "limit": self.limit or None,
            "steps": [
                {
                    "change": str(step.proposal),
                    "gain": step.gain,
                    "kept": step.kept,
                    "verdict": step.verdict,
                    "why": step.why,
                }
                for step in self.steps
            ],
            "trials": [trial.run.name for trial in self.trials()],
        }

    def table(self) -> Table:
        """A row for each change."""
        rows = [
            [
                str(step.proposal),
                f"{step.gain:.2f}" if step.gain is not None else "-",
                step.verdict,
                step.why,
            ]
            for step in self.steps
        ]
        return Table(["change", "speed-up", "", "why"], rows)

    def sentences(self) -> list[str]:
        """The answer."""
        search = self.search
        trials = counted(len(self.trials()), "trial")
        if self.failed:
            return [search.ended]
        several = sum(step.kept for step in self.steps) > 1
        product = ", the product of what each kept change measured," if several else ", measured"
        known = search.whole is not None
        of = "of the whole job" if known else "of its steps (without the start: the job's length is not known)"
        lines = [f"speed-up {self.speedup:.2f} {of}{product} in {trials}; ended: {search.ended}"]
        option = None if search.cut_off else re.search(r"\((--[a-z-]+)\)$", search.ended)  # of the budget that is spent
        undecided = [str(step.proposal) for step in self.steps if not step.decided]
        if undecided and (option or search.cut_off):
            more = f" with more {option[1]}" if option else ""
            lines.append(f"{', '.join(undecided)}: not decided; the same command{more} continues")
        lines += [f"{step.proposal}: {step.losses}" for step in self.steps if step.kept and step.losses]
        lines.append(f"the limit that is left: {self.limit}")
        for proposal, needed in search.refused():
            reason = RULES[needed[0]].reason
            lines.append(
                f"not tried: {proposal} ({proposal.finding.title}): {reason}; --allow {','.join(needed)} tries it"
            )
        lines += [f"--allow {name} changed nothing: no finding asked for it" for name in search.unused()]
        secret = [text.partition("=")[0] for text in self.given if mentions_a_secret(text)]
        lines += [f"not in the new config: {key}, which may hold a secret; give it again" for key in secret]
        lines += self._config_now()
        left = search.best[-1].diagnosis.findings
        lines += [f"in the script: {fix}" for finding in left[:1] for fix in finding.fixes if fix.at is not None]
        return lines

    def _config_now(self) -> list[str]:
        """That the config is no longer as it was tuned; [] if it is, or was written with the changes."""
        if self.config is None:
            return []
        try:
            now = self.config.read_text(encoding="utf-8", errors="replace")
        except OSError:
            now = None
        if now in (self.text, self.new_config()):
            return []
        became = "cannot be read any more" if now is None else "was changed meanwhile"
        return [f"{self.config} {became}: the new config is made of its text from before the first trial"]

    def how(self) -> list[tuple[str, bool]]:
        """How to apply the changes to the job: (lines of the script, a diff or a command; whether that is a command to paste)."""
        if not self.changes:
            return []
        lines = []
        if isinstance(self.subject, CommandSubject):
            lines = [(line, False) for line in self._lines()]
            variables = self.subject.variables(self.changes)
            command = outside.watch_command(variables, redact_command(self.subject.command))
        elif diff := self.diff():
            return [(diff.rstrip(), False)]
        else:
            options = ["--smoke"] if self.small else []
            options += ["--on", self.subject.on] if self.subject.on != backends.DEFAULT else []
            command = shlex.join(["launcher", "run", str(self.config), *options, *self._words()])
        return [*lines, (command, REDACTED not in command)]

    def _words(self) -> list[str]:
        """The call's own values and the changes as words of a command, without secrets."""
        shown = [f"{one.partition('=')[0]}={REDACTED}" if mentions_a_secret(one) else one for one in self.given]
        return [*shown, *self.overrides]

    def _lines(self) -> list[str]:
        """The lines of the script that the changes belong to."""
        fixes = [(step, fix) for step in self.steps if step.kept for fix in step.proposal.finding.fixes if fix.change]
        found = {
            fix.setting: fix.set_to(step.proposal.value, "")
            for step, fix in fixes
            if fix.setting == step.proposal.setting
        }
        return [f"in the script: {fix}" for fix in found.values()]

    def trials(self) -> list[Trial]:
        """Every trial, each once."""
        every = [*self.search.first, *(trial for step in self.steps for trial in (*step.before, *step.after))]
        return list({trial.run.name: trial for trial in every}.values())

    def __str__(self) -> str:
        parts = [str(self.table())] if self.steps else []
        return "\n\n".join([*parts, "\n".join(self.sentences()), *(text for text, _ in self.how())])

    def __repr__(self) -> str:
        return f"<tuning of {self._title}>"

    def _repr_html_(self) -> str:
        return self._html(html.image)

    def _html(self, render: html.Renderer) -> str:
        return tune_page.fragment(self._title, self.sentences(), self.how(), self.steps, render)

    def save_html(self, file: str | Path) -> Path:
        """Write one page: each change with its evidence, expected and obtained gain, then both diagnoses with charts."""
        shown = [] if self.failed else [self.search.first[0], *([self.search.best[-1]] if self.changes else [])]
        records.write_named(Path(file), tune_page.page(self._title, self._html(html.inline), shown))
        return Path(file)

    @property
    def _title(self) -> str:
        return f"{self.subject.name}: {self.search.ended if self.failed else f'speed-up {self.speedup:.2f}'}"


def _without_secrets(line: str) -> str:
    """A line of YAML, with its value redacted if it mentions a secret."""
    if not mentions_a_secret(line):
        return line
    key, colon, _ = line.partition(":")
    return f"{key}: {REDACTED}\n" if colon else f"{line[:1]}{REDACTED}\n"
