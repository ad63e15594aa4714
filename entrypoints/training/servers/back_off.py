"""When a server that failed is asked again, and which of its failures in a row are logged."""

from __future__ import annotations

BACK_OFF, LONGEST_BACK_OFF = 1.0, 60.0
"""Seconds until it is asked again after a first failure, twice as long after each further one; and at most."""

SAID = (1, 4)
"""The first failure, and the one from which it is more than an episode."""


def pause_after(failures: int) -> float:
    """Seconds after that many failures in a row."""
    return min(LONGEST_BACK_OFF, BACK_OFF * 2.0 ** (failures - 1))


def is_said(failures: int) -> bool:
    """Whether the last of that many failures in a row is logged."""
    return failures in SAID
