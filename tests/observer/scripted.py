"""Runs a script of tests/observer/scripts/ twice at the same time, with the observer and without it, and reads what it recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")
ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@dataclass(frozen=True)
class Done:
    """A script that has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    """Where the observer wrote."""

    @property
    def weights(self) -> list[str]:
        """The digests that it printed."""
        return re.findall(r"^weights (\w{64})$", self.stdout, re.MULTILINE)

    def timeline(self, rank: int = 0, attempt: int = 0) -> Timeline:
        """
        Args:
            attempt: trainings of the same command before it.
        """
        text = (self.folder / f"timeline-{rank}{f'.{attempt}' if attempt else ''}.jsonl").read_text()
        assert text.endswith("\n")
        return Timeline([json.loads(line) for line in text.splitlines()])


@dataclass(frozen=True)
class Timeline:
    """The lines of one rank's file."""

    lines: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def setup(self, of: str) -> list[dict[str, Any]]:
        return [line for line in self.of("setup") if line["of"] == of]

    @property
    def steps(self) -> int:
        """Number of the last step in a window."""
        return max(line["step"] for line in self.of("steps"))


def both(
    folder: Path,
    script: str,
    *arguments: str,
    start: Sequence[str] = (),
    path: Sequence[Path] = (),
    observed_path: Sequence[Path] = (),
) -> tuple[Done, Done]:
    """A script without the observer and with it, at the same time.

    Args:
        folder: where both run, each in a folder of its own.
        start: options of Python before the script, such as TORCHRUN.
        path: PYTHONPATH of both.
        observed_path: of the observed one alone; it also has LAUNCHER_OBSERVER_FOLDER.
    """
    known = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "LAUNCHER_"))}
    command = [sys.executable, *start, str(SCRIPTS / script), *arguments]
    running = []
    for observed in (False, True):
        place = folder / ("with" if observed else "without")
        (place / "observed").mkdir(parents=True)
        environment = {**known, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, *(observed_path if observed else ())]))
        if observed:
            environment["LAUNCHER_OBSERVER_FOLDER"] = str(place / "observed")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append((place / "observed", subprocess.Popen(command, cwd=place, env=environment, **pipes)))
    without, done = (
        Done(process.returncode, *said, place)
        for place, process in running
        for said in [process.communicate(timeout=120)]
    )
    return without, done
