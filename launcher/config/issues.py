"""What was found wrong with a job, and the one exception that carries it to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "not checked"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, doubtful or unknown about a job.

    >>> [warning] = launcher.plan(launcher.load("configs/kt_food_tag.yaml"), on="aws").findings[:1]
    >>> warning.level, warning.key
    ('warning', 'image')
    """

    key: str
    """Where: the config key with dots (`compute.instance_count`), or a file."""
    found: str
    """What stands there."""
    valid: str = ""
    """What could stand there."""
    cure: str
    """What to do, as an instruction or a command."""
    level: Level = "error"

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.found}"]
        if self.valid:
            lines.append(f"  valid: {self.valid}")
        lines.append(f"  cure:  {self.cure}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class UserError(ValueError):
    """The user's mistakes, all at once. The command line prints it without a traceback and exits with 2, a notebook too.

    >>> try:
    ...     launcher.load("configs/quickstart.yaml", ["compute.max_hour=2", "compute.instance_count=0"])
    ... except launcher.UserError as mistakes:
    ...     for finding in mistakes.findings:
    ...         print(finding.key, "-", finding.cure)
    compute.instance_count - write instance_count: 2
    compute.max_hour - did you mean max_hours?
    """

    def __init__(self, findings: Iterable[Finding], title: str = "", rest: Any = None):
        self.findings = tuple(findings)
        self.rest = rest
        """What can still be made of the input without its wrong parts, so that the rest can be checked too; None: nothing."""
        assert self.findings, "a UserError without a finding tells nobody anything"
        self.title = title
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.findings)
        head = f"{count} mistake{'s' if count > 1 else ''}" + (f" in {self.title}" if self.title else "")
        body = "\n".join(indent(str(finding)) for finding in self.findings)
        return f"{head}:\n{body}"

    def _render_traceback_(self) -> list[str]:
        """In a notebook, as on the command line: the mistakes without a traceback."""
        return str(self).splitlines()


def mistake(key: str, found: str, cure: str, valid: str = "") -> UserError:
    """A UserError with a single finding."""
    return UserError([Finding(key=key, found=found, valid=valid, cure=cure)])


def did_you_mean(word: str, words: Iterable[str], otherwise: str = "remove it") -> str:
    """The cure for an unknown word: the nearest known one, or `otherwise` where none is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise


def counted(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def indent(text: str, prefix: str = "  ") -> str:
    return "\n".join(prefix + line for line in text.splitlines())
