"""What a run leaves at its end: the model folder, which becomes model.tar.gz, and result.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from training.data.batches import Images
from training.data.loaders import Data
from training.engine.loop import Outcome
from training.engine.run import Run
from training.engine.state import TrainingState
from training.models import card, export, onnx_export
from training.models.timm_models import parameter_count
from training.settings.scripts import LabelledImageSettings


def require_packages(settings: LabelledImageSettings) -> None:
    """Check before training that the packages for the wanted exports are there.

    Raises:
        ValueError: a package is missing; the message says which.
    """
    if settings.export_onnx:
        onnx_export.require_packages()


def deliver(
    outcome: Outcome,
    state: TrainingState,
    data: Data[Images, Images],
    run: Run,
    *,
    name: str,
    options: Mapping[str, Any],
    image_size: int | Sequence[int],
    decoder: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the model folder and result.json, on rank 0.

    Args:
        name, options, image_size, decoder: as `export.save` takes them.
        measured: what else result.json says; `teacher` there also goes onto the model's card.
    """
    if not run.world.is_first:
        return
    settings, model, folder = run.settings, state.evaluated, run.environment.model_dir
    metrics = {"steps": outcome.steps, **outcome.validation}
    export.save(
        model,
        folder,
        name=name,
        options=options,
        classes=data.classes,
        image_size=image_size,
        decoder=decoder,
        metrics=metrics,
    )
    facts = {
        "data": {
            "training images": data.epoch_images,
            "validation images": len(data.held_out),
            "classes": data.classes,
        },
        "teacher": measured.get("teacher"),
        "metrics": metrics,
        "settings": asdict(settings),
    }
    card.write(folder, facts)
    if isinstance(settings, LabelledImageSettings) and settings.export_onnx:
        onnx_export.save_onnx(model, folder, image_size, channels=model.mean.numel())
    run.report.result(
        {
            "model": name,
            "parameters": parameter_count(state.model),
            "steps": outcome.steps,
            "stopped": outcome.stopped,
            "images_per_second": outcome.images_per_second,
            **outcome.validation,
            "world_size": run.world.size,
            "device": run.world.device.type,
            "settings": asdict(settings),
            "training_images": data.epoch_images,
            **measured,
        }
    )
