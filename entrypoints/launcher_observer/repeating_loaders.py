"""DataLoaders that keep one iterator, and so its workers, for all epochs: timm's MultiEpochsDataLoader, ultralytics'
InfiniteDataLoader."""

from __future__ import annotations

import contextlib
from typing import Any

REPEATING = "_RepeatSampler"
"""The class in timm/data/loader.py and ultralytics/data/build.py that repeats a sampler's batches endlessly."""


def repeats_after(torch: Any, loader: Any) -> int | None:
    """Batches per pass of a DataLoader whose iterator is endless; None: it ends, or that is not known.

    Only torch's own samplers are asked for their length: others may draw their samples to count them.

    Args:
        torch: the module.
    """
    repeating, data = loader.batch_sampler, torch.utils.data
    if type(repeating).__name__ != REPEATING:
        return None
    with contextlib.suppress(Exception):  # another class of this name; the dataset's own __len__
        batches = vars(repeating)["sampler"]
        if type(batches) is data.BatchSampler and type(batches.sampler).__module__.startswith("torch."):
            return len(batches)
    return None
