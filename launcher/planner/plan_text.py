"""Parts of a plan as people read it: one screen, with long parts folded to a line that says how to open them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from launcher.config.entrypoints import PACKAGES
from launcher.config.issues import Issue, Level
from launcher.planner.source_package import SourceFile
from launcher.show.text import counted, file_size, indent, listed

Part = Literal["files", "env", "differences"]
"""What is folded: the files of the source package, the environment that the backend sets, how the backend differs from SageMaker."""

LEVELS: tuple[Level, ...] = ("error", "warning", "not checked")

HEADLINES = 4
"""Issues of a level that the first lines name."""

HEADLINE = 96
"""Characters of an issue in the first lines."""

SHOWN_HOSTS = 2
"""Hosts of a group whose commands are printed in full."""

LARGE = 1_000_000
"""Bytes from which a file is named even if the files are folded: most often it should not travel."""


MANY = 4
"""Keys of one section of defaults that are named."""


def counts(issues: Collection[Issue]) -> str:
    """`2 errors, 1 warning`; "" if there is nothing to say."""
    found = [
        counted(number, level, "not checked" if level == "not checked" else "")
        for level in LEVELS
        if (number := sum(issue.level == level for issue in issues))
    ]
    return ", ".join(found)


def headlines(issues: Collection[Issue]) -> Iterator[str]:
    """A line for each error and warning, the worst first; in full they come last, where a terminal shows them."""
    for level in ("error", "warning"):
        of_level = [issue for issue in issues if issue.level == level]
        for issue in of_level[:HEADLINES]:
            text = f"{issue.key}: {issue.found}".replace("\n", " ")
            yield f"  {level:<11} {text if len(text) <= HEADLINE else text[: HEADLINE - 1] + '…'}"
        if len(of_level) > HEADLINES:
            yield f"  {level:<11} and {len(of_level) - HEADLINES} more, below"


def in_full(issues: Collection[Issue]) -> Iterator[str]:
    """All issues with their fixes, the worst first."""
    for level in LEVELS:
        of_level = [issue for issue in issues if issue.level == level]
        if of_level:
            yield f"  {level}{'s' if level != 'not checked' and len(of_level) > 1 else ''}"
            yield from (indent(str(issue), "    ") for issue in of_level)


def hosts(commands: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The first hosts of a group with their commands, (name, what it runs); the others by name."""
    for name, command in commands[:SHOWN_HOSTS]:
        yield f"  {name:<11} {command}"
    rest = [name for name, _ in commands[SHOWN_HOSTS:]]
    if rest:
        yield f"  {listed(rest) if len(rest) < 3 else f'{rest[0]} to {rest[-1]}'}: likewise (--json has each command)"


def environment(values: Mapping[str, str], opened: bool) -> list[str]:
    """The variables that the backend sets for a host."""
    if not values:
        return []
    if not opened:
        return [f"  environment {counted(len(values), 'variable')} set by the kit (--env)"]
    return ["  environment", *(f"    {name}={shlex.quote(value)}" for name, value in sorted(values.items()))]


def defaults(origins: Mapping[str, str]) -> list[str]:
    """What the job takes from the user's and the project's defaults, one line per file."""
    keys: dict[str, list[str]] = {}
    for key, origin in origins.items():
        keys.setdefault(origin.partition(" (line ")[0], []).append(key)
    return [f"{listed(_few(names))} from {file}" for file, names in keys.items()]


def _few(keys: Collection[str]) -> Iterator[str]:
    """Dotted keys; for a section with many, their number."""
    for section, below in groupby(keys, key=lambda key: key.partition(".")[0]):
        names = list(below)
        yield from names if len(names) <= MANY else [f"{len(names)} {section}"]


def code(files: Collection[SourceFile], source: str, opened: bool) -> list[str]:
    """The source package, from a folder."""
    lines = [f"  code        {code_text(files)}, from {source}{'' if opened else ' (--files)'}"]
    if opened:
        widest = max((len(file.path) for file in files), default=0)
        lines += [f"    {file.path:<{widest}} {file.size:>8} B" for file in files]
    return lines


def code_text(files: Collection[SourceFile]) -> str:
    """The files of a source package in a line: the script's own, the kit's, and large ones by name."""
    kit = [file for file in files if file.path.split("/")[0] in PACKAGES]
    own = [file for file in files if file.path.split("/")[0] not in PACKAGES]
    names = listed(sorted({file.path.split("/")[0] for file in kit})) if kit else ""
    large = "".join(f"; {file.path} has {file_size(file.size)}" for file in own if file.size >= LARGE)
    of_kit = f", and this kit's {names} ({_sum(kit)})" if kit else ""
    return f"{_sum(own)}{of_kit}{large}"


def differences(values: Mapping[str, str], opened: bool) -> list[str]:
    """How the backend differs from SageMaker."""
    if not values:
        return []
    if not opened:
        return [f"  differs     from SageMaker in {counted(len(values), 'point')} (--differences)"]
    return ["  differs from SageMaker in", *(f"    {name}: {why}" for name, why in values.items())]


def _sum(files: Collection[SourceFile]) -> str:
    return f"{counted(len(files), 'file')}, {file_size(sum(file.size for file in files))}"
