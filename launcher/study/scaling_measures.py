"""What the ranks' own records of a run say about its scaling: images a second, and what of a step was exchange, backward, waiting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.issues import mistake
from launcher.runner.run import Run
from launcher.study.measures import WARM_UP_STEPS

MAX_BYTES = 2**26
"""Of the ranks' records, no more is read: a trial has a few kilobytes a rank."""

MEASURED = (
    *("images_per_second", "step_seconds", "exposed_seconds", "backward_seconds", "data_wait_seconds"),
    *("counted_steps", "world_size", "threads", "data_workers", "backend", "device"),
    *("parameters", "gradient_bytes", "training_images", "memory_gib"),
)
"""What `of_run` gives. Times are seconds a step, the median of the windows after the warm-up, each the mean over the ranks.
`exposed_seconds` is 0 for a single process; it and `backward_seconds`, which is without it, are None where the process group keeps
no record of it."""


def of_run(run: Run) -> dict[str, Any]:
    """Everything MEASURED of a run that has completed.

    Raises:
        UserError: it has no record of its steps, or too few of them.
    """
    from launcher.insight import timelines  # here: it needs numpy

    files = timelines.below(sorted(run.folder.path.glob("hosts/*/opt/ml/output/data")))
    ranks = timelines.read(files, MAX_BYTES)
    return measure(ranks.steps, ranks.facts, run.result(), run.name)


def measure(
    ranks: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], result: Mapping[str, Any], name: str = "the run"
) -> dict[str, Any]:
    """Everything MEASURED.

    Args:
        ranks: of each rank its windows as launcher.insight.timelines reads them: step, seconds and extra, arrays of one length.
        facts: what that says of the processes.
        result: the script's result.json.
    """
    counted = [[step - steps >= WARM_UP_STEPS for step, steps in zip(rank["step"], _steps(rank))] for rank in ranks]
    if not ranks or not any(counted[0]):
        fix = "give it more steps by study.steps; a script of this kit records them"
        raise mistake("study", f"{name} recorded no steps after its first {WARM_UP_STEPS}", fix)

    def over_windows(phase: str) -> float | None:
        """The median over the counted windows of the mean over the ranks; None where no rank has the phase."""
        columns = [
            [float(value) for value, counts in zip(rank["seconds"][phase], chosen) if counts]
            for rank, chosen in zip(ranks, counted)
            if phase in rank["seconds"]
        ]
        windows = [[value for value in window if not math.isnan(value)] for window in zip(*columns)]
        means = [statistics.fmean(window) for window in windows if window]
        return statistics.median(means) if means else None

    settings, world = result["settings"], result["world_size"]
    step, whole_backward = over_windows("step"), over_windows("backward")
    assert step is not None, "every window tells its steps' time"
    exposed = 0.0 if world == 1 else over_windows("grad_sync")
    bytes_a_number = 2 if settings.get("gradient_compression") == "bf16" else 4
    memory = [float(value) for rank in ranks for value in rank["extra"].get("memory_gib", ()) if not math.isnan(value)]
    return {
        "images_per_second": settings["global_batch_size"] / step,
        "step_seconds": step,
        "exposed_seconds": exposed,
        "backward_seconds": None if whole_backward is None or exposed is None else max(0.0, whole_backward - exposed),
        "data_wait_seconds": over_windows("data_wait") or 0.0,
        "counted_steps": sum(int(steps) for steps, counts in zip(_steps(ranks[0]), counted[0]) if counts),
        "world_size": world,
        "threads": facts.get("threads"),
        "data_workers": facts.get("num_workers"),
        "backend": facts.get("backend"),
        "device": facts.get("device_name") or facts.get("device"),
        "parameters": result["parameters"],
        "gradient_bytes": result["parameters"] * bytes_a_number,
        "training_images": result.get("training_images"),
        "memory_gib": max(memory, default=None),
    }


def _steps(rank: Mapping[str, Any]) -> Sequence[float]:
    steps: Sequence[float] = rank["extra"]["steps"]
    return steps
