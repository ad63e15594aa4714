"""How a run scales, from its ranks' own records: images a second, and the parts of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.issues import mistake
from launcher.runner.run import Run
from launcher.study.question import WARM_UP_STEPS

MAX_BYTES = 2**26
"""Maximum read of the ranks' records; a trial has a few kilobytes per rank."""

MEASURED = (
    *("images_per_second", "step_seconds", "exposed_seconds", "backward_seconds", "data_wait_seconds"),
    *("counted_steps", "world_size", "threads", "data_workers", "backend", "device"),
    *("parameters", "gradient_bytes", "training_images", "memory_gib", "mfu"),
)
"""What `of_run` returns; None: not measured. Times are seconds per step: the mean over the ranks, then the median over the windows after
the warm-up. `exposed_seconds` is 0 for a single process. `backward_seconds` excludes it; both are None if the process group does
not record the exchange."""


def of_run(run: Run) -> dict[str, Any]:
    """Everything in MEASURED, for a completed run.

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
    """Everything in MEASURED.

    Args:
        ranks: each rank's windows, as launcher.insight.timelines reads them: step, seconds and extra, arrays of one length.
        facts: what the timelines say about the processes.
        result: the script's result.json.
    """
    counted = [[step - steps >= WARM_UP_STEPS for step, steps in zip(rank["step"], _steps(rank))] for rank in ranks]
    if not ranks or not any(counted[0]):
        fix = "raise study.steps; the script must be one of this kit's, which record their steps"
        raise mistake("study", f"{name} recorded no steps after its {WARM_UP_STEPS} warm-up steps", fix)

    def over_windows(phase: str) -> float | None:
        """The mean over the ranks, then the median over the counted windows; None if no rank has the phase."""
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
    assert step is not None, "every window has its steps' time"
    exposed = 0.0 if world == 1 else over_windows("grad_sync")
    bytes_per_number = 2 if settings.get("gradient_compression") == "bf16" else 4
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
        "gradient_bytes": result["parameters"] * bytes_per_number,
        "training_images": result.get("training_images"),
        "memory_gib": max(memory, default=None),
        "mfu": result.get("mfu"),
    }


def _steps(rank: Mapping[str, Any]) -> Sequence[float]:
    steps: Sequence[float] = rank["extra"]["steps"]
    return steps
