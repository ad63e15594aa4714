"""Learning-rate schedules as factors of the peak."""

from __future__ import annotations

import math


def warmup_cosine(step: int, steps: int, warmup_fraction: float) -> float:
    """The factor for a step: it rises linearly over the warm-up, then falls as half a cosine (https://arxiv.org/abs/1608.03983, eq. 5).

    Args:
        step: from 0.
        steps: of the whole run, at least 1.
        warmup_fraction: the warm-up's share of them, from 0 to 1.

    Returns:
        Above 0, so that no step is without effect, and at most 1; 1 at the first step after the warm-up.
    """
    warmup = round(steps * warmup_fraction)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
