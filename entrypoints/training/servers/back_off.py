"""When a server that failed is asked again, and which of its failures in a row are logged."""

from __future__ import annotations

from training.runtime.back_off import doubling

BACK_OFF, LONGEST_BACK_OFF = 1.0, 60.0
"""Seconds until it is asked again after a first failure, doubled with each further one; and at most."""

SAID = (1, 4)
"""The first failure, and the one that makes it more than an episode."""


def pause_after(failures: int) -> float:
    """Seconds to pause after that many failures in a row."""
    return doubling(failures, BACK_OFF, LONGEST_BACK_OFF)


def is_said(failures: int) -> bool:
    """Whether the last of that many failures in a row is logged."""
    return failures in SAID
