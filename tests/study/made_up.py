"""Studies with the results that their trials would have left."""

from __future__ import annotations

from pathlib import Path

import launcher
from launcher.config.job import StudySection
from launcher.study import sizing
from launcher.study.preprocessing_measures import MEASURED as PREPROCESSING_MEASURED
from launcher.study.preprocessing_question import PreprocessingQuestion
from launcher.study.preprocessing_study import PreprocessingStudy
from launcher.study.scaling_measures import MEASURED as SCALING_MEASURED
from launcher.study.scaling_question import ScalingQuestion
from launcher.study.scaling_study import ScalingStudy

JOB = launcher.from_values({"name": "post", "script": "train_classifier.py", "region": "us-west-2"})


def preprocessing_row(
    model: str, pipeline: str, load: int | str, repeat: int, seconds: float, **more: object
) -> dict[str, str]:
    """A line of a preprocessing study's table."""
    part = "training" if pipeline else "model"
    values = {
        "part": part,
        "model": model,
        "pipeline": pipeline,
        "load": load,
        "repeat": repeat,
        "epoch_seconds": seconds,
    }
    values |= {
        "world_size": 1,
        "images_per_second": 9469 / seconds,
        "training_images": 9469,
        "data_wait_share": 0.5,
        "run": "r",
        **more,
    }
    return {name: str(values.get(name, "")) for name in (*PreprocessingQuestion.keys, *PREPROCESSING_MEASURED, "run")}


def post() -> PreprocessingStudy:
    """A study whose trials are the DALI post's, each pipeline's figures in one run; its machine has a V100."""
    measured = {"gpu": "Tesla V100-SXM2-16GB", "gpu_memory_gib": 16.0, "gpu_used_gib": 4.5, "cores": 8.0}
    pipelines, models = ["cpu_reference", "dali"], sizing.post()["models"]
    rows = [
        preprocessing_row(
            model, name, load, 1, seconds, **measured, input_cpu_seconds_per_image=0.0005 if name == "dali" else 0.01
        )
        for model, by_load in models.items()
        for load, pair in by_load.items()
        for name, seconds in zip(pipelines, pair)
    ]
    rows.append(preprocessing_row("resnet18", "", "", 1, 20.0, **measured))
    grid = StudySection(models=list(models), loads=[1, 4, 8, 12], pipelines=pipelines, repeats=1)
    return PreprocessingStudy(JOB, "process", Path("post.csv"), grid, rows)


def scaling_row(hosts: int, batch: int, repeat: int, rate: float, **more: object) -> dict[str, str]:
    """A line of a scaling study's table: `batch` images a step of all hosts, one process each."""
    step = batch / rate
    values = {"hosts": hosts, "global_batch": batch, "repeat": repeat, "images_per_second": rate, "step_seconds": step}
    values |= {"world_size": hosts, "threads": 1, "data_workers": 0, "gradient_bytes": 20e6, "training_images": 3000}
    values |= {"exposed_seconds": 0.0, "backward_seconds": step / 2, "data_wait_seconds": 0.02 * step, "run": "r"}
    values |= more
    return {name: str(values.get(name, "")) for name in (*ScalingQuestion.keys, *SCALING_MEASURED, "run")}


def scaling(rows: list[dict[str, str]], on: str = "aws", **grid: object) -> ScalingStudy:
    """A study with some rows."""
    values = {"name": "x", "script": "train_segmentation.py", "region": "us-west-2", "distribution": "torchrun"}
    values |= {"compute": {"instance_type": "ml.g5.xlarge", "price_per_hour": 3.6}}
    values |= {"hyperparameters": {"global_batch_size": 32, "epochs": 12}}
    section = StudySection(**{"hosts": [1, 2, 4], "batches": [8], **grid})
    job = launcher.from_values(values)
    return ScalingStudy(job, on, Path("x.csv"), section, rows, cores=2 if on == "process" else None)


def known() -> ScalingStudy:
    """Weak with 8 images a host and strong with 32 in all; 100 images/s on one host, each further one a little less."""
    rows = [scaling_row(1, 8, repeat, rate) for repeat, rate in enumerate((99, 100, 104), 1)]
    rows += [scaling_row(2, 16, repeat, rate, exposed_seconds=0.008) for repeat, rate in enumerate((180, 190, 196), 1)]
    rows += [scaling_row(4, 32, repeat, rate, exposed_seconds=0.012) for repeat, rate in enumerate((360, 370, 350), 1)]
    rows += [scaling_row(1, 32, repeat, 110) for repeat in (1, 2, 3)]
    rows += [scaling_row(2, 32, repeat, 205, exposed_seconds=0.008) for repeat in (1, 2, 3)]
    return scaling(rows, deadline_hours=0.06, budget_usd=0.35)
