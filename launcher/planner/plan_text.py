"""A plan as people read it: one screen, with what fills several of them folded to a line that says how to open it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from launcher.config.entrypoints import PACKAGES
from launcher.config.issues import Issue, Level
from launcher.config.redaction import redact
from launcher.planner.source_package import SourceFile
from launcher.show.text import counted, file_size, indent, listed

if TYPE_CHECKING:
    from launcher.planner.plan import HostPlan, Plan

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
"""Bytes of a file that is named although the files are folded: most often it should not travel."""


def plan_text(plan: Plan, opened: Collection[Part] = ()) -> str:
    """The whole plan: what is wrong in a line each, what will happen, and what is wrong in full.

    Args:
        opened: parts that are printed in full.
    """
    lines = [f"plan {plan.name}{_counts(plan.issues)}", *_headlines(plan.issues), *_what_happens(plan)]
    lines += _environment(plan, "env" in opened)
    lines += [f"  secret      {name}: {secret}" for name, secret in plan.job.secrets.items()]
    lines += [f"  channel     {name}: {place}" for name, place in plan.channels.items()]
    lines += [f"  student     {name}: {own}" for name, own in plan.student_texts().items()]
    lines += [f"  upload      {upload.text(str(upload.source))}" for upload in plan.uploads]
    lines += [f"  {name:<11} {text}" for name, text in plan.about.items()]
    lines += _code(plan, "files" in opened)
    lines += _differences(plan, "differences" in opened)
    lines += _in_full(plan.issues)
    if not plan.errors:
        lines += ["  nothing has started; `launcher run` with the same arguments starts it"]
    return "\n".join(lines)


def code_text(files: Iterable[SourceFile]) -> str:
    """The files of a source package in a line: the script's own, the kit's, and large ones by name."""
    kit, own = _parted(files, lambda file: file.path.split("/")[0] in PACKAGES)
    large = [f"{file.path} has {file_size(file.size)}" for file in own if file.size >= LARGE]
    with_kit = (
        f", and this kit's {listed(sorted({file.path.split('/')[0] for file in kit}))} ({_sum(kit)})" if kit else ""
    )
    return f"{_sum(own)}{with_kit}{''.join(f'; {one}' for one in large)}"


def _counts(issues: Iterable[Issue]) -> str:
    """`: 2 errors, 1 warning`; "" where there is nothing to say."""
    found = [
        counted(number, level, "not checked" if level == "not checked" else "")
        for level in LEVELS
        if (number := sum(issue.level == level for issue in issues))
    ]
    return f": {', '.join(found)}" if found else ""


def _headlines(issues: Iterable[Issue]) -> Iterator[str]:
    """A line for each error and warning, the worst first; in full they come last, where a terminal shows them."""
    for level in ("error", "warning"):
        of_level = [issue for issue in issues if issue.level == level]
        for issue in of_level[:HEADLINES]:
            text = f"{issue.key}: {issue.found}".replace("\n", " ")
            yield f"  {level:<11} {text if len(text) <= HEADLINE else text[: HEADLINE - 1] + '…'}"
        if len(of_level) > HEADLINES:
            yield f"  {level:<11} and {len(of_level) - HEADLINES} more, below"


def _what_happens(plan: Plan) -> Iterator[str]:
    hosts = [counted(len(plan.hosts), "host")] if plan.hosts else []  # none where the job has errors
    yield f"  runs on     {', '.join([plan.backend, *hosts, f'at most {plan.job.compute.max_hours:g} h'])}"
    if plan.price is not None:
        yield f"  price       {plan.price.text}"
    for text in plan.group_texts():
        yield f"  group       {text}"
    if plan.resumes is not None:
        yield f"  resumes     {plan.resumes}, from its last checkpoint"
    for _, of_group in groupby(plan.hosts, key=lambda host: host.group):
        yield from _hosts([*of_group])


def _hosts(hosts: list[HostPlan]) -> Iterator[str]:
    """The first hosts of a group with their commands; the others by name."""
    for host in hosts[:SHOWN_HOSTS]:
        group = f"{host.group}, " if host.group else ""
        yield f"  {host.name:<11} {group}{host.address}: {shlex.join(host.command)}"
    rest = hosts[SHOWN_HOSTS:]
    if rest:
        names = listed(host.name for host in rest) if len(rest) < 3 else f"{rest[0].name} to {rest[-1].name}"
        yield f"  {names}: likewise (--json has each command)"


def _environment(plan: Plan, opened: bool) -> list[str]:
    values = sorted(redact(plan.hosts[0].environment).items()) if plan.hosts else []
    if not values:
        return []
    if not opened:
        return [f"  environment {counted(len(values), 'variable')} set by the kit (--env)"]
    return ["  environment", *(f"    {name}={shlex.quote(value)}" for name, value in values)]


def _code(plan: Plan, opened: bool) -> list[str]:
    lines = [f"  code        {code_text(plan.files)}, from {plan.source}{'' if opened else ' (--files)'}"]
    if opened:
        widest = max((len(file.path) for file in plan.files), default=0)
        lines += [f"    {file.path:<{widest}} {file.size:>8} B" for file in plan.files]
    return lines


def _differences(plan: Plan, opened: bool) -> list[str]:
    if not plan.hosts or not plan.differences:
        return []
    if not opened:
        return [f"  differs     from SageMaker in {counted(len(plan.differences), 'point')} (--differences)"]
    return ["  differs from SageMaker in", *(f"    {name}: {why}" for name, why in plan.differences.items())]


def _in_full(issues: Iterable[Issue]) -> Iterator[str]:
    for level in LEVELS:
        of_level = [issue for issue in issues if issue.level == level]
        if of_level:
            yield f"  {level}{'s' if level != 'not checked' and len(of_level) > 1 else ''}"
            yield from (indent(str(issue), "    ") for issue in of_level)


def _parted(
    files: Iterable[SourceFile], first: Callable[[SourceFile], bool]
) -> tuple[list[SourceFile], list[SourceFile]]:
    """Files for which something holds, and the others."""
    both: tuple[list[SourceFile], list[SourceFile]] = ([], [])
    for file in files:
        both[not first(file)].append(file)
    return both


def _sum(files: Collection[SourceFile]) -> str:
    return f"{counted(len(files), 'file')}, {file_size(sum(file.size for file in files))}"
