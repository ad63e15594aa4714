"""Rows of a preprocessing study's table, as its trials would have left them."""

from __future__ import annotations

from launcher.study.preprocessing_measures import MEASURED
from launcher.study.preprocessing_question import PreprocessingQuestion


def row(model: str, pipeline: str, load: int | str, repeat: int, seconds: float, **more: object) -> dict[str, str]:
    part = "training" if pipeline else "model"
    values = {
        "part": part,
        "model": model,
        "pipeline": pipeline,
        "load": load,
        "repeat": repeat,
        "epoch_seconds": seconds,
    }
    values |= {"images_per_second": 9469 / seconds, "training_images": 9469, "data_wait_share": 0.5, "run": "r", **more}
    return {name: str(values.get(name, "")) for name in (*PreprocessingQuestion.keys, *MEASURED, "run")}
