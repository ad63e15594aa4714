"""What a script's expressions stand for: calls of the SDK, names of packages, and what is known only when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Unread:
    """A value that is known only when the script runs."""

    text: str
    """The expression."""
    line: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Symbol:
    """A module, class or function of a package that the script imports, by its full name."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of the SDK with what could be read of its arguments: plain values, further calls, Symbols, and Unread."""

    name: str
    """The full name of the class or function: sagemaker.inputs.TrainingInput."""
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    line: int
    text: str
    """The expression."""

    @property
    def short(self) -> str:
        """TrainingInput."""
        return self.name.rpartition(".")[2]

    def argument(self, name: str, place: int | None = None, otherwise: Any = None) -> Any:
        """An argument by its name or place."""
        if place is not None and place < len(self.positional):
            return self.positional[place]
        return self.keywords.get(name, otherwise)

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Estimator:
    """One estimator, and the calls that start it."""

    made: Call
    starts: list[Call] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Those of set_hyperparameters."""


def holds_unread(values: Sequence[Any]) -> bool:
    """Whether any of some values, or a part of one, is no plain value."""
    return any(
        isinstance(value, (Unread, Call, Symbol))
        or (isinstance(value, (list, tuple, set)) and holds_unread([*value]))
        or (isinstance(value, dict) and holds_unread([*value, *value.values()]))
        for value in values
    )
