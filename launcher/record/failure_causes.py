"""Why a job failed: matches SageMaker's FailureReason and the log to a cause and a fix in failure_causes.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from launcher.record.toolkit_lines import last_lines, split_prefix

_TRACEBACK = re.compile(r"(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+')
_MARKER = re.compile(r"^\s*[~^][~^ ]*$|^\s*\[Previous line repeated ")
# Python writes an exception with its module; built-in ones have none, and end in one of a few words.
_EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)+(?:[A-Z]\w*|\w*error|timeout)|[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Group))(?=:|$)"
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Lines of an exception's message that are not indented: CUDA's advice, and what torch says about weights (the toolkit's reader
# removes leading blanks).
_MESSAGE = re.compile(
    r"^(?:CUDA kernel errors|For debugging consider|Compile with|Device-side|size mismatch for|Missing key|Unexpected key)"
)
_LOG_LINE = re.compile(r"^\[?[EWIC]\d{3,4} |^\[[EWIC] |^\d{4}-\d\d-\d\d|^epoch \d")
# Raised by what starts processes when one of them failed: never the cause itself.
_STARTERS = re.compile(
    r"^(?:torch\.distributed\.elastic\.|sagemaker_training\.errors\.|torch\.multiprocessing\.spawn\.)"
    r"|\b(?:ChildFailedError|ExecuteUserScriptError)$"
)
# What entrypoints/training/runtime/failure.py writes into the failure file.
_OWN_REASON = re.compile(r"\brank \d+: \w+: ")
_LONGEST_LINE = 4000
"""Characters of a line that are searched."""

LAST_LINES = 12
"""Of the output of a script that left no traceback: room for a parser's usage text and its error."""

IN_AN_IMAGE = (
    "add the package that provides {module} to requirements.txt in the source folder, or choose an image that has it"
)
"""How a host that runs in an image gets a module."""


@dataclass(frozen=True)
class Explanation:
    """Why a job failed."""

    cause: str
    """What happened, in one sentence."""
    fix: str
    """What to do: an instruction that names config keys."""
    evidence: str
    """The line that shows it."""


@dataclass(frozen=True)
class _Known:
    """An entry of failure_causes.yaml."""

    kind: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    without_config: str


@dataclass
class _Traceback:
    """A traceback whose lines are still coming in."""

    start: int
    """Number of the log line where it begins."""
    lines: list[str] = field(default_factory=list)
    state: str = "frames"
    """frames, message (after the exception's line), blank (an empty line after that) or chain (another traceback follows)."""
    source_next: bool = False
    """Whether the last line was the first of a frame."""
    exception: str = ""
    """Name of the last exception."""


def first_traceback(lines: Iterable[str]) -> str:
    """The first Python traceback in a log, with the exceptions that it is chained to.

    Tracebacks of process launchers, such as torchrun, do not count. Prefixes such as `[rank3]: ` are removed; they keep
    the lines of several ranks apart.

    Returns:
        From `Traceback (most recent call last):` to the end of the exception's message; "" if there is none.
    """
    found: list[_Traceback] = []
    open_ones: dict[str, _Traceback] = {}
    for number, raw in enumerate(lines):
        key, line = split_prefix(raw)
        current = open_ones.get(key)
        if current is not None and not _take(current, line, key):
            found.append(open_ones.pop(key))
            current = None
        header = _TRACEBACK.search(line)
        if current is None and header is not None:
            open_ones[key] = _Traceback(number, [header[0].rstrip()])
    found += open_ones.values()
    complete = [one for one in found if one.exception and not _STARTERS.search(one.exception)]
    if not complete:
        return ""
    return "\n".join(min(complete, key=lambda one: one.start).lines).rstrip()


def exception_of(traceback: str) -> str:
    """The exception with which a traceback of `first_traceback` ends: its type and message."""
    lines = traceback.splitlines()
    starts = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    return "\n".join(lines[starts[-1] :]) if starts else traceback


def ending(lines: Iterable[str]) -> list[str]:
    """The last lines that the script itself printed."""
    return last_lines(lines, LAST_LINES)


def explain(
    reason: str, lines: Iterable[str] = (), *, packages: str = IN_AN_IMAGE, config: bool = True
) -> Explanation | None:
    """Why a job failed, if the cause is known.

    Args:
        reason: SageMaker's FailureReason or secondary status, the text of a refused request, or "".
        lines: the log of all hosts, in order of time.
        packages: how the host's Python gets a {module}.
        config: whether the run has a config, whose keys a fix may name. A watched command has none, and nothing of SageMaker's.

    Returns:
        The first of these: what SageMaker itself says; the earliest known error in the log, since later ones tend to follow
        from it; the script's own failure text; what its traceback, or its last lines without one, say. Killed processes and
        broken connections count only if neither these nor a traceback of another kind was found. None: no known cause.
    """
    reported = [line[:_LONGEST_LINE] for line in reason.splitlines()]
    log = list(lines)
    raised = first_traceback(log)
    places = [
        (("service",), reported),
        (("service", "script") if config else ("script",), log),
        (("script",), reported),
        (("end",), exception_of(raised).splitlines() if raised else [*ending(log), *reported]),
    ]
    for kinds, where in places:
        found = _first(where, kinds, packages, config)
        if found is not None:
            return found
    after = [(log, "killed"), (reported, "killed"), ([*log, *reported], "network")]
    follow_on = next(filter(None, (_first(where, (kind,), config=config) for where, kind in after)), None)
    if follow_on is None:
        return None
    unknown = raised or (reason if _OWN_REASON.search(reason) else "")
    if unknown and _first(unknown.splitlines(), ("killed", "network")) is None:
        return None
    return follow_on


def _take(one: _Traceback, line: str, key: str) -> bool:
    """Add a line of the same process to its traceback. False: the traceback has ended, and the line is not part of it."""
    if not line.strip():
        if one.state == "message":
            one.state = "blank"
        return True
    indented = line[0] in " \t"
    header = _TRACEBACK.search(line)
    if line.strip() in _CHAIN and one.state in ("message", "blank"):
        one.lines += ["", line.strip(), ""]
        one.state = "chain"
    elif header is not None:
        in_message = one.state == "message" and header[0].startswith("Original")  # a DataLoader worker's own traceback
        if one.state != "chain" and not in_message:
            return False
        one.lines.append(header[0].rstrip())
        one.state, one.source_next = "frames", False
    elif one.state == "frames":
        exception = None if indented else _EXCEPTION.match(line)
        if exception is not None:
            one.lines.append(line)
            one.state, one.exception = "message", exception[1]
        elif _FRAME.match(line):
            one.lines.append(line if indented else f"  {line}")  # the toolkit's reader removes leading blanks
            one.source_next = True
        elif indented or one.source_next or _MARKER.match(line):
            one.lines.append(line if indented else f"    {line}")
            one.source_next = False
        # any other line belongs to another process
    elif one.lines[-1] == one.exception and line.startswith(":"):  # its reader may cut the line there
        one.lines[-1] += line
    elif one.state == "message" and (
        indented or _MESSAGE.match(line) or (key.startswith("[rank") and not _LOG_LINE.match(line))
    ):
        one.lines.append(line)
    else:
        return one.state == "chain"
    return True


def _first(lines: Iterable[str], kinds: tuple[str, ...], packages: str = "", config: bool = True) -> Explanation | None:
    """The first line that a known cause of these kinds explains, by the first such cause in the table."""
    for line in lines:
        for known in _known():
            if known.kind in kinds and (match := known.pattern.search(line[:_LONGEST_LINE])) is not None:
                groups = match.groupdict()
                packages = packages.replace("{module}", groups.get("module", ""))
                fix = (known.fix if config else known.without_config).format(**groups, packages=packages)
                return Explanation(known.cause.format(**groups), fix, split_prefix(line)[1].strip()[:500])
    return None


@cache
def _known() -> list[_Known]:
    import yaml  # here: most runs need no explanation

    entries = yaml.safe_load((Path(__file__).parent / "failure_causes.yaml").read_text(encoding="utf-8"))
    return [
        _Known(
            entry["kind"],
            re.compile("|".join(entry["texts"])),
            entry["cause"],
            entry["fix"],
            entry.get("without_config", entry["fix"]),
        )
        for entry in entries
    ]
