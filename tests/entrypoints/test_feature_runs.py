"""Features in whole runs: what is learned, what is left of them in the model folder, and which settings are refused."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import load_file
from training.data.batches import MaskedBatch
from training.distributed.world import World
from training.engine.state import prepare
from training.measure.timeline import Timeline
from training.models import export, segmenter, timm_models
from training.settings.distillation import DistillationSettings
from training.settings.features import FeatureSettings
from training.settings.segmentation import SegmentationSettings
from training.tasks import features
from training.tasks.segmentation import Segmentation
from training.teacher import frozen

import launcher
from tests.entrypoints.script_runs import script_run
from tests.entrypoints.test_training_runs import finished

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "in_chans": 1}


@pytest.fixture(scope="module")
def digits(prepared, tmp_path_factory):
    """Labelled digits, and a teacher of them."""
    root = tmp_path_factory.mktemp("digits")
    for part in ("train", "validation"):
        (root / part).symlink_to(prepared("digits") / part)
    model, classes = timm_models.build("vit_tiny_patch16_224", TINY, 10), [str(digit) for digit in range(10)]
    export.save(model, root / "teacher", name="vit_tiny_patch16_224", options=TINY, classes=classes, image_size=16)
    return root


def job(digits, **values) -> launcher.Job:
    small = {**TINY, "embed_dim": 12, "num_heads": 1, "patch_size": 4}
    hyperparameters = {
        **{"student": "vit_tiny_patch16_224", "student_options": small, "image_size": 16, "global_batch_size": 64},
        **{"batch_size_per_device": 16, "max_steps": 5, "log_every": 1, "mixup": 0.4, "ema_decay": 0.9},
        **{"features": {"level": "tokens"}, "precision": "fp32"},
    }  # fmt: skip
    inputs = {name: {"folder": str(digits / name)} for name in ("train", "validation", "teacher")}
    return launcher.from_values(
        {"name": "features", "script": "train_kd.py", "inputs": inputs, "hyperparameters": hyperparameters, **values}
    )


def test_a_run_leaves_the_student_without_its_projection(digits, tmp_path):
    run = script_run(tmp_path, job(digits))
    assert run.returncode == 0, run.stderr
    folder = run.output / "model"
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert {*load_file(folder / "model.safetensors")} == {*loaded.state_dict()}
    assert run.result()["parameters"] == sum(value.numel() for value in loaded.parameters())
    lines = [line for line in run.metrics() if "loss" in line]
    assert len(lines) == 5
    for line in lines:
        parts = 0.5 * line["label_loss"] + 0.5 * line["teacher_loss"] + line["feature_loss"]
        assert line["loss"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.slow
def test_a_run_of_two_processes_has_the_losses_of_one(digits):
    torchrun = {"distribution": "torchrun", "compute": {"instance_count": 2}}
    runs = [finished(job(digits, **values)) for values in ({}, torchrun)]
    one, two = ([line for line in run.metrics() if "feature_loss" in line] for run in runs)
    assert len(one) == 5 and runs[1].result()["world_size"] == 2
    for key in ("loss", "feature_loss"):
        assert [line[key] for line in one] == pytest.approx([line[key] for line in two], rel=1e-4)


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        (
            {"teacher_servers": {}, "worker_type": "remote", "without_servers": "fail"},
            "features",
            "null with teacher_servers, which send logits",
        ),
        ({"teacher_cache": {"views": 1, "feature_precision": "fp32"}}, "teacher_cache", "one of fp16, int8, int4"),
        ({"teacher": ["resnet18", "resnet34"]}, "teacher", "one model with features"),
        (
            {"hard_label_weight": 0, "teacher_loss_weight": 0},
            "features",
            "null if nothing else trains the classifier",
        ),
        ({"features": {"loss": "relational", "level": "tokens"}}, "features", "pooled with loss relational"),
        ({"features": {"loss": "relational"}, "batch_size_per_device": 2}, "features", "fewer than 3 images at once"),
        ({"features": {"weight": 0}}, "features", "above 0"),
    ],
)
def test_settings_that_features_do_not_go_with_are_refused_before_the_run(tmp_path, values, key, words):
    names = ("train", "validation", "teacher")
    for name in names:
        (tmp_path / name).mkdir()
    job = launcher.from_values({
        "name": "x", "script": "train_kd.py", "inputs": {name: {"folder": str(tmp_path / name)} for name in names},
        "hyperparameters": {"student": "vit_tiny_patch16_224", "features": {}, **values},
    })  # fmt: skip
    found = [str(issue) for issue in launcher.plan(job).errors if issue.key.startswith(f"hyperparameters.{key}")]
    assert any(words in issue for issue in found), launcher.plan(job).errors


def test_a_teacher_of_features_is_asked_for_as_a_channel():
    for made in (
        DistillationSettings(student="x", hard_label_weight=1, features=FeatureSettings()),
        SegmentationSettings(model="x", classes=3, features=FeatureSettings()),
    ):
        assert made.channels() == ["train", "validation", "teacher"]


def test_a_segmenter_learns_the_features_of_its_teachers_encoder_beside_masks_and_answers():
    wide, alone = {"channels": (8, 8, 16, 24), "stem_width": 8}, World(0, 1, 0, torch.device("cpu"), "none", "test")
    images = torch.randint(0, 256, (2, 3, 64, 32), dtype=torch.uint8)
    teaching = frozen.Teacher(
        [frozen.FrozenModel(segmenter.build("resnet10t", wide, 3, decoder_channels=8), "r", wide, features="tokens")]
    )
    settings = SegmentationSettings(
        model="x", classes=3, hard_label_weight=0.25, features=FeatureSettings(level="tokens", weight=3), dice_weight=1
    )
    model = segmenter.build("resnet10t", {**wide, "channels": (8, 8, 8, 8)}, 3, decoder_channels=8)
    beside = features.learner(model, teaching, settings, images[:1])
    state = prepare(model, settings, 10, alone, beside=beside)
    masks = torch.randint(0, 3, (2, 64, 32), dtype=torch.uint8)
    [losses] = Segmentation(state.trained, teaching, settings, alone, Timeline(alone.device))(
        MaskedBatch(images, masks, *torch.zeros(2, 2))
    )
    parts = 0.25 * losses["label_loss"] + 0.75 * losses["teacher_loss"] + 3 * losses["feature_loss"]
    assert losses["loss"].item() == pytest.approx(parts.item(), rel=1e-6)
    losses["loss"].backward()
    assert (
        beside is not None and tuple(beside.projection.weight.shape) == (24, 8) and beside.projection.weight.grad.any()
    )
    [untaught] = Segmentation(state.trained, None, settings, alone, Timeline(alone.device))(
        MaskedBatch(images, masks, *torch.zeros(2, 2))
    )
    assert [*untaught] == ["loss", "cross_entropy", "dice_loss"]
