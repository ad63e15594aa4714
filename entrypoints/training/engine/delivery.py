"""What a run leaves at its end: the model folder, which becomes model.tar.gz, and result.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """Check before training that the packages for the requested exports are installed.

    Raises:
        ValueError: a package is missing; the message says which.
    """
    if settings.export_onnx:
        onnx_export.require_packages()


def require_exportable(settings: LabelledImageSettings, states: Sequence[TrainingState]) -> None:
    """Check before training that each model fits into the requested exports.

    Raises:
        ValueError: one is too large; the message says by how much.
    """
    if settings.export_onnx:
        for state in states:
            onnx_export.require_size(state.evaluated)


@dataclass(frozen=True)
class Trained:
    """A model that a run leaves."""

    state: TrainingState
    name: str
    """The timm name."""
    options: Mapping[str, Any]
    """As timm.create_model took them."""


def deliver(
    outcome: Outcome,
    models: Sequence[Trained],
    data: Data[Images, Images],
    run: Run,
    *,
    image_size: int | Sequence[int],
    decoder: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the model folder and result.json, on rank 0. If there are several models, each has a subfolder of its name, and an entry of
    its name under `students` in result.json.

    Args:
        models: in any order.
        image_size, decoder: as `export.save` takes them.
        measured: further entries of result.json; its `teacher` also goes into the model cards.
    """
    if not run.world.is_first:
        return
    each = {}
    for trained in models:
        state, found = trained.state, outcome.validation.get(trained.state.name, {})
        if found and state.evaluated_at != outcome.steps:  # a stopped run does not evaluate once more
            found = {**found, "evaluated_after_steps": state.evaluated_at}
        _write_model(trained, found, outcome, data, run, image_size, decoder, measured.get("teacher"))
        each[state.name] = {"model": trained.name, "parameters": parameter_count(state.model), **found}
    of_models = each.get("", {"students": each})
    run.report.result(
        {
            **of_models,
            "steps": outcome.steps,
            "stopped": outcome.stopped,
            "images_per_second": outcome.images_per_second,
            "mfu": run.arithmetic.overall(),
            "arithmetic": run.arithmetic.about(),
            "world_size": run.world.size,
            "device": run.world.device.type,
            "settings": asdict(run.settings),
            "training_images": data.epoch_images,
            **measured,
        }
    )


def _write_model(
    trained: Trained,
    validation: Mapping[str, Any],
    outcome: Outcome,
    data: Data[Images, Images],
    run: Run,
    image_size: int | Sequence[int],
    decoder: Mapping[str, Any] | None,
    teacher: Any,
) -> None:
    """Write a model's folder: weights and description, card, and ONNX if requested.

    An ONNX export that fails is logged and leaves no file: the model is trained, and its weights are written.
    """
    settings, model = trained.state.settings, trained.state.evaluated
    folder = run.environment.model_dir / trained.state.name  # model_dir itself if it has no name
    metrics = {"steps": outcome.steps, **validation}
    export.save(
        model,
        folder,
        name=trained.name,
        options=trained.options,
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
        "teacher": teacher,
        "metrics": metrics,
        "settings": asdict(settings),
    }
    card.write(folder, facts)
    if isinstance(settings, LabelledImageSettings) and settings.export_onnx:
        try:
            onnx_export.save_onnx(model, folder, image_size, channels=model.mean.numel())
        except Exception as error:  # whatever it is, the model is trained and delivered
            run.report.log(
                f"WARNING: no {folder / onnx_export.FILE} of {trained.name}: {type(error).__name__}: {error}"
            )
