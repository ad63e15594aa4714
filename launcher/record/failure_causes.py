"""Why a job failed, in words: from SageMaker's FailureReason and the log's lines to a cause and a fix in failure_causes.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# What launchers write before a process's own text, with a blank after it or none: torch's excepthook and docker compose;
# mpirun as SageMaker's toolkit starts it, and torchrun --tee.
_PREFIX = re.compile(
    r"(\[rank\d+\]:|algo-\d+[\w-]* +\|) ?|(\[default\d+\]:|\[1,(?:mpirank:)?\d+(?:,[\w.-]+)?\]<std\w+>:)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = re.compile(r"(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+')
_MARKER = re.compile(r"^\s*[~^][~^ ]*$|^\s*\[Previous line repeated ")
# Python names an exception by its module, except built-in ones, and those end in one of a few words.
_EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)+(?:[A-Z]\w*|\w*error|timeout)|[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Group))(?=:|$)"
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Lines of an exception's message that are known although they are not indented: CUDA's advice, and what torch says of weights
# (the toolkit's reader takes leading blanks away).
_MESSAGE = re.compile(
    r"^(?:CUDA kernel errors|For debugging consider|Compile with|Device-side|size mismatch for|Missing key|Unexpected key)"
)
_LOG_LINE = re.compile(r"^\[?[EWIC]\d{3,4} |^\[[EWIC] |^\d{4}-\d\d-\d\d|^epoch \d")
# Raised by what starts processes, about a process that failed: never the reason itself.
_STARTERS = re.compile(
    r"^(?:torch\.distributed\.elastic\.|sagemaker_training\.errors\.|torch\.multiprocessing\.spawn\.)"
    r"|\b(?:ChildFailedError|ExecuteUserScriptError)$"
)
# What entrypoints/training/runtime/failure.py writes into the failure file.
_OWN_REASON = re.compile(r"\brank \d+: \w+: ")
_LONGEST_LINE = 4000
"""Characters of a line that are looked at."""


@dataclass(frozen=True)
class Explanation:
    """Why a job failed."""

    cause: str
    """A sentence."""
    fix: str
    """What to do, as an instruction that names config keys."""
    evidence: str
    """The line that tells it."""


@dataclass(frozen=True)
class _Known:
    """An entry of failure_causes.yaml."""

    kind: str
    pattern: re.Pattern[str]
    cause: str
    fix: str


@dataclass
class _Traceback:
    """A traceback while its lines come in."""

    start: int
    """The log line at which it begins."""
    lines: list[str] = field(default_factory=list)
    state: str = "frames"
    """frames, message (the exception's line was seen), blank (an empty line after that) or chain (another one follows)."""
    source_next: bool = False
    """Whether the last line was a frame's first."""
    exception: str = ""
    """The last exception's name."""


def first_traceback(lines: Iterable[str]) -> str:
    """The first Python traceback in a log that is not a launcher's own report of it, with the exceptions it is chained to.

    Prefixes such as `[rank3]: ` are taken off, and the lines of several ranks kept apart by them.

    Returns:
        From `Traceback (most recent call last):` to the end of the exception's message, or "" where there is none.
    """
    found: list[_Traceback] = []
    open_ones: dict[str, _Traceback] = {}
    for number, raw in enumerate(lines):
        key, line = _split(raw)
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


def explain(reason: str, lines: Iterable[str] = ()) -> Explanation | None:
    """What made a job fail.

    Args:
        reason: SageMaker's FailureReason or secondary status, the text of a refused request, or "".
        lines: the log of all hosts, in the order of time.

    Returns:
        What the service itself says first; then the earliest known error in the log, since later ones tend to follow from it;
        then what the script gave as its reason. Killed processes and broken connections count only where nothing else was
        found, a traceback of an unknown kind included. None where no known cause was found.
    """
    told = [line[:_LONGEST_LINE] for line in reason.splitlines()]
    log = list(lines)
    places = [
        (("service",), told),
        (("service", "script"), log),
        (("script",), told),
    ]
    for kinds, where in places:
        found = _first(where, kinds)
        if found is not None:
            return found
    follow_on = _first(log, ("killed",)) or _first(told, ("killed",)) or _first([*log, *told], ("network",))
    if follow_on is None:
        return None
    unknown = first_traceback(log) or (reason if _OWN_REASON.search(reason) else "")
    if unknown and _first(unknown.splitlines(), ("killed", "network")) is None:
        return None
    return follow_on


def _split(raw: str) -> tuple[str, str]:
    """A log line as (the prefixes that say which process it is of, the rest)."""
    line, key = raw.rstrip("\r\n").rpartition("\r")[2][:_LONGEST_LINE], ""  # a progress bar writes over its line
    line = _COLOUR.sub("", line)
    while (match := _PREFIX.match(line)) is not None:
        key, line = key + match[0].rstrip(), line[match.end() :]
    return key, line


def _take(one: _Traceback, line: str, key: str) -> bool:
    """Add a line of the same process to its traceback. False: the traceback is over, and the line is not of it."""
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
            one.lines.append(line)
            one.source_next = True
        elif indented or one.source_next or _MARKER.match(line):
            one.lines.append(line)
            one.source_next = False
        # any other line is another process's, between this one's
    elif one.state == "message" and (
        indented or _MESSAGE.match(line) or (key.startswith("[rank") and not _LOG_LINE.match(line))
    ):
        one.lines.append(line)
    else:
        return one.state == "chain"
    return True


def _first(lines: Iterable[str], kinds: tuple[str, ...]) -> Explanation | None:
    """The first line that a known cause of these kinds explains; where several explain it, the first in the table."""
    for line in lines:
        for known in _known():
            if known.kind in kinds and (match := known.pattern.search(line[:_LONGEST_LINE])) is not None:
                groups = match.groupdict()
                evidence = _split(line)[1].strip()[:500]
                return Explanation(known.cause.format(**groups), known.fix.format(**groups), evidence)
    return None


@cache
def _known() -> list[_Known]:
    import yaml  # here: most runs need no explanation

    entries = yaml.safe_load((Path(__file__).parent / "failure_causes.yaml").read_text(encoding="utf-8"))
    return [
        _Known(entry["kind"], re.compile("|".join(entry["texts"])), entry["cause"], entry["fix"]) for entry in entries
    ]
