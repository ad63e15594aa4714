"""A run's speed, from its metrics.jsonl and result.json: images a second, and what it waited for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.issues import mistake
from launcher.planner.groups import TRAINS
from launcher.runner.run import Run
from launcher.study.question import WARM_UP_STEPS

PERCENTILES = (50, 90, 95, 99)

MEASURED = (
    *("images_per_second", "epoch_seconds", "first_epoch_seconds", "data_wait_share"),
    *(f"cpu_share_p{percent}" for percent in PERCENTILES),
    *("input_images_per_second", "input_cpu_seconds_per_image", "input_start_seconds", "evaluate_seconds"),
    *("memory_gib", "gpu", "gpu_memory_gib", "gpu_used_gib", "cores", "training_images", "counted_steps", "world_size"),
    "mfu",
)
"""What `of_run` returns; None: not measured. `epoch_seconds` is the time of all training images at `images_per_second`, which excludes
the first epoch if there are more, the warm-up, evaluations, checkpoints and the start of workers. `cpu_share` is a share of the
cores that the run may use, sampled at each metric line."""


def of_run(run: Run) -> dict[str, Any]:
    """Everything in MEASURED, for a completed run.

    Raises:
        UserError: it has too few steps to measure its speed.
    """
    groups = run.folder.read(run.folder.plan)["groups"]
    training = sum(len(group["hosts"]) for group in groups if group["does"] == TRAINS) if groups else len(run.hosts)
    return measure(run.metrics(), run.result(), training, run.name)


def measure(
    metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any], hosts: int = 1, name: str = "the run"
) -> dict[str, Any]:
    """Everything in MEASURED, from a run's metric lines and its result.

    Args:
        hosts: the number that train.
    """
    batch, hardware = result["settings"]["global_batch_size"], result.get("hardware", {})
    lines = [line for line in metrics if line.get("rank", 0) == 0 and "images/s" in line]
    before = [0, *(line["step"] for line in lines)]
    windows = [_Window(line, line["step"] - step, batch) for line, step in zip(lines, before)]
    warm = [window for window, step in zip(windows, before) if step >= WARM_UP_STEPS]
    counted = [window for window in warm if window.epoch > 1] or warm
    if not counted:
        steps = result["settings"]["max_steps"] or result["steps"]
        fix = "give it more steps, or lower hyperparameters.log_every"
        raise mistake("study", f"{name} logged no speed after its {WARM_UP_STEPS} warm-up steps, of {steps}", fix)
    seconds = sum(window.seconds for window in counted)
    steps = sum(window.steps for window in counted)
    rate, images = batch * steps / seconds, result.get("training_images")
    first = [window for window in windows if window.epoch == 1]
    whole = first and images and sum(window.steps for window in first) >= images // batch
    cores, on_a_host = hardware.get("cores"), result["world_size"] / hosts
    shares = [window.cpu * on_a_host / window.seconds * window.steps / cores for window in counted if cores]
    probed = "input_images_per_second" in result  # of one process, while all of them prepared images
    evaluations = [line["evaluate_s"] for line in metrics if "evaluate_s" in line]
    return {
        "images_per_second": rate,
        "epoch_seconds": images / rate if images else None,
        "first_epoch_seconds": sum(window.seconds for window in first) if whole else None,
        "data_wait_share": sum(window.waited * window.steps for window in counted) / seconds,
        **{f"cpu_share_p{percent}": percentile(shares, percent) for percent in PERCENTILES},
        **{key: result.get(key) for key in MEASURED if key.startswith("input_")},
        "input_images_per_second": result["input_images_per_second"] * result["world_size"] if probed else None,
        "evaluate_seconds": statistics.median(evaluations) if evaluations else None,
        "memory_gib": max(line["memory_gib"] for line in lines),
        **{key: hardware.get(key) for key in ("gpu", "gpu_memory_gib", "gpu_used_gib", "cores")},
        "training_images": images,
        "counted_steps": steps,
        "world_size": result["world_size"],
        "mfu": result.get("mfu"),
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the two nearest ranks; None if there are no values."""
    if not values:
        return None
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


class _Window:
    """The steps that one metric line covers."""

    def __init__(self, line: Mapping[str, Any], steps: int, batch: int):
        self.epoch, self.steps = line["epoch"], steps
        self.seconds = steps * batch / line["images/s"]
        self.waited, self.cpu = line["data_wait_s"], line["cpu_s"]  # per step
