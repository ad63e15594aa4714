"""How long ranks wait for each other's gradients, from the record that DistributedDataParallel keeps. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

EARLY_SAMPLES = 4
"""Steps at the start whose exchange does not count: one rank's first batch may come seconds later than the others', while its workers
start and its files are read for the first time. A step's sample is in the record when the next step is over."""

EACH, THEN_EVERY = 10, 100
"""DistributedDataParallel samples the first EACH steps, then each THEN_EVERY-th (kDDPRuntimeLoggingSampleRate in
torch/csrc/distributed/c10d/reducer.hpp)."""


class ExchangeRecord:
    """Reads each model's record, which has only the mean over all samples so far: what the early ones add to it is taken out."""

    def __init__(self) -> None:
        self._early: WeakKeyDictionary[Any, tuple[int, float]] = WeakKeyDictionary()
        """(samples, mean nanoseconds of them) of each model's first steps."""

    def step_ended(self, models: Iterable[Any]) -> None:
        """Called after each step: the record is read after the early samples, since later it has only one mean of all."""
        for model in models:
            if hasattr(type(model), "_get_ddp_logging_data") and model not in self._early:
                self.seconds(model)

    def seconds(self, model: Any) -> float | None:
        """Seconds per step in which a model's backward pass was over on this rank but its gradients were not yet exchanged: the mean of the
        samples after the early ones. It lags behind by up to THEN_EVERY steps, and costs nothing.

        Returns:
            None if there is no such record (yet).
        """
        logged: Callable[[], Mapping[str, Any]] | None = getattr(model, "_get_ddp_logging_data", None)
        if logged is None:
            return None
        record = logged()
        if not record.get("avg_backward_comm_time"):
            return None
        mean = float(record["avg_backward_comm_time"] - record["avg_backward_compute_comm_overlap_time"])
        steps = int(record.get("iteration", 0))
        samples = min(steps, EACH) + steps // THEN_EVERY
        if samples >= EARLY_SAMPLES:
            early, of_early = self._early.setdefault(model, (samples, mean))
            if samples > early:
                mean = (samples * mean - early * of_early) / (samples - early)
        return max(0.0, mean) / 1e9
