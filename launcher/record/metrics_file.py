"""A run's metrics.jsonl: what its script wrote, or else the steps that the observer counted, with the loss that the script printed."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.config.metrics import metric_table
from launcher.record import records, trust
from launcher.record.log_lines import complete_lines, json_lines
from launcher.record.metric_lines import Metric, parse_line
from launcher.record.records import RunFolder
from launcher.record.script_output import training_loss

OBSERVED = "observed"
"""The key that marks a line as the observer's."""

FIRST_RANK = "timeline-0.jsonl", "timeline-0.*.jsonl"
"""Records of rank 0's steps: for a command's first training, and for later ones."""

PLACES = "output/data/*", "output/data/*/*"
"""Where the first host's /opt/ml may have them: below the host's name, or also the observer's."""

ATTEMPT = "attempt"
"""The key for how many trainings came before a line's; each counts steps anew."""

POLL_SECONDS = 0.5
"""Seconds between reads of what the observer and the script wrote."""

NOT_THE_OBSERVERS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors from reading a line that the observer did not write: any process of a script may write to its output."""

READ_BYTES = 2**20
"""Bytes of a log read at once, its last."""


def merge(folder: RunFolder, hosts: Sequence[str]) -> None:
    """Complete a finished run's file: all hosts' metrics, host after host, without lines that a kill cut short. If no script
    wrote any, the steps that the observer counted."""
    lines = []
    for host in hosts:
        for file in sorted(folder.host(host).glob("output/data/*/metrics*.jsonl")):
            lines += [line + "\n" for line, _ in json_lines(file)]
    if lines:
        records.write_atomically(folder.metrics, "".join(lines))
    else:
        ObservedMetrics(folder, hosts[0]).update()


class ObservedMetrics:
    """Adds the observer's steps to a run's file as they come. A script that prints metric lines of its own needs none."""

    def __init__(self, folder: RunFolder, host: str):
        """
        Args:
            host: the first.
        """
        self._folder, self._host = folder, host
        self._timeline: Path | None = None
        self._read_to = self._log_read_to = 0
        written = [values for _, values in json_lines(folder.metrics)] if folder.metrics.is_file() else []
        observed = [values for values in written if values.get(OBSERVED) and _is_number(values.get("step"))]
        self._attempt = max(map(_attempt_in, observed), default=0)
        self._step = max((values["step"] for values in observed if _attempt_in(values) == self._attempt), default=0)
        self._loss: float | None = None
        self._reports_itself = False
        self._again_at = 0.0

    def poll(self) -> None:
        """Add what is new, at most every POLL_SECONDS. A full disk is for others to report."""
        if time.monotonic() >= self._again_at:
            with contextlib.suppress(OSError):
                self.update()
            self._again_at = time.monotonic() + POLL_SECONDS

    def update(self) -> None:
        """Add what is new. A loss belongs to the latest steps only: nothing says when it was printed."""
        self._read_log()
        windows = [] if self._reports_itself else list(self._windows())
        if windows and self._loss is not None:
            windows[-1]["loss"], self._loss = self._loss, None
        if windows:
            with open(self._folder.metrics, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(values) + "\n" for values in windows))

    def _read_log(self) -> None:
        for text in self._new_text():
            if parse_line(text) is not None:
                self._reports_itself = True
                self._folder.metrics.unlink(missing_ok=True)
            loss = training_loss(text)
            self._loss = self._loss if loss is None else loss

    def _new_text(self) -> list[str]:
        """The log's new complete lines, and complete states of a progress bar that overwrites itself."""
        if self._reports_itself:
            return []
        try:
            with trust.opened(self._folder.log(self._host)) as log:
                end = log.seek(0, 2)
                log.seek(max(self._log_read_to, end - READ_BYTES))
                self._log_read_to = log.tell()
                new = log.read(READ_BYTES)
        except FileNotFoundError:
            return []
        whole = new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
        self._log_read_to += len(whole)
        return re.split(r"[\r\n]+", whole.decode("utf-8", "replace"))

    def _windows(self) -> Iterator[dict[str, Any]]:
        """The windows that rank 0 has recorded since, as lines of the file: one training after another, each to its end."""
        for timeline in self._timelines():
            if timeline != self._timeline:
                self._timeline, self._read_to = timeline, 0
                if attempt_of(timeline) > self._attempt:
                    self._attempt, self._step = attempt_of(timeline), 0
            yield from self._windows_of(timeline)

    def _windows_of(self, timeline: Path) -> Iterator[dict[str, Any]]:
        for line, after in complete_lines(timeline, self._read_to, last=False):
            self._read_to = after
            try:
                event = json.loads(line)
                if event["kind"] == "start" and not event.get(OBSERVED):
                    self._reports_itself = True  # a script that measures itself
                if event["kind"] == "steps" and event["step"] > self._step and not self._reports_itself:
                    yield _values(event) | ({ATTEMPT: self._attempt} if self._attempt else {})
                    self._step = event["step"]
            except NOT_THE_OBSERVERS:
                continue

    def _timelines(self) -> list[Path]:
        """Rank 0's records of the training under way and of later ones; looked for in all PLACES until one is found, then beside it."""
        host = self._folder.host(self._host)
        places = [self._timeline.parent] if self._timeline else [place for one in PLACES for place in host.glob(one)]
        for place in places:
            found: dict[int, Path] = {}
            for file in (file for name in FIRST_RANK for file in place.glob(name)):
                found.setdefault(attempt_of(file), file)
            if found:
                return [found[attempt] for attempt in sorted(found) if attempt >= self._attempt]
        return []


def observed_metrics(folder: RunFolder, position: int = 0) -> Iterator[tuple[Metric, int]]:
    """(metric, byte position after it) for each of the observer's lines after a position in the file."""
    for line, after in complete_lines(folder.metrics, position, last=False):
        try:
            values = json.loads(line)
            if values.pop(OBSERVED, False):
                place = {name: values.pop(name, None) for name in ("epoch_step", "epoch_steps")}
                del values["rank"]
                values.pop(ATTEMPT, None)
                yield Metric(values["epoch"], values["step"], values, **place), after
        except NOT_THE_OBSERVERS:
            continue


def attempt_of(timeline: Path) -> int:
    """Number of earlier trainings of the same command, from a record's name: timeline-<rank>.jsonl or timeline-<rank>.<attempt>.jsonl.
    Any process may have written it.
    """
    *_, attempt = timeline.stem.split(".")
    return int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 0


def _attempt_in(values: dict[str, Any]) -> int:
    """The same for a line of the file."""
    attempt = values.get(ATTEMPT)
    return attempt if isinstance(attempt, int) else 0


def _values(event: dict[str, Any]) -> dict[str, Any]:
    """A window of the observer's record as a line of the file, with the metric table's names. Raises ValueError if its
    place or its time is not a number.
    """
    seconds, extra = event["seconds"], event["extra"]
    if not all(map(_is_number, (event["epoch"], event["step"], 1 / seconds["step"]))):
        raise ValueError(event)
    named = {
        "images/s": extra.get("images_per_second"),
        "steps/s": 1 / seconds["step"],
        "memory_gib": extra.get("memory_gib"),
    }
    named |= {f"{phase}_s": seconds[phase] for phase in seconds if f"{phase}_s" in metric_table().STEP_LINE}
    named |= {name: extra.get(name) for name in ("epoch_step", "epoch_steps")}
    known = {name: value for name, value in named.items() if _is_number(value)}
    return {"rank": 0, "epoch": event["epoch"], "step": event["step"], OBSERVED: True, **known}


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number: any process of a script may have written it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
