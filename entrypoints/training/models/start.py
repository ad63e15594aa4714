"""Weights that a model starts from, out of a channel: those of a run, of the Hugging Face hub, or any state dict of timm's names."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from training.models import timm_models
from training.models.export import read_description
from training.models.files import member_folders, read_weights, weights_file
from training.runtime.environment import Environment

CHANNEL = "weights"


def build(
    name: str,
    options: Mapping[str, Any],
    classes: Sequence[str],
    pretrained: bool | Literal["channel"],
    environment: Environment,
    *,
    image_size: int | None = None,
) -> timm_models.Normalized:
    """A model to train, with the weights that `pretrained` asks for: random, published, or from the channel `weights`.

    Args:
        image_size: as Normalized.

    Raises:
        ValueError: as `timm_models.create` and `from_channel`.
    """
    if pretrained != "channel":
        return timm_models.build(name, options, len(classes), pretrained=pretrained, image_size=image_size)
    model = from_channel(environment.channel(CHANNEL), name, options, classes)
    model.image_size = image_size
    return model


def from_channel(
    channel: Path, name: str, options: Mapping[str, Any], classes: Sequence[str]
) -> timm_models.Normalized:
    """A model for these classes, with the weights in a channel.

    The head's weights are taken too if the description beside the weights names the same classes; else the head is new. Position
    embeddings are interpolated, as by timm, if images have another size than those that the weights were trained on.

    Args:
        channel: a folder like the channel `teacher`, with one model.
        name, options: as timm.create_model takes them.

    Raises:
        ValueError: there is no such model, or another one; or its file is damaged.
    """
    with tempfile.TemporaryDirectory() as unpacked:
        folders = member_folders(channel, Path(unpacked))
        if len(folders) != 1:
            raise ValueError(f"the channel {CHANNEL} holds {len(folders)} models ({', '.join(folders)}): give one")
        [folder] = folders.values()
        description = read_description(folder)
        if description is not None and description.decoder is not None:
            raise ValueError(
                f"the channel {CHANNEL} holds a model that gives every pixel a class: give a classifier's weights"
            )
        if description is not None and description.name != name:
            raise ValueError(
                f"the channel {CHANNEL} holds {description.name}, not {name}: set the model to {description.name}, or give {name} weights"
            )
        file = weights_file(folder, CHANNEL)
        state = read_weights(file)
    fresh = timm_models.create(name, options, num_classes=len(classes))
    if description is None or description.classes != [*classes]:
        state |= _head(fresh)
    overlay = {"state_dict": state, "source": "", "num_classes": len(classes)}
    try:
        model = timm_models.create(
            name, options, num_classes=len(classes), pretrained=True, pretrained_cfg_overlay=overlay
        )
    except (RuntimeError, KeyError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{file.name} of the channel {CHANNEL} does not fit {name} with {dict(options)}: {first}"
        ) from error
    model.pretrained_cfg = model.default_cfg = fresh.pretrained_cfg  # its own has the state dict
    published = fresh.pretrained_cfg if description is None else {"mean": description.mean, "std": description.std}
    return timm_models.normalize(model, published, options)


def _head(model: timm_models.TimmModel) -> dict[str, torch.Tensor]:
    """The weights of a model's classifier by name."""
    return {name: value for name, value in model.state_dict().items() if timm_models.is_of_head(model, name)}
