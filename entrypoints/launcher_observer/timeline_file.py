"""Each rank's record of its steps: timeline-<rank>.jsonl in its host's output folder, one line per event. If a command trains several
times, one process after another, a later training's is timeline-<rank>.<attempt>.jsonl, from 1.

    {"kind": "start", …}        once: which process this is, its settings, and what it cannot measure
    {"kind": "setup", …}        of an observed script: the loaders, models, optimizers that it made, and where
    {"kind": "first_step", …}   once: seconds from the process's start to the end of its first step, as the host sees it; data workers
    {"kind": "steps", …}        each window: mean seconds per step of the whole step and its phases
    {"kind": "checkpoint", …}   each pause, and `evaluate`
    {"kind": "arithmetic", …}   once, of the kit's scripts: what the models compute for an image, the device's peak, and why there is no MFU
    {"kind": "decided", …}      once, of the kit's scripts: the values of settings that were decided after the start
    {"kind": "lines", …}        of an observed script: where the host's time went so far, by line of the user's code
    {"kind": "not_measured", …} what turned out not to be measurable, and why

Times are Unix seconds. A line is one write, so that a kill truncates at most the last. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from launcher_observer.process import process_started

FIRST_STEP = '{"kind": "first_step"'
"""How that line begins."""


class TimelineFile:
    """Appends lines to one rank's file, opened for each: a script may close descriptors that it does not know."""

    parts: dict[str, float] | None = None
    """Seconds spent before the first step, by part; None: not known."""

    def __init__(self, folder: Path, rank: int, attempt: int = 0):
        """
        Args:
            folder: the host's output folder.
            attempt: trainings before this one.
        """
        self.path = folder / (f"timeline-{rank}.{attempt}.jsonl" if attempt else f"timeline-{rank}.jsonl")

    @classmethod
    def begun(cls, folder: Path, rank: int, environ: Mapping[str, str] = os.environ) -> TimelineFile:
        """A new, empty file that no other process writes to.

        Ranks that train together count the same attempts: torchrun's restarts, or the trainings on this host that were under way before
        this process started. A rank that crashed before its first step left no file.

        Raises:
            OSError: it cannot be created.
        """
        told = environ.get("TORCHELASTIC_RESTART_COUNT", "")
        attempt = max(int(told) if told.isdecimal() else 0, _attempts_before(folder, process_started()))
        while True:
            file = cls(folder, rank, attempt)
            try:
                os.close(os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                attempt += 1
            else:
                return file

    def first_step(self, step: int, workers: int | None, ended: float | None = None) -> None:
        """This process's first step.

        Args:
            workers: data workers beside this process, which `num_workers` may leave to the program; None: not known.
            ended: Unix seconds; now if not given.
        """
        ended = time.time() if ended is None else ended
        known = {} if self.parts is None else {"parts": {name: round(value, 3) for name, value in self.parts.items()}}
        self.write("first_step", step=step, ended=ended, seconds=ended - process_started(), workers=workers, **known)

    def steps(
        self,
        epoch: int,
        step: int,
        seconds: Mapping[str, float],
        extra: Mapping[str, float | Mapping[str, float]],
        ended: float | None = None,
    ) -> None:
        """A window of steps.

        Args:
            epoch, step: of its last step.
            seconds: means per step; `step` is the whole step.
            extra: other metrics of the window.
            ended: Unix seconds; now if not given.
        """
        shown = {name: round(value, 7) for name, value in seconds.items()}
        ended = time.time() if ended is None else ended
        self.write("steps", epoch=epoch, step=step, ended=ended, seconds=shown, extra=dict(extra))

    def stall(
        self, kind: Literal["checkpoint", "evaluate"], step: int, seconds: float, began: float | None = None
    ) -> None:
        """A pause after this step.

        Args:
            began: Unix seconds; if not given, it has ended now.
        """
        self.write(kind, step=step, began=time.time() - seconds if began is None else began, seconds=seconds)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        line = json.dumps({"kind": kind, **values}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def _attempts_before(folder: Path, moment: float) -> int:
    """The attempts up to the last whose first step ended before a moment.

    Args:
        moment: Unix seconds.
    """
    attempts = [0]
    for path in folder.glob("timeline-*.jsonl"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a script may write such files too
            if path.is_file() and _first_step_ended(path) < moment:
                attempts.append(1 + int(path.suffixes[0][1:] if len(path.suffixes) > 1 else 0))
    return max(attempts)


def _first_step_ended(path: Path) -> float:
    """Unix seconds. Raises ValueError if the file does not say."""
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.startswith(FIRST_STEP)), "")
    return float(json.loads(first)["ended"])
