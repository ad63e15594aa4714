"""Frozen teachers: every kind of file gives the same logits, in their own format, normalisation and size."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch._dynamo  # torch 2.0 does not bring it by itself
import torch.nn.functional as F
from torch import nn
from training.models import timm_models

from tests.entrypoints.teachers import (
    CLASSES,
    IMAGES,
    NAME,
    OPTIONS,
    Noisy,
    archive,
    channel,
    exported,
    freeze,
    load,
    save,
)

KINDS = ["folder", "archive", "bare weights", "ddp checkpoint", "ema checkpoint", "hub's older file"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_logits_and_digest(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    named = {"name": NAME, "options": OPTIONS} if kind not in ("folder", "archive") else {}
    loaded = load(place, **named)
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), trained(IMAGES))
    assert loaded.digest() == load(tmp_path / "model").digest()
    assert (loaded.name, loaded.parameters) == (NAME, timm_models.parameter_count(trained))


# --- frozen


def test_whoever_calls_train_a_teacher_stays_in_eval_mode_and_keeps_its_statistics():
    model = Noisy()
    teaching = freeze(model)
    assert not any(module.training for module in model.modules())
    expected, statistics = teaching(IMAGES), copy.deepcopy(model.state_dict())
    for meddle in (model.train, model.layers[1].train, model.layers[2].train, teaching.members[0].model.train):
        meddle()
        assert torch.equal(teaching(IMAGES), expected)
        torch.testing.assert_close(teaching(IMAGES[:1]), expected[:1])  # its batch mates do not count
    assert all(torch.equal(value, statistics[name]) for name, value in model.state_dict().items())


def test_a_teacher_is_out_of_reach_of_everything_that_walks_a_models_parts():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(2, 2), freeze(Noisy())

    task = Task()
    assert len([*task.modules()]) == 2 and len([*task.parameters()]) == 2
    assert {*task.state_dict()} == {"student.weight", "student.bias"}
    task.train().requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in task.teacher.members[0].model.parameters())


def test_a_students_loss_keeps_the_logits_for_its_backward_pass():
    student, teaching = nn.Linear(256, 3), freeze(Noisy())
    logits = teaching(IMAGES)
    assert not logits.requires_grad
    F.mse_loss(student(IMAGES.flatten(1).float()) * logits, logits).backward()
    assert student.weight.grad.abs().sum() > 0


# --- number formats


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_teacher_computes_in_its_own_number_format_whatever_surrounds_it(precision):
    torch.manual_seed(0)
    model = Noisy()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    by_hand = timm_models.Normalized(copy.deepcopy(model).to(dtype), [0.5], [0.5]).eval()
    teaching = freeze(model, precision=precision)
    with torch.no_grad():
        expected = by_hand(IMAGES).float()
    with torch.autocast("cpu", torch.bfloat16):
        surrounded = teaching(IMAGES)
    assert surrounded.dtype == torch.float32
    assert torch.equal(surrounded, expected) and torch.equal(teaching(IMAGES), expected)
    assert teaching.members[0].model.mean.dtype == torch.float32, "pixels are normalised in full"


def test_a_bf16_teacher_takes_half_the_memory():
    full, half = freeze(Noisy()), freeze(Noisy(), precision="bf16")
    assert 0.49 < half.memory_bytes / full.memory_bytes < 0.52
    assert full.memory_bytes == sum(4 * value.numel() for value in Noisy().state_dict().values()) + 2 * 4 + 4


def test_convolutions_lie_in_channels_last_order(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

        def forward(self, images):
            assert images.dtype == torch.float32
            features = self.second(self.first(images))
            assert features.is_contiguous(memory_format=torch.channels_last)
            return self.head(features.mean((2, 3)))

    teaching = freeze(Plain())
    assert teaching.members[0].model.model.second.weight.is_contiguous(memory_format=torch.channels_last)
    assert teaching(IMAGES).shape == (4, 3)


# --- normalisation and resolution


def test_the_teachers_own_normalisation_comes_with_it(tmp_path, trained):
    trained.mean.fill_(0.3)
    trained.std.fill_(0.7)
    save(trained, tmp_path / "model")
    loaded = load(tmp_path / "model").members[0].model
    assert (loaded.mean.item(), loaded.std.item()) == pytest.approx((0.3, 0.7))


def test_a_teacher_scales_the_students_images_to_its_own_size(tmp_path, trained):
    large = torch.randint(0, 256, (4, 1, 24, 24), dtype=torch.uint8)
    scaled = F.interpolate(large.float(), (16, 16), mode="bilinear", antialias=True) / 255
    with torch.no_grad():
        expected = trained.model((scaled - trained.mean) / trained.std)
    for place, named in (
        (tmp_path / "model", {}),
        (channel(tmp_path, "bare weights", trained), {"name": NAME, "options": OPTIONS}),
    ):
        torch.testing.assert_close(load(place, image_size=24, **named)(large), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_any_size_sees_what_the_student_sees_where_nothing_says_otherwise(tmp_path):
    exported(tmp_path / "model", name="test_resnet")
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "weights.safetensors")
    (tmp_path / "bare").mkdir()
    (tmp_path / "weights.safetensors").rename(tmp_path / "bare/weights.safetensors")
    bare = load(tmp_path / "bare", name="test_resnet", options={"in_chans": 1}, image_size=40)
    assert bare.members[0].model.image_size == 40
    assert load(tmp_path / "model", image_size=40).members[0].model.image_size == 16


# --- several models


def test_an_ensemble_is_the_mean_of_its_models_logits_each_in_its_own_way(tmp_path):
    """Which is the geometric mean of their distributions."""
    first = exported(tmp_path / "channel/first", 1)
    second = exported(tmp_path / "made", 2, "test_resnet", image_size=32)
    archive(tmp_path / "made", tmp_path / "channel/second/model.tar.gz")
    ensemble = load(tmp_path / "channel")
    with torch.no_grad():
        one = first(IMAGES)
        second.image_size = 32
        two = second(IMAGES)
    torch.testing.assert_close(ensemble(IMAGES), (one + two) / 2, rtol=1e-4, atol=1e-5)
    geometric = (one.softmax(1) * two.softmax(1)).sqrt()
    torch.testing.assert_close(
        ensemble(IMAGES).softmax(1), geometric / geometric.sum(1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    assert ensemble.name == f"{NAME} + test_resnet"
    assert ensemble.parameters == timm_models.parameter_count(first) + timm_models.parameter_count(second)


def test_several_archives_are_an_ensemble_too(tmp_path):
    for seed in (1, 2):
        exported(tmp_path / f"model{seed}", seed)
        archive(tmp_path / f"model{seed}", tmp_path / f"channel/{seed}.tar.gz")
    assert len(load(tmp_path / "channel").members) == 2


def test_names_are_matched_with_subfolders_in_the_order_of_their_names(tmp_path):
    exported(tmp_path / "made/a", 1)
    exported(tmp_path / "made/b", 2, "test_resnet")
    for name in "ab":
        (tmp_path / "channel" / name).mkdir(parents=True)
        shutil.copy(tmp_path / f"made/{name}/model.safetensors", tmp_path / "channel" / name / "weights.safetensors")
    with pytest.raises(ValueError, match=r"names 3 models \(x, y, z\), the channel teacher holds 2 \(a, b\)"):
        load(tmp_path / "channel", name=["x", "y", "z"])
    with pytest.raises(ValueError, match="b: weights.safetensors does not fit test_vit.*") as error:
        load(tmp_path / "channel", name=["test_resnet", "test_vit"], options={"in_chans": 1})
    assert "a: weights.safetensors does not fit test_resnet" in str(error.value), "both are told"


def test_all_mistakes_of_all_models_are_reported_at_once(tmp_path):
    for name, classes, channels in (("one", CLASSES, 3), ("two", ["x", "y", "z"], 3), ("three", CLASSES, 1)):
        options = {**OPTIONS, "in_chans": channels}
        save(timm_models.build(NAME, options, 3), tmp_path / "channel" / name, options=options, classes=classes)
    (tmp_path / "channel/empty").mkdir()
    with pytest.raises(ValueError, match="empty: the channel teacher holds 0 weights files") as error:
        load(tmp_path / "channel")
    said = str(error.value)
    assert "one: the teacher was made for channels 3, the student sees 1" in said
    assert "two: the teacher knows the classes x, y, z" in said and said.count("made for channels 3") == 2
    assert "three" not in said


# --- digest


def test_the_digest_changes_with_all_that_the_logits_depend_on_and_nothing_else(tmp_path, trained):
    first = load(tmp_path / "model").digest()
    assert first == load(tmp_path / "model").digest() and len(first) == 64

    def changed(**described) -> str:
        model = copy.deepcopy(trained)
        described.pop("change", lambda _: None)(model)
        save(model, tmp_path / "other", **described)
        return load(tmp_path / "other").digest()

    assert changed() == first
    different = [
        changed(change=lambda model: model.model.head.bias.data[-1:].add_(1e-6)),
        changed(change=lambda model: model.mean.add_(0.01)),
        changed(change=lambda model: model.std.add_(0.01)),
        changed(options={**OPTIONS, "drop_rate": 0.1}),
        load(tmp_path / "model", precision="bf16").digest(),
        changed(image_size=24),
        changed(name="vit_small_patch16_224"),
    ]
    assert len({first, *different}) == 1 + len(different)


def test_an_ensembles_digest_does_not_depend_on_the_order_of_its_models(tmp_path):
    for folder, seeds in (("forth", (1, 2)), ("back", (2, 1)), ("other", (1, 3))):
        for seed, name in zip(seeds, "ab"):
            exported(tmp_path / folder / name, seed)
    assert load(tmp_path / "forth").digest() == load(tmp_path / "back").digest() != load(tmp_path / "other").digest()


def test_memory_order_does_not_move_the_digest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 3))
    teaching = freeze(model)
    lying = teaching.digest()
    model.to(memory_format=torch.contiguous_format)
    assert teaching.digest() == lying
