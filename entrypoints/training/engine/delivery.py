"""What a script leaves in the model folder, which becomes model.tar.gz: the weights, their description and their card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.data.batches import Images
from training.data.loaders import Data
from training.engine.loop import Outcome
from training.models import card, export, onnx_export
from training.models.timm_models import Normalized
from training.settings.scripts import LabelledImageSettings, TrainingSettings


def require_packages(settings: LabelledImageSettings) -> None:
    """Find out before training whether all can be left that is asked for.

    Raises:
        ValueError: a package is missing; the message says which.
    """
    if settings.export_onnx:
        onnx_export.require_packages()


def deliver(
    model: Normalized,
    folder: Path,
    settings: TrainingSettings,
    data: Data[Images, Images],
    outcome: Outcome,
    *,
    name: str,
    options: Mapping[str, Any],
    image_size: int | Sequence[int],
    decoder: Mapping[str, Any] | None = None,
    teacher: Mapping[str, Any] | None = None,
) -> None:
    """Write all of it; rank 0 alone calls it.

    Args:
        folder: SM_MODEL_DIR.
        name, options, image_size, decoder: as `export.save` takes them.
        teacher: what is known of it. None: there was none.
    """
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
            "training images": len(data.training),
            "validation images": len(data.held_out),
            "classes": data.classes,
        },
        "teacher": teacher,
        "metrics": metrics,
        "settings": asdict(settings),
    }
    card.write(folder, facts)
    if isinstance(settings, LabelledImageSettings) and settings.export_onnx:
        onnx_export.save_onnx(model, folder, image_size, channels=model.mean.numel())
