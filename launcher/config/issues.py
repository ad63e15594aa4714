"""What is wrong with a job, and the exceptions that report it to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from launcher.show.text import indent

Level = Literal["error", "warning", "not checked"]


@dataclass(frozen=True, kw_only=True)
class Issue:
    """One thing about a job that is wrong, doubtful or not checked.

    >>> [warning] = launcher.plan(launcher.load("configs/kt_food_tag.yaml"), on="aws").issues[:1]
    >>> warning.level, warning.key
    ('warning', 'image')
    """

    key: str
    """Where: a dotted config key (`compute.instance_count`), an option, or a file."""
    found: str
    """What is there, or what is wrong with it."""
    valid: str = ""
    """What would be valid; empty if `fix` says it."""
    fix: str
    """What to do: an instruction or a command."""
    level: Level = "error"

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.found}"]
        if self.valid:
            lines.append(f"  valid: {self.valid}")
        lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class UserError(ValueError):
    """The user's mistakes, all at once. The command line prints them without a traceback and exits with 2.

    >>> try:
    ...     launcher.load("configs/quickstart.yaml", ["compute.max_hour=2", "compute.instance_count=0"])
    ... except launcher.UserError as mistakes:
    ...     for issue in mistakes.issues:
    ...         print(issue.key, "-", issue.fix)
    compute.instance_count - write instance_count: 1
    compute.max_hour - did you mean max_hours?
    """

    def __init__(self, issues: Iterable[Issue], title: str = "", rest: Any = None):
        self.issues = tuple(issues)
        self.rest = rest
        """What the input gives without its wrong parts, so that the rest can be checked too; None: nothing."""
        assert self.issues, "a UserError needs at least one issue"
        self.title = title
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.issues)
        head = f"{count} mistake{'s' if count > 1 else ''}" + (f" in {self.title}" if self.title else "")
        body = "\n".join(indent(str(issue)) for issue in self.issues)
        return f"{head}:\n{body}"

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the mistakes without a traceback."""
        return str(self).splitlines()


class Unreachable(Exception):
    """AWS does not answer: no network, no valid credentials, or too many requests. Runs there go on.

    Args:
        is_denied: AWS answered that the credentials lack a permission, which seldom changes by itself.
    """

    def __init__(self, found: str, fix: str, *, is_denied: bool = False):
        super().__init__(f"{found}; {fix}")
        self.is_denied = is_denied


def mistake(key: str, found: str, fix: str, valid: str = "") -> UserError:
    """A UserError with a single issue."""
    return UserError([Issue(key=key, found=found, valid=valid, fix=fix)])


def did_you_mean(word: str, words: Iterable[str], otherwise: str = "remove it") -> str:
    """The fix for an unknown word: the nearest known one, or `otherwise` if none is near."""
    nearest = near(word, words)
    return f"did you mean {nearest}?" if nearest else otherwise


def near(word: str, words: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known word most like an unknown one; None if none is like it.

    Args:
        likeness: from 0 to 1, as difflib.SequenceMatcher.ratio gives it; words below it are not alike.
    """
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=likeness)), None)
