"""Orderly stop when SageMaker, a spot interruption or a person asks: SIGTERM, agreed on by all ranks."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable

from training.distributed.world import World

LAG = 2
"""Steps from the one where a rank got SIGTERM to the one after which all ranks stop. Each step's all-reduce runs in the meantime,
so that no step waits for its result; with 2, a device that is a step behind the host does not hold the host up either."""


class StopSignal:
    """Remembers SIGTERM, and lets all ranks stop after the same step."""

    def __init__(self, world: World):
        self._world = world
        self._received = False
        self._asked: deque[Callable[[], bool]] = deque()
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_: object) -> None:
        self._received = True

    @property
    def received(self) -> bool:
        """Whether this rank has received SIGTERM."""
        return self._received

    def agreed(self) -> bool:
        """Whether to stop now, the same on every rank: some rank had received SIGTERM LAG steps ago. A single process stops at once.

        A collective: every rank asks once after every optimizer step.
        """
        if self._world.size == 1:
            return self._received
        self._asked.append(self._world.any_async(self._received))
        return len(self._asked) > LAG and self._asked.popleft()()

    def finish(self) -> None:
        """Wait for pending all-reduces, before the process group ends. A collective, like `agreed`."""
        while self._asked:
            self._asked.popleft()()
