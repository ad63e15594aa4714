"""The model card, README.md: what the model is, how to load it, and where it comes from."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from training.models.export import Description, atomic_write, read_description

FILE = "README.md"

SOURCE = Path(__file__).parents[1] / "source.json"
"""The commit of the code, which the launcher leaves in the archive; missing if a script was started without the launcher."""

PACKAGES = ("torchvision", "timm", "safetensors", "numpy", "pillow")

SECTIONS = {"data": "Data", "teacher": "Teacher", "metrics": "Results on the validation images", "settings": "Settings"}
"""Sections of a card besides the model itself, in this order."""


def write(folder: Path, facts: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Write the card of the model that `export.save` left in a folder; readers see only a whole file.

    Args:
        facts: by section name, JSON-ready: data (a mapping for each channel), teacher, metrics, settings. A missing or empty
            section is marked as not recorded; None means that it does not apply, and it is left out.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    description = read_description(folder)
    if description is None:
        raise FileNotFoundError(f"{folder} holds no config.json: save the model first")
    with atomic_write(folder / FILE) as place:
        place.write_text(text(description, facts, source(), versions()), encoding="utf-8")


def text(
    description: Description,
    facts: Mapping[str, Mapping[str, Any] | None],
    commit: Mapping[str, Any],
    packages: Mapping[str, str],
) -> str:
    """A card as Markdown, with the front matter of Hugging Face (https://huggingface.co/docs/hub/model-cards)."""
    size = description.image_size
    height, width = (size, size) if isinstance(size, int) else size
    model = {
        "architecture": description.name,
        "model_args": description.options,
        "decoder": description.decoder,
        "classes": description.classes,
        "image size": f"{height} × {width} pixels",
        "mean": description.mean,
        "std": description.std,
    }
    parts = [
        _front_matter(description, bool(facts.get("teacher"))),
        f"# {description.name}, {len(description.classes or ())} classes\n",
        _loading(description, height, width),
        _section("Model", {name: value for name, value in model.items() if value is not None}),
        *(_section(title, facts.get(name, {})) for name, title in SECTIONS.items() if facts.get(name, {}) is not None),
        _section(
            "Code", {"commit": commit.get("commit"), "clean": commit.get("clean")} if commit.get("commit") else {}
        ),
        _section("Versions", packages),
    ]
    return "\n".join(parts)


def source(file: Path = SOURCE) -> dict[str, Any]:
    """The code's commit, and whether it was `clean`, without local changes; empty if there is no record."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that affect the numbers, and of CUDA."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    return found


def _front_matter(description: Description, distilled: bool) -> str:
    task = "image-classification" if description.decoder is None else "image-segmentation"
    library = "timm" if description.decoder is None else "pytorch"
    tags = [task, library, *(["knowledge-distillation"] if distilled else [])]
    return "\n".join(
        ["---", f"library_name: {library}", f"pipeline_tag: {task}", f"tags: {json.dumps(tags)}", "---", ""]
    )


def _loading(description: Description, height: int, width: int) -> str:
    if description.decoder is not None:
        return (
            "`config.json` says how to build it again with `training.models.segmenter.build`, whose `model` takes the weights of "
            f"`model.safetensors`. Images are scaled to {height} × {width} pixels, whatever their aspect.\n"
        )
    mode = "L" if len(description.mean) == 1 else "RGB"
    return f"""With timm 1.0.16 or newer, in this folder:

```python
import timm
from PIL import Image, ImageOps

model = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = ImageOps.exif_transpose(Image.open("image.jpg")).convert("{mode}")
logits = model(transform(image)[None])
```

The transform scales an image's shorter side to {height} pixels (bilinear), cuts out the middle square, and normalises it; the
logits come in the order of `label_names` in `config.json`. Training and evaluation turned images upright as EXIF says, laid
transparent ones on white, and reduced 16 bits to 8.
"""


def _section(title: str, facts: Mapping[str, Any] | None) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in _flat(facts or {})]
    return "\n".join([f"## {title}\n", *(["| | |", "| --- | --- |", *rows] if rows else ["Not recorded."]), ""])


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested facts as rows: {"train": {"images": 9}} -> train.images, 9."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> str:
    """A value as it stands in a table, escaped so that it stays in its cell."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return " ".join(shown.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
