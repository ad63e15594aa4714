"""A trained model as model.onnx, compared with PyTorch before it is kept; on request, because it needs more packages."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from training.models.export import atomic_write
from training.models.timm_models import FusedAttention, Normalized

FILE = "model.onnx"

PACKAGES = ("onnx", "onnxruntime")

OPSET = 17
"""The newest that torch 2.0 writes (https://onnx.ai/onnx/repo-docs/Versioning.html: since ONNX 1.12)."""

TOLERANCE = 1e-3
"""Largest difference between PyTorch's and ONNX Runtime's logits, as a share of the largest logit: both compute in float32, but in
different orders. Observed: 2e-6."""

MAX_BYTES = 2**31 - 1
"""Limit of a protobuf message, and so of a model in one file."""


def require_packages() -> None:
    """Fail early, before hours of training.

    Raises:
        ValueError: a package is missing; the message says which.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"export_onnx needs {' and '.join(PACKAGES)}, and there is no {' and no '.join(missing)} here: "
            f"install them (pip install {' '.join(missing)}), or set export_onnx: false"
        )


def require_size(model: Normalized) -> None:
    """Fail early if a model is too large for one file.

    Raises:
        ValueError: it is; the message says by how much.
    """
    size = sum(
        value.numel() * (4 if value.is_floating_point() else value.element_size())
        for value in model.state_dict().values()
    )
    if size >= MAX_BYTES:
        raise ValueError(
            f"{size / 2**30:.1f} GiB of weights do not fit into one ONNX file of 2 GiB: set export_onnx: false"
        )


def save_onnx(model: Normalized, folder: Path, image_size: int | Sequence[int], channels: int) -> float:
    """Write model.onnx, from pixels to logits; it includes the normalisation, so that nobody has to repeat it.

    Its input `pixels` is uint8 (batch, channels, height, width), colours as red, green, blue; its output `logits` float32
    (batch, classes), or (batch, classes, height, width). The batch may have any size.

    Args:
        model: on any device, of any type; it is not changed.
        image_size: pixels: the side of a square, or (height, width).

    Returns:
        The largest difference to PyTorch's logits on random images, as a share of the largest logit.

    Raises:
        ValueError: a package is missing, the model is too large for one file, or the difference is above TOLERANCE.
    """
    require_packages()
    require_size(model)
    import onnx
    import onnxruntime

    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = copy.deepcopy(model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format).eval()
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, channels, height, width), dtype=torch.uint8, generator=rng)
    with atomic_write(folder / FILE) as place:
        _write(model, images[:2], place)
        onnx.checker.check_model(str(place))
        session = onnxruntime.InferenceSession(str(place), providers=["CPUExecutionProvider"])
        with torch.no_grad():
            expected = model(images)
        found = torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])
        largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        difference: float = ((found - expected).abs().max() / largest).item()
        if not difference <= TOLERANCE:
            raise ValueError(
                f"ONNX Runtime's logits differ from PyTorch's by {difference:.1e} of the largest, more than {TOLERANCE:g}: "
                "the model uses an operation that the exporter gets wrong; set export_onnx: false"
            )
    return difference


def _write(model: Normalized, images: torch.Tensor, file: Path) -> None:
    for module in model.modules():
        if isinstance(module, FusedAttention):  # torch 2.0 cannot export attention in one call
            module.fused_attn = False
    # the tracing exporter: every torch since 2.0 has it, and it needs no package beyond onnx
    exporter: dict[str, Any] = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is the older one, and that a shape's check becomes constant
        torch.onnx.export(
            model,
            (images,),
            str(file),
            opset_version=OPSET,
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_axes={"pixels": {0: "batch"}, "logits": {0: "batch"}},
            **exporter,
        )
