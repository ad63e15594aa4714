"""Leaving in order when SageMaker, a spot interruption or a person asks: SIGTERM, agreed on by all ranks."""

from __future__ import annotations

import signal

from training.distributed import World


class StopSignal:
    """Remembers SIGTERM, and lets all ranks stop after the same step."""

    def __init__(self, world: World):
        self._world = world
        self._received = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_) -> None:
        self._received = True

    def agreed(self) -> bool:
        """Whether any rank has got SIGTERM. A collective: every rank asks after every step."""
        return self._world.any(self._received)
