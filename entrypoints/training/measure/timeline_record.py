"""The timeline of one of the kit's own scripts: launcher_observer/timeline_file.py says what is in it."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from launcher_observer import torch_hooks
from launcher_observer.contract import node_name
from launcher_observer.process import described, process_started
from launcher_observer.timeline_file import TimelineFile

from training.distributed.world import World
from training.runtime.reporting import write_line


class TimelineRecord(TimelineFile):
    """Writes one rank's file, anew for each run and as its only writer: an observer of the process ends."""

    def __init__(self, folder: Path, world: World, settings: Any):
        """
        Args:
            folder: the host's output folder.
            settings: a dataclass of training.settings.scripts.
        """
        super().__init__(folder, world.rank)
        torch_hooks.end("the script writes a timeline of its own")
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")  # an earlier run's, in a plain shell
        self._waits_for_first, self._lost_some = True, False
        self.parts: dict[str, float] = {}
        self._since = process_started()
        self.write(
            "start",
            rank=world.rank,
            node=node_name(),
            world_size=world.size,
            backend=world.backend,
            **described(torch, world.device),
            not_measured={} if world.is_torch_group else {"grad_sync": _why_no_grad_sync(world)},
            settings=asdict(settings),
        )

    def write(self, kind: str, **values: Any) -> None:
        """Write a line. If the disk is full it is missing: no measurement is a reason to end training."""
        try:
            super().write(kind, **values)
        except OSError as error:
            if not self._lost_some:
                write_line(f"{self.path.name} lacks a line, and maybe later ones, so a diagnosis knows less: {error}")
            self._lost_some = True

    def passed(self, part: str) -> None:
        """Count the time since the last call, or since the process's start, as this part of the time before the first step.

        Args:
            part: a name in metrics.START.
        """
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._since
        self._since = now

    def first_step(self, step: int, workers: int | None, ended: float | None = None) -> None:
        """Record the end of this process's first step, with all that `passed` before it; later calls do nothing."""
        if self._waits_for_first:
            self._waits_for_first = False
            self.passed("first_step")
            super().first_step(step, workers, ended)


def _why_no_grad_sync(world: World) -> str:
    return "a single process exchanges nothing" if world.size == 1 else f"{world.backend} keeps no record of it"
