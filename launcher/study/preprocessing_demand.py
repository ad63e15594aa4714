"""How fast each model consumes images, and the image sizes at which it and the input side were measured."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config.job import Job
from launcher.study.preprocessing_cells import Cell
from launcher.study.sizing import Demand, demands_of


def image_size(job: Job) -> int:
    """Pixels of the images that the models see; the script's default if the job sets none."""
    size: int = job.hyperparameters.get("image_size", 224)
    return size


def input_size(job: Job) -> int:
    """Pixels of the images on which the input side alone was measured."""
    return job.hyperparameters.get("probe_image_size") or image_size(job)


def demands(cells: Sequence[Cell], job: Job) -> dict[str, dict[str, Demand]]:
    """Each model's demand by GPU, for images of the size at which input was measured."""
    gpu = next((row["gpu"] for cell in cells for row in cell.rows if row["gpu"]), None)
    here = gpu is not None and input_size(job) == image_size(job)
    alone = {
        cell.model: cell.alone.median / int(cell.rows[0]["world_size"]) if here and cell.alone is not None else None
        for cell in cells
    }
    return {model: demands_of(model, input_size(job), speed, gpu) for model, speed in alone.items()}
