"""The trained model as files that timm can load by itself: model.safetensors, and config.json with all it takes to rebuild the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

from training.models.timm_models import Normalized

WEIGHTS, DESCRIPTION = "model.safetensors", "config.json"

DIGEST = "sha256"
"""The key of the weights' SHA-256, as `hash_weights` takes it, in the metadata of model.safetensors."""


@dataclass(frozen=True)
class Description:
    """What a config.json says about the weights beside it."""

    name: str
    options: dict[str, Any]
    """As timm.create_model takes them with the name; for a segmenter, its encoder's."""
    classes: list[str] | None
    """In the order of the logits. None: it does not name them."""
    image_size: int | tuple[int, int]
    """Pixels: the side of a square, or (height, width)."""
    mean: list[float]
    std: list[float]
    decoder: dict[str, Any] | None = None
    """What follows the encoder in a segmenter. None: timm can build the model by itself."""


def save(
    model: Normalized,
    folder: Path,
    *,
    name: str,
    options: Mapping[str, Any],
    classes: Sequence[str],
    image_size: int | Sequence[int],
    decoder: Mapping[str, Any] | None = None,
    **training: Any,
) -> None:
    """Write the weights and their description; readers see only whole files.

    The folder has timm's own format (`timm.models.save_for_hf`): `timm.create_model("local-dir:FOLDER", pretrained=True)` gives
    the model, and timm.data.resolve_model_data_config(model) the preprocessing with which it is evaluated here. A model with a
    decoder is described in the same file, but timm cannot build it by itself.

    Args:
        model: its inner model is saved.
        folder: SM_MODEL_DIR.
        name, options: as timm.create_model took them.
        classes: in the order of the logits.
        image_size: pixels: the side of a square, or (height, width).
        decoder: what segmenter.build took besides them. None: the model is timm's own.
        training: anything else worth knowing about how it was trained, JSON-ready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    published = get_pretrained_cfg(name) or PretrainedCfg()
    preprocessing = {
        "input_size": [model.mean.numel(), height, width],
        "interpolation": "bilinear",
        "mean": _decimals(model.mean),
        "std": _decimals(model.std),
    }
    described: dict[str, Any]
    if decoder is None:
        described = {
            "architecture": name,
            "model_args": dict(options),
            "num_features": model.model.num_features,
            "pretrained_cfg": {
                **preprocessing,
                "crop_pct": 1.0,
                "crop_mode": "center",
                "fixed_input_size": _fixed(published.fixed_input_size, options),
                "pool_size": None,
                "first_conv": published.first_conv,
                "classifier": published.classifier,
            },
        }
    else:
        described = {
            "encoder": {"architecture": name, "model_args": dict(options)},
            "decoder": dict(decoder),
            "preprocessing": {**preprocessing, "fixed_input_size": _fixed(published.fixed_input_size, options)},
        }
    described |= {"num_classes": len(classes), "label_names": list(classes), "training": training}
    weights, digest = _weights(model.model), hashlib.sha256()
    hash_weights(digest, weights)
    with atomic_write(folder / WEIGHTS) as place:
        save_file(weights, place, metadata={"format": "pt", DIGEST: digest.hexdigest()})
        _sort_metadata(place)
    with atomic_write(folder / DESCRIPTION) as place:
        place.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _sort_metadata(file: Path) -> None:
    """Sort a safetensors file's metadata: the library writes it in a hash map's order, so that equal models made unequal files.

    The format's header is JSON, preceded by its length in 8 bytes (little-endian), and may end in spaces.
    """
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(written) == length, "only the order changes"
        stream.seek(8)
        stream.write(written)


def hash_weights(total: hashlib._Hash, state: Mapping[str, torch.Tensor]) -> None:
    """Add weights to a hash: in the order of their names, each with its name, type, shape and bytes, on whatever device."""
    for name, value in sorted(state.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def read_description(folder: Path) -> Description | None:
    """What a model's config.json says, whether `save` wrote it or timm, as on the Hugging Face hub.

    Returns:
        None if there is no such file, or if it is another program's and names no architecture.

    Raises:
        ValueError: the file is damaged.
    """
    file = folder / DESCRIPTION
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is damaged: copy it again ({error})") from error
    encoder = config.get("encoder", config)
    name = encoder.get("architecture")
    if not isinstance(name, str):
        return None
    published = get_pretrained_cfg(name) or PretrainedCfg()
    # timm's first configurations had everything on one level
    given = config.get("preprocessing", config.get("pretrained_cfg", config))
    found = {**published.to_dict(), **given}
    channels, height, width = found["input_size"]
    options = {key: value for key, value in encoder.get("model_args", {}).items() if key != "num_classes"}
    # what timm's own reader takes from there if the arguments do not say it
    if channels != published.input_size[0]:
        options.setdefault("in_chans", channels)
    if _fixed(found["fixed_input_size"], options) and (height, width) != tuple(published.input_size[1:]):
        options.setdefault("img_size", [height, width])
    classes = config.get("label_names", found.get("label_names"))
    return Description(
        name=name,
        options=options,
        classes=classes if isinstance(classes, list) else None,
        image_size=height if height == width else (height, width),
        mean=[*found["mean"]],
        std=[*found["std"]],
        decoder=config.get("decoder"),
    )


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A hidden file beside the target, to be written to; it then replaces the target, readable by all."""
    place = target.with_name(f".{target.name}")
    try:
        yield place
    except BaseException:
        place.unlink(missing_ok=True)
        raise
    place.chmod(0o644)
    os.replace(place, target)


def _fixed(by_default: bool, options: Mapping[str, Any]) -> bool:
    """Whether the model takes images of one size only; timm then builds it for the size of `input_size`.

    Args:
        by_default: the answer if no option changes it.
    """
    any_size = options.get("dynamic_img_size", False) or options.get("use_naflex", False)
    return by_default and not any_size and options.get("strict_img_size", True)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a model's state: safetensors takes no tensor that shares its memory with another."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in model.state_dict().items()}


def _decimals(values: torch.Tensor) -> list[float]:
    """float32 numbers as the shortest decimals that round-trip: 0.485, not 0.48500001430511475."""
    return [float(str(value)) for value in values.flatten().cpu().numpy()]
