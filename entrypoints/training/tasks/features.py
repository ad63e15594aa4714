"""Feature distillation for the tasks with a teacher: the trained module, the features' part of the loss, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from training.engine import memory
from training.engine.memory import Footprint
from training.engine.state import TrainingState
from training.models.features import WithFeatures, projecting
from training.models.timm_models import Normalized
from training.settings.features import FeatureSettings
from training.settings.scripts import TeacherSettings
from training.tasks.feature_losses import feature_loss
from training.teacher.feature_format import FeatureFormat, FeaturePrecision
from training.teacher.frozen import Teacher
from training.teacher.logit_records import Output


def learner(
    student: Normalized, teacher: Teacher | None, settings: TeacherSettings, image: torch.Tensor
) -> WithFeatures | None:
    """The student with its features and their projection to the teacher's width; None if no features are learned.

    Args:
        student: on the CPU.
        image: uint8 (1, channels, height, width), on the teacher's device.

    Raises:
        ValueError: one of the models has no such features.
    """
    if settings.features is None:
        return None
    assert teacher is not None, "features are a teacher's"
    width = teacher.eager().with_features(image)[1].shape[-1]
    if settings.features.loss == "relational":
        return WithFeatures(student, settings.features.level)
    return projecting(student, settings.features.level, width, image)


def require_enough(settings: TeacherSettings, images: int) -> None:
    """Refuse to train with micro-batches too small to compare images in.

    Args:
        images: in a process's micro-batch.

    Raises:
        ValueError: the message says how many it takes.
    """
    if settings.features is not None and images < settings.features.least_images:
        raise ValueError(
            f"features: loss {settings.features.loss} compares at least {settings.features.least_images} images, but a process has "
            f"{images} at once: raise global_batch_size or batch_size_per_device, use fewer processes, or set the loss to cosine"
        )


def asked_of(teacher: Teacher, settings: TeacherSettings) -> Callable[[torch.Tensor], Output]:
    """A function that gives a teacher's answers for images: its logits, and its features if they are learned; with `teacher_stream`
    on a stream of its own."""
    asked: Callable[[torch.Tensor], Output] = teacher if settings.features is None else teacher.with_features
    return partial(teacher.on_its_stream, asked) if settings.teacher_stream else asked


def kept_features(
    features: FeatureSettings, precision: FeaturePrecision, teacher: Teacher, image: torch.Tensor
) -> FeatureFormat:
    """The format in which a label bank keeps the features that are learned.

    Args:
        precision: number format of the features.
        image: uint8 (1, channels, height, width), on the teacher's device.
    """
    shape = teacher.eager().with_features(image)[1].shape[1:]
    return FeatureFormat(features.level, tuple(shape), precision)


def logits_and_features(
    output: Output,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A model's output as its logits, and its features if they are learned."""
    return output if isinstance(output, tuple) else (output, None)


def with_features(
    loss: torch.Tensor, features: torch.Tensor | None, taught: torch.Tensor | None, settings: TeacherSettings
) -> dict[str, torch.Tensor]:
    """The loss with the features' part, and that part by name; the loss alone if no features are learned.

    Args:
        features, taught: the student's and the teacher's, as `feature_loss` takes them.
    """
    if settings.features is None:
        return {"loss": loss}
    assert features is not None and taught is not None, "both models give them"
    part = feature_loss(features, taught, settings.features)
    return {"loss": loss + settings.features.weight * part, "feature_loss": part}


def untaught(features: torch.Tensor | None) -> torch.Tensor | float:
    """0, with a gradient of 0 for the projection of features that are not learned: DDP waits for every parameter's gradient."""
    return 0.0 if features is None else 0 * features.sum()


def with_feature_loss(
    now: Footprint,
    without: Mapping[str, Footprint],
    states: Sequence[TrainingState],
    teacher: Teacher,
    settings: TeacherSettings,
    image: torch.Tensor,
) -> tuple[Footprint, dict[str, Footprint]]:
    """The footprints of `memory.measure` with the most that a model's feature loss keeps; unchanged if no features are learned.

    Args:
        settings: whose `features` all models learn.
        image: uint8 (1, channels, height, width), on the device of the models.
    """
    if settings.features is None:
        return now, {**without}
    how, taught = settings.features, teacher.eager().with_features(image)[1].shape[1:]
    kept = [_kept_by_loss(state.trainable, taught, how, image) for state in states]
    bytes_per_image, per_pair, per_triple = (max(sizes) for sizes in zip(*kept))
    return (
        replace(now, activations=now.activations + bytes_per_image, pairs=per_pair, triples=per_triple),
        {
            name: replace(step, activations=step.activations + bytes_per_image, pairs=per_pair, triples=per_triple)
            for name, step in without.items()
        },
    )


def _kept_by_loss(
    trainable: nn.Module, taught: torch.Size, how: FeatureSettings, image: torch.Tensor
) -> tuple[float, float, float]:
    """As `memory.loss_bytes`, for features of the shape that one image's have."""
    assert isinstance(trainable, WithFeatures), "the settings made it one with features"
    own = trainable.feature_shape(image)

    def loss(images: int) -> torch.Tensor:
        student, target = (torch.randn(images, *shape, device=image.device) for shape in (own, taught))
        return feature_loss(student.requires_grad_() * 1, target, how)  # autograd's leaves are not counted

    return memory.loss_bytes(loss, image.device)
