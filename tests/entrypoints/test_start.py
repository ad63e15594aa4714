"""Weights that a model starts from, out of a channel; and a head that is trained alone."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training.models import export, start, timm_models
from training.runtime.environment import read_environment

import launcher

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
CLASSES = ["a", "b", "c"]


def write(folder, name="vit_tiny_patch16_224", options=VIT, classes=CLASSES, seed=1):
    torch.manual_seed(seed)
    model = timm_models.build(name, options, len(classes))
    folder.mkdir(parents=True, exist_ok=True)
    export.save(model, folder, name=name, options=options, classes=classes, image_size=16, metrics={})
    return model.model.state_dict()


def test_the_head_of_the_same_classes_is_taken_too(tmp_path):
    given = write(tmp_path)
    found = start.from_channel(tmp_path, "vit_tiny_patch16_224", VIT, CLASSES).model.state_dict()
    assert found.keys() == given.keys() and all(torch.equal(value, found[name]) for name, value in given.items())


@pytest.mark.parametrize(("name", "options"), [
    ("vit_tiny_patch16_224", VIT), ("resnet18", {}), ("deit_tiny_distilled_patch16_224", VIT),
])  # fmt: skip
@pytest.mark.parametrize("classes", [["x", "y", "z"], [*CLASSES, "d"]])
def test_a_head_of_other_classes_is_new(tmp_path, name, options, classes):
    given = write(tmp_path, name, options)
    torch.manual_seed(2)
    model = start.from_channel(tmp_path, name, options, classes)
    found = model.model.state_dict()
    heads = {key for key in found if timm_models.is_of_head(model.model, key)}
    assert heads and all(torch.equal(found[key], given[key]) for key in found.keys() - heads)
    assert not any(torch.equal(found[key], given[key]) for key in heads if "weight" in key)
    assert model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, len(classes))


def test_positions_are_interpolated_for_another_size(tmp_path):
    given = write(tmp_path)
    found = start.from_channel(tmp_path, "vit_tiny_patch16_224", {**VIT, "img_size": 32}, CLASSES).model.state_dict()
    assert given["pos_embed"].shape[1] == 5 and found["pos_embed"].shape[1] == 17
    assert torch.equal(found["pos_embed"][:, 0], given["pos_embed"][:, 0])
    assert torch.equal(found["blocks.1.mlp.fc1.weight"], given["blocks.1.mlp.fc1.weight"])


def test_grey_images_have_one_mean_of_their_own(tmp_path):
    write(tmp_path)
    model = start.from_channel(tmp_path, "vit_tiny_patch16_224", {**VIT, "in_chans": 1}, CLASSES)
    assert model(torch.zeros(2, 1, 16, 16, dtype=torch.uint8)).shape == (2, 3) and model.mean.numel() == 1
    assert "state_dict" not in model.model.pretrained_cfg and "state_dict" not in model.model.default_cfg


def test_a_bare_state_dict_is_taken_as_the_model_that_the_settings_name(tmp_path):
    given = write(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    torch.save(given, tmp_path / "bare/weights.pt")
    found = start.from_channel(tmp_path / "bare", "vit_tiny_patch16_224", VIT, CLASSES).model.state_dict()
    assert torch.equal(found["blocks.0.attn.qkv.weight"], given["blocks.0.attn.qkv.weight"])
    assert not torch.equal(found["head.weight"], given["head.weight"]), "nobody says what its classes are"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {}, "holds vit_tiny_patch16_224, not resnet18"),
        ("vit_tiny_patch16_224", {**VIT, "embed_dim": 36, "num_heads": 3}, "does not fit vit_tiny_patch16_224 with"),
        ("vit_tiny_patch16_224", {**VIT, "depth": 3}, "does not fit"),
        ("vit_tiny_patch16_224", {**VIT, "depth": 1}, "does not fit"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, name, options, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        start.from_channel(tmp_path, name, options, CLASSES)


def test_several_models_or_none_are_refused(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two")
    with pytest.raises(ValueError, match=r"the channel weights holds 2 models \(one, two\): give one"):
        start.from_channel(tmp_path, "vit_tiny_patch16_224", VIT, CLASSES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the channel weights holds 0 weights files"):
        start.from_channel(tmp_path / "empty", "vit_tiny_patch16_224", VIT, CLASSES)


@pytest.mark.parametrize("pretrained", [False, "channel"])
def test_the_settings_say_where_weights_come_from(tmp_path, monkeypatch, pretrained):
    given = write(tmp_path)
    monkeypatch.setenv("SM_CHANNEL_WEIGHTS", str(tmp_path))
    model = start.build("vit_tiny_patch16_224", VIT, CLASSES, pretrained, read_environment(), image_size=24)
    assert model.image_size == 24
    assert torch.equal(model.model.state_dict()["norm.weight"], given["norm.weight"])
    assert torch.equal(model.model.state_dict()["cls_token"], given["cls_token"]) == (pretrained == "channel")


@pytest.mark.parametrize(
    ("name", "options"), [("vit_tiny_patch16_224", {**VIT, "drop_rate": 0.5, "proj_drop_rate": 0.5}), ("resnet18", {})]
)
def test_of_a_head_alone_nothing_else_changes(name, options):
    torch.manual_seed(1)
    model = timm_models.build(name, options, 3)
    model.train()
    model.train_head_alone()
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    images = torch.randint(0, 256, (4, 3, 32, 32) if name == "resnet18" else (4, 3, 16, 16), dtype=torch.uint8)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], 0.1)
    for _ in range(2):
        model(images).square().sum().backward()
        optimizer.step()
    after = model.model.state_dict()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed == {key for key in after if timm_models.is_of_head(model.model, key)}
    model.eval()
    assert not any(module.training for module in model.model.modules())
    model.train()
    assert [key for key, module in model.model.named_modules() if module.training] == [
        key for key, _ in model.model.named_modules() if timm_models.is_of_head(model.model, key)
    ]


def test_a_model_without_a_head_of_its_own_is_refused():
    model = timm_models.normalize(torch.nn.Linear(2, 2), {"mean": [0.5] * 3, "std": [0.5] * 3}, {})
    with pytest.raises(ValueError, match="timm knows no head of this model"):
        model.train_head_alone()


@pytest.mark.slow
def test_a_linear_probe_is_a_run_on_two_processes_with_an_average_of_its_weights(tmp_path):
    for part in ("train", "validation"):
        for label in CLASSES:
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(4):
                image = Image.effect_noise((20, 20), 20 + 40 * CLASSES.index(label))
                image.convert("RGB").save(tmp_path / part / label / f"{number}.png")
    given = write(tmp_path / "weights", classes=["other"])
    run = launcher.run(launcher.plan(launcher.from_values({
        "name": "probe", "script": "train_classifier.py", "distribution": "torchrun", "compute": {"instance_count": 2},
        "inputs": {name: {"folder": str(tmp_path / name)} for name in ("train", "validation", "weights")},
        "hyperparameters": {
            "model": "vit_tiny_patch16_224", "model_options": VIT, "pretrained": "channel", "trained_layers": "head",
            "image_size": 16, "global_batch_size": 4, "max_steps": 4, "ema_decay": 0.5, "learning_rate": 0.1,
        },
    })))  # fmt: skip
    assert run.wait(120) == "Completed", "\n".join(line for _, line in run.logs())
    found = load_file(run.folder.host(run.hosts[0]) / "model/model.safetensors")
    same = {name for name, value in given.items() if torch.equal(value, found[name])}
    assert {*found} - same == {"head.weight", "head.bias"} and found["head.weight"].shape == (3, 24)
