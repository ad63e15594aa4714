"""Which processes outside the run use this host's cores, by name. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher_observer.system.host_samples import Key

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

OF_A_RUN = (b"LAUNCHER_OBSERVER_FOLDER=", b"TRAINING_JOB_NAME=")
"""Variables that all processes of a run share, also on its other hosts on this machine; the first that the monitor has itself counts."""

SECONDS = 5.0
"""Between two scans: one of all of a large host's processes takes some 20 ms."""

SHORTEST = 1.0
"""Seconds between the first two, so that a short run has one."""

NOTICED = 0.1
"""Minimum cores of a program that is named."""

MOST = 5
"""Programs named at a time, those that use most cores."""

TOTAL: Key = ("neighbours", "CoresOutsideTheRun", "")
"""Of all programs, at every look."""


class Neighbours:
    """Cores that programs outside the run have used since the last look. A process that has ended since then is missed."""

    def __init__(self, starter: str, proc: Path = Path("/proc")):
        """
        Args:
            starter: id of the run's process that started this one. A notebook's kernel sets the variable only after its start, and Linux
                shows it and its children with the environment that they had then.
            proc: where it is mounted.
        """
        self._proc = proc
        self._starter = starter, self._started(starter)
        own = (proc / "self/environ").read_bytes().split(b"\0")
        self._mark = next((text for name in OF_A_RUN for text in own if text.startswith(name)), None)
        self._used: dict[tuple[str, bytes], int] = {}
        """(process id, its start) -> ticks of CPU time at the last look."""
        self._inside: dict[tuple[str, bytes], bool] = {}
        """Whether each process looked at belongs to the run."""
        self._looked, self._due = 0.0, float("-inf")

    def look(self, now: float) -> dict[Key, float]:
        """Cores by program, if a look is due; else nothing.

        Args:
            now: seconds of any steady clock.
        """
        if now < self._due or self._mark is None:
            return {}
        seconds, self._looked = now - self._looked, now
        self._due = now + (SECONDS if self._used else SHORTEST)
        before, self._used = self._used, {}
        cores: dict[str, float] = {}
        for name in os.listdir(self._proc):
            if not name.isdigit():
                continue
            try:
                text = (self._proc / name / "stat").read_bytes()
            except OSError:  # it has just ended
                continue
            head, _, rest = text.rpartition(b")")
            fields = rest.split()
            process, ticks = (
                (name, fields[19]),
                int(fields[11]) + int(fields[12]),
            )  # proc(5): starttime; utime and stime
            self._used[process] = ticks
            used = (ticks - before.get(process, ticks)) / TICKS_PER_SECOND / seconds
            if used >= NOTICED and not self._is_inside(process):
                program = re.sub(r"[^\w.:+/ -]", "_", head.partition(b"(")[2].decode(errors="replace"))
                cores[program] = cores.get(program, 0.0) + used
        self._inside = {process: inside for process, inside in self._inside.items() if process in self._used}
        most = sorted(cores.items(), key=lambda one: -one[1])[:MOST]
        named = {("neighbour", program, "CPUCores"): used for program, used in most}
        return {TOTAL: sum(cores.values()), **named} if before else {}

    def _is_inside(self, process: tuple[str, bytes]) -> bool:
        if process not in self._inside:
            self._inside[process] = self._is_marked(process[0])
        return self._inside[process]

    def _is_marked(self, process: str) -> bool:
        """Whether a process or one of its ancestors has the variable: one that sets its title, as Ray's do, overwrites its environment."""
        while process not in ("0", "1"):
            if process == self._starter[0] and self._started(process) == self._starter[1]:
                return True
            try:
                if self._mark in (self._proc / process / "environ").read_bytes().split(b"\0"):
                    return True
                stat = (self._proc / process / "stat").read_bytes()
            except OSError:  # another user's, or it has ended
                return False
            process = stat.rpartition(b")")[2].split()[1].decode()  # proc(5): ppid
        return False

    def _started(self, process: str) -> bytes | None:
        """When a process started, in ticks: its id may be reused later. None: it has ended."""
        try:
            return (self._proc / process / "stat").read_bytes().rpartition(b")")[2].split()[19]
        except OSError:
            return None
