"""The ranks' own records of their steps (timeline-<rank>.jsonl, by the kit's scripts or the observer), parsed into arrays."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.secret_shapes import secrets_in_text
from launcher.insight import shapes
from launcher.insight.script import Address, Part, SampledLine, Script
from launcher.record import trust
from launcher.record.log_lines import last_lines
from launcher.record.metrics_file import attempt_of
from launcher.show.text import counted

PATTERN = "timeline-*.jsonl"

OPERATORS = "operators.json"
"""Beside the timeline of a process whose steps torch.profiler recorded; training/measure/operators.py documents it."""

OF_THE_PROCESS = (
    "world_size",
    "backend",
    "device",
    "device_name",
    "compute_capability",
    "instance_type",
    "torch",
    "threads",
)
"""Facts of a rank's first line that hold for all ranks."""

SERVERS = "servers"
"""In a window's extra numbers: those of the hosts that make its images; training/servers/remote.py documents them."""

WINDOW = b'{"kind": "steps"'
"""How the line of a logged window begins."""

END_BYTES = 2**20
"""Bytes at a record's end in which its last window lies."""

STRETCH = 16
"""Consecutive windows that are read of a long record: what happens between two is known only for neighbours."""


@dataclass
class Ranks:
    """The content of timelines."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of measurements.Steps."""
    stalls: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of measurements.Stall."""
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    script: Script | None = None
    """The first observed rank's script."""
    measure_themselves: bool = False
    """Whether a rank wrote its own record, as the kit's scripts do."""
    chosen: str | None = None
    """Which of several trainings these are."""
    thinned: str | None = None
    """How long records were thinned."""
    unreadable: list[str] = field(default_factory=list)
    """What could not be read of which file, such as the last line of a rank that was killed."""


def below(places: Iterable[Path]) -> list[Path]:
    """All timelines below some folders."""
    return sorted(file for place in places for file in place.rglob(PATTERN))


def read(files: list[Path], max_bytes: int) -> Ranks:
    """All ranks' records of one training: of several, such as a command's restarts, the one with the most steps.

    Args:
        max_bytes: if the files are larger, only about one in N windows is read.
    """
    files, chosen = _of_one_training(files)
    total = sum(file.stat().st_size for file in files if file.exists())
    each = max(1, -(-total // max_bytes))
    ranks = Ranks(chosen=chosen)
    if each > 1:
        ranks.thinned = f"steps: one in {each} logged windows of every rank was read, {STRETCH} in a row"
    for file in files:
        try:
            _read_one(file, each, ranks)
        except OSError as error:
            ranks.unreadable.append(f"{file.name}: {error.strerror}")
    for recorded in sorted({file.with_name(OPERATORS) for file in files}):
        if recorded.exists():
            found, why_not = shapes.read(shapes.OPERATORS, recorded)
            ranks.facts |= {"operators": found} if found else {}
            ranks.unreadable += [why_not] if why_not else []
    if "operators" not in ranks.facts:
        ranks.not_measured["operators"] = (
            "torch.profiler did not run: the observer never starts it"
            if ranks.script
            else "no steps were recorded: hyperparameters.profile_steps was 0"
        )
    ranks.steps.sort(key=lambda steps: steps["rank"])
    ranks.stalls.sort(key=lambda stall: (stall["began"], stall["rank"]))
    return ranks


def _of_one_training(files: list[Path]) -> tuple[list[Path], str | None]:
    """The files of one attempt, and in words which it is; the last one of those with the most steps."""
    attempts: dict[int, list[Path]] = {}
    for file in files:
        attempts.setdefault(attempt_of(file), []).append(file)
    if len(attempts) < 2:
        return files, None
    steps = {attempt: max(map(_last_step, ranks)) for attempt, ranks in sorted(attempts.items())}
    chosen = max(steps, key=lambda attempt: (steps[attempt], attempt))
    place = [*steps].index(chosen) + 1
    longest = counted(steps[chosen], "step")
    return attempts[chosen], f"{len(attempts)} trainings were recorded: this is number {place}, the longest ({longest})"


def _last_step(file: Path) -> int:
    """A rank's steps; 0 if none can be read."""
    with contextlib.suppress(OSError):
        for line in reversed(last_lines(file, END_BYTES)):
            with contextlib.suppress(ValueError, RecursionError):  # truncated, or not of its shape
                if line.startswith(WINDOW.decode()):
                    return int(shapes.WINDOW.validate_python(json.loads(line))["step"])
    return 0


@functools.cache
def _is_read(stretch: int, each: int) -> bool:
    """Whether a stretch of windows is read, about one in `each`: always the first, the others at random but the same for all ranks; every
    Nth one might always be an epoch's first."""
    return stretch == 0 or random.Random(stretch).random() * each < 1


def _read_one(file: Path, each: int, ranks: Ranks) -> None:
    start: dict[str, Any] | None = None
    windows, stalls, setups, sampled, not_measured = [], [], [], {}, {}
    decided: dict[str, Any] = {}
    lines_seen = windows_seen = unreadable = 0
    with trust.opened(file) as lines:
        for line in lines:
            lines_seen += 1
            if line.startswith(WINDOW):
                windows_seen += 1
                if not _is_read((windows_seen - 1) // STRETCH, each):
                    continue
            try:
                event = json.loads(line)
                kind = event["kind"]
                if kind == "start":
                    start = shapes.START.validate_python(event)
                elif kind == "steps":
                    shapes.WINDOW.validate_python(event)
                    if not event["extra"].get("profiled"):  # torch.profiler made these slower than the others
                        windows.append(event)
                elif kind == "first_step":
                    shapes.FIRST_STEP.validate_python(event)
                    if event["seconds"] >= ranks.facts.get("seconds_to_first_step", 0.0):
                        ranks.facts["seconds_to_first_step"] = event["seconds"]
                        ranks.facts["parts_to_first_step"] = event.get("parts", {})
                    ranks.facts["num_workers"] = event["workers"]
                elif kind == "setup":
                    setups.append(shapes.SETUP.validate_python(event))
                elif kind == "lines":
                    sampled = shapes.LINES.validate_python(event)  # of the run so far: the last line counts
                elif kind == "arithmetic":
                    about = shapes.ARITHMETIC.validate_python(event)
                    ranks.facts.setdefault("arithmetic", {name: about[name] for name in about if name != "kind"})
                elif kind == "decided":
                    decided |= shapes.DECIDED.validate_python(event)["settings"]
                elif kind == "not_measured":
                    shapes.NOT_MEASURED.validate_python(event)
                    not_measured[event["what"]] = event["why"]
                else:
                    shapes.STALL.validate_python(event)
                    stalls.append({name: event[name] for name in ("kind", "began", "seconds", "step")})
            except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: not JSON, or not of its shape
                unreadable += 1
    if start is None:
        ranks.unreadable.append(
            f"{file.name}: its first line, without which the other {counted(lines_seen - 1, 'line')} say nothing"
        )
        return
    if unreadable:
        ranks.unreadable.append(f"{file.name}: {unreadable} of {counted(lines_seen, 'line')}")
    _add_start(start, ranks)
    ranks.settings |= decided
    ranks.not_measured |= not_measured
    if not start.get("observed"):
        ranks.measure_themselves = True
    elif ranks.script is None:
        ranks.script = Script(parts=_parts(setups), lines=_sampled_lines(sampled))
    else:
        others = {**ranks.script.other_ranks, start["rank"]: _sampled_lines(sampled)}
        ranks.script = replace(ranks.script, other_ranks=others)
    rank, node = start["rank"], start["node"]
    ranks.stalls += [{"rank": rank, "host": node, **stall} for stall in stalls]
    if windows:
        ranks.steps.append({**_arrays(rank, node, windows), "device_uuid": start.get("device_uuid")})


def _add_start(event: dict[str, Any], ranks: Ranks) -> None:
    ranks.settings |= event["settings"]
    ranks.not_measured |= event["not_measured"]
    ranks.facts |= {name: event.get(name) for name in OF_THE_PROCESS}


def _parts(setups: list[dict[str, Any]]) -> tuple[Part, ...]:
    """What a script set up; a later line about the same object replaces the earlier one."""
    found: dict[tuple[Any, ...], Part] = {}
    for one in setups:
        at, values = _address(one), one["values"]
        thing = (one["of"], values["id"]) if "id" in values else (one["of"], at.file, at.line)
        found[thing] = Part(of=one["of"], at=at, values=values, via=one["via"])
    return tuple(found.values())


def _sampled_lines(sampled: dict[str, Any]) -> tuple[SampledLine, ...]:
    lines = [
        SampledLine(
            at=_address(one),
            phase=one["phase"],
            package=one["package"],
            in_model=one["in_model"],
            share=min(1.0, one["samples"] / sampled["samples"]),
        )
        for one in sampled.get("lines", ())
    ]
    return tuple(sorted(lines, key=lambda line: -line.share))


def _address(values: dict[str, Any]) -> Address:
    """A line of code, without its text if that looks like a secret."""
    text = " ".join(values["text"].split())
    return Address(values["file"], values["line"], "" if secrets_in_text(text.encode("utf-8", "replace")) else text)


def _arrays(rank: int, node: str, windows: list[dict[str, Any]]) -> dict[str, Any]:
    """One rank's windows as arrays."""
    phases = {name: None for window in windows for name in window["seconds"]}
    seconds = {name: _column(windows, "seconds", name) for name in phases}
    names = {name: None for window in windows for name in window["extra"] if name != SERVERS}
    extra = {name: _column(windows, "extra", name) for name in names}
    served = [{SERVERS: window["extra"].get(SERVERS, {})} for window in windows]
    counted_of_servers = {name: None for window in served for name in window[SERVERS]}
    servers = {name: _column(served, SERVERS, name) for name in counted_of_servers}
    return {
        "rank": rank,
        "host": node,
        "step": np.array([window["step"] for window in windows], dtype=np.int64),
        "epoch": np.array([window["epoch"] for window in windows], dtype=np.int64),
        "ended": np.array([window["ended"] for window in windows]),
        "seconds": seconds,
        "extra": extra,
        "servers": servers,
    }


def _column(windows: list[dict[str, Any]], part: str, name: str) -> np.ndarray:
    return np.array([window[part].get(name, np.nan) for window in windows], dtype=np.float64)
