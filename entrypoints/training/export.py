"""The trained model as files: model.safetensors with the weights, model.json with all that is needed to build it again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from training.models import Normalized

WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def save(
    model: Normalized,
    folder: Path,
    *,
    name: str,
    options: Mapping[str, Any],
    classes: Sequence[str],
    image_size: int | Sequence[int],
    **more: Any,
) -> None:
    """Write the weights and their description; a reader sees whole files only.

    Args:
        model: its inner model is what is saved.
        folder: SM_MODEL_DIR.
        name, options: as timm.create_model took them.
        classes: in the order of the logits.
        image_size: pixels: the side of a square, or (height, width).
        more: anything else worth knowing, JSON-ready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().cpu().contiguous() for key, value in model.model.state_dict().items()}
    save_file(weights, folder / f".{WEIGHTS}")
    os.replace(folder / f".{WEIGHTS}", folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    description = {
        "name": name,
        "options": dict(options),
        "classes": list(classes),
        "image_size": image_size,
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        **more,
    }
    (folder / f".{DESCRIPTION}").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / f".{DESCRIPTION}", folder / DESCRIPTION)
