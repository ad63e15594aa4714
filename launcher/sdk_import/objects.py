"""What a script's expressions stand for: calls of the SDK, names of packages, and what is known only when it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.config.expressions import NotPlain
from launcher.config.yaml_file import MAX_VALUES


@dataclass(frozen=True, repr=False)
class Unread:
    """A value that is known only when the script runs."""

    text: str
    """The expression."""
    line: int

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Symbol:
    """A module, class or function of a package that the script imports, by its full name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False, repr=False)
class Call:
    """A call of the SDK with what could be read from its arguments: plain values, further calls, Symbols, and Unread."""

    name: str
    """The full name of the class or function: sagemaker.inputs.TrainingInput."""
    positional: list[Any]
    keywords: dict[str, Any]
    """The key `**expression` stands for keywords that could not be read."""
    line: int
    text: str
    """The expression."""
    certain: bool = True
    """Whether it runs exactly once."""

    @property
    def short(self) -> str:
        """TrainingInput."""
        return self.name.rpartition(".")[2]

    def argument(self, name: str, place: int | None = None, otherwise: Any = None) -> Any:
        """An argument by its name or place."""
        if name in self.keywords:
            return self.keywords[name]
        return self.positional[place] if place is not None and place < len(self.positional) else otherwise

    def named(self, *names: str) -> dict[str, Any]:
        """All arguments by their names.

        Args:
            names: those of the positional arguments, in order.
        """
        return {**dict(zip(names, self.positional)), **self.keywords}

    def __repr__(self) -> str:
        return self.text


@dataclass(eq=False)
class Estimator:
    """One estimator, and the calls that start it."""

    made: Call
    starts: list[Call] = field(default_factory=list)
    shared: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """The script's dictionaries that it holds by reference, in their current state."""
    changes: list[Call] = field(default_factory=list)
    """Calls of its methods that change it: set_hyperparameters, with_checkpoint_config."""


def text_of(node: ast.AST) -> str:
    """An expression's source, on one line."""
    try:
        return " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):  # deeply nested; a number with too many digits
        return "a very long expression"


def is_plain(value: Any) -> bool:
    """Whether a value, and every part of it, is known."""
    return not any(isinstance(part, (Unread, Call, Symbol)) for part in _parts(value))


def same(one: Any, other: Any) -> bool:
    """Whether two values are certainly equal. Unread ones are if they are the same expression."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[key]) for key, part in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one is other or one == other)


def snapshot(value: Any) -> Any:
    """A copy of the dictionaries and lists in a value. Everything else is kept, and shared objects stay shared.

    Raises:
        NotPlain: it has too many parts, or contains itself.
    """
    copies: dict[int, Any] = {}
    under_way: set[int] = set()

    def copied(part: Any) -> Any:
        if not isinstance(part, (dict, list, tuple)):
            return part
        if id(part) in copies:
            return copies[id(part)]
        if id(part) in under_way or len(copies) + len(under_way) > MAX_VALUES:
            raise NotPlain("too many parts")
        under_way.add(id(part))
        made = (
            {key: copied(one) for key, one in part.items()} if isinstance(part, dict) else type(part)(map(copied, part))
        )
        under_way.discard(id(part))
        copies[id(part)] = made
        return made

    return copied(value)


def size(value: Any) -> int:
    """The number of parts of a value without cycles; a shared part counts each time."""
    sizes: dict[int, int] = {}

    def counted(part: Any) -> int:
        if not isinstance(part, (dict, list, tuple)):
            return 1
        if id(part) not in sizes:
            sizes[id(part)] = 1 + sum(map(counted, part.values() if isinstance(part, dict) else part))
        return sizes[id(part)]

    return counted(value)


def invalidate(holder: dict[Any, Any] | list[Any], text: str, line: int) -> None:
    """Mark a dictionary or list that was changed in a way that is not followed: nothing in it is certain any more."""
    if isinstance(holder, list):
        holder[:] = [Unread(text, line)]
        return
    for key in holder:
        holder[key] = Unread(f"{text}[{key!r}]", line)
    holder[f"**{text}"] = Unread(text, line)


def _parts(value: Any) -> Iterator[Any]:
    """A value and everything in it, each object once."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, (dict, list, tuple, set, frozenset)) and id(part) not in seen:
            seen.add(id(part))
            waiting += [*part, *part.values()] if isinstance(part, dict) else [*part]
