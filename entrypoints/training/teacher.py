"""The frozen teacher: from a channel's files to logits. It stays outside DDP and the optimizer, and always in eval mode."""

from __future__ import annotations

import json
import pickle
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from training import models
from training.export import DESCRIPTION


class Teacher:
    """Logits of a frozen model. It is no nn.Module, so nothing that walks a student's modules can reach or change it."""

    def __init__(self, model: nn.Module, name: str):
        self.model = model.eval().requires_grad_(False)
        self.name = name

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images (batch, channels, height, width), uint8 -> logits (batch, classes)."""
        return self.model(images)


def load(
    channel: Path,
    classes: Sequence[str],
    *,
    channels: int,
    image_size: int,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Teacher:
    """The teacher in a channel.

    Args:
        channel: a folder with a model.tar.gz as a run leaves it, or with its content, or with one weights file
            (.safetensors, .pt or .pth: a state dict, or a checkpoint that holds one under state_dict, model or model_ema).
        classes: the student's classes, in the order of its logits.
        channels, image_size: of the images that it will see.
        name, options: the timm model that the weights are for; None: as model.json says.

    Raises:
        ValueError: no weights, several, no model name, weights that do not fit it, or other classes, channels or image size
            than the student's; the message says which.
    """
    with tempfile.TemporaryDirectory() as unpacked:
        folder = _unpack(channel, Path(unpacked))
        description = (
            json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")) if (folder / DESCRIPTION).is_file() else {}
        )
        weights = [
            file
            for file in sorted(folder.iterdir())
            if file.suffix in (".safetensors", ".pt", ".pth") and not file.name.startswith(".")
        ]
        if len(weights) != 1:
            raise ValueError(
                f"the channel teacher holds {len(weights)} weights files ({', '.join(file.name for file in weights) or 'none'}): "
                "it needs one model.tar.gz, .safetensors, .pt or .pth"
            )
        if name is None or (name == description.get("name") and not options):
            name, options = description.get("name"), description.get("options")
        options = options or {}
        if name is None:
            raise ValueError(
                f"{weights[0].name} comes without a model.json: set the hyperparameter teacher to its timm model name"
            )
        if description and list(description["classes"]) != list(classes):
            raise ValueError(
                f"the teacher knows the classes {_some(description['classes'])}, the training images have {_some(classes)}: "
                "train the teacher on the same classes"
            )
        seen = {"channels": channels, "image size": image_size}
        made_for = {"channels": options.get("in_chans", 3), "image size": description.get("image_size", image_size)}
        for what, number in made_for.items():
            if number != seen[what]:
                raise ValueError(
                    f"the teacher was made for {what} {number}, the student sees {seen[what]}: give both the same"
                )
        with torch.random.fork_rng():  # its random start must not move the student's
            model = models.build(name, options, len(classes))
        try:
            model.model.load_state_dict(_state(weights[0]))
        except RuntimeError as error:
            first = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{weights[0].name} does not fit {name} with {options} and {len(classes)} classes: {first}"
            ) from error
    if description:
        model.mean.copy_(torch.tensor(description["mean"]).view_as(model.mean))
        model.std.copy_(torch.tensor(description["std"]).view_as(model.std))
    return Teacher(model, name)


def _unpack(channel: Path, target: Path) -> Path:
    """The folder with the teacher's files: the channel itself, or its only archive unpacked."""
    archives = sorted(channel.glob("*.tar.gz"))
    if not archives:
        return channel
    if len(archives) > 1:
        raise ValueError(f"the channel teacher holds several archives: {', '.join(file.name for file in archives)}")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            # extractall's own filter="data" came with Python 3.11.4; Debian 12 has 3.11.2
            place = (target / member.name).resolve()
            if not place.is_relative_to(target.resolve()):
                raise ValueError(
                    f"{archives[0].name} holds {member.name}, which lies outside of it: take an archive that a run left"
                )
            if member.isfile():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.extractfile(member).read())
    return target


def _state(file: Path) -> dict[str, torch.Tensor]:
    """A file's weights by name, without the prefixes that DDP and torch.compile leave."""
    if file.suffix == ".safetensors":
        state = load_file(file)
    else:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            cure = "save the state dict alone: torch.save(model.state_dict(), FILE)"
            raise ValueError(f"{file.name} is no file of weights alone, and nothing else is run: {cure}") from error
        for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
            if isinstance(state.get(key), dict):
                state = state[key]
                break
    prefixes = ("module.", "_orig_mod.")
    while any(name.startswith(prefixes) for name in state):
        state = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in state.items()}
    return state


def _some(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:4]) + (f" … ({len(names)})" if len(names) > 4 else "")
