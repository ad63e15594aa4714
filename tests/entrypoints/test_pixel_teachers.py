"""Teachers of pixels: the loss, who is taught where, and which teachers are refused before training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from training.data.batches import MaskedBatch
from training.distributed.world import World
from training.measure.timeline import Timeline
from training.models import export, segmenter, timm_models
from training.settings.segmentation import SegmentationSettings
from training.tasks.losses import temperature_kl
from training.tasks.segmentation import Segmentation
from training.teacher.acceptance import require
from training.teacher.frozen import Teacher, load

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
TINY = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "mlp_ratios": [2, 2, 2, 2]}
NAMES = ["sky", "road", "car"]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_of_pixels_is_the_mean_kl_over_all_of_them(temperature):
    student, teacher = (
        torch.tensor(np.round(4 * wave(1 + 2 * np.arange(120)), 3).reshape(2, 3, 4, 5)) for wave in (np.sin, np.cos)
    )
    total = 0.0
    for image, row, column in np.ndindex(2, 4, 5):
        p, q = (np.exp(values[image, :, row, column].numpy() / temperature) for values in (teacher, student))
        p, q = p / p.sum(), q / q.sum()
        total += (p * np.log(p / q)).sum()
    expected = temperature**2 * total / 40
    assert temperature_kl(student, teacher, temperature).item() == pytest.approx(expected, rel=1e-9)


class Fixed(nn.Module):
    """Logits that are parameters, so that their gradients can be looked at."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits


class Answers:
    """A teacher that says the same of all images."""

    def __init__(self, answers: torch.Tensor):
        self.answers = answers

    def to(self, device: torch.device) -> Answers:
        return self

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.answers


def test_pixels_without_a_label_are_taught_by_the_teacher_alone():
    rng = torch.Generator().manual_seed(0)
    logits, answers = (torch.randn(1, 3, 2, 2, generator=rng) for _ in range(2))
    masks = torch.tensor([[[0, 1], [255, 255]]], dtype=torch.uint8)
    batch = MaskedBatch(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), masks, *torch.zeros(2, 1))

    def gradient(teacher, **values) -> tuple[dict, torch.Tensor]:
        model = Fixed(logits.clone())
        settings = SegmentationSettings(model="x", classes=3, **values)
        timeline = Timeline(ALONE.device)
        [losses] = Segmentation(model, teacher, settings, ALONE, timeline)(batch)
        timeline.step()
        assert timeline.window().answered == (0 if teacher is None else 1), "images that the teacher answered for"
        losses["loss"].backward()
        return {name: value.item() for name, value in losses.items()}, model.logits.grad

    losses, alone = gradient(None, dice_weight=1)
    assert (
        alone[..., 0, :].any() and not alone[..., 1, :].any() and set(losses) == {"loss", "cross_entropy", "dice_loss"}
    )
    losses, taught = gradient(Answers(answers), hard_label_weight=0.25, temperature=2, dice_weight=1)
    assert taught[..., 1, :].any()
    assert losses["label_loss"] == pytest.approx(losses["cross_entropy"] + losses["dice_loss"], rel=1e-6)
    assert losses["loss"] == pytest.approx(0.25 * losses["label_loss"] + 0.75 * losses["teacher_loss"], rel=1e-6)
    expected = torch.autograd.grad(temperature_kl(own := logits.clone().requires_grad_(), answers, 2.0), own)[0]
    assert torch.allclose(taught[..., 1, :], 0.75 * expected[..., 1, :])
    assert set(gradient(None)[0]) == {"loss"}


@pytest.fixture(scope="module")
def channel(tmp_path_factory):
    """What train_segmentation.py leaves."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    model = segmenter.build("pvt_v2_b0", TINY, 3, decoder_channels=8).eval()
    export.save(model, folder, name="pvt_v2_b0", options=TINY, classes=NAMES, image_size=(64, 96), decoder={"channels": 8, "ignore_index": 255})  # fmt: skip
    return folder, model


def loaded(folder, classes=NAMES, *, channels: int = 3, image_size=(64, 96), **options) -> Teacher:
    return load(folder, classes, channels=channels, image_size=image_size, pixels=True, **options)


def test_a_segmenters_files_give_its_logits_again_on_any_crop(channel):
    folder, model = channel
    teacher = loaded(folder)
    assert teacher.parameters == timm_models.parameter_count(model)
    for size in ((64, 96), (32, 48)):
        images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
        with torch.no_grad():
            expected = model(images)
        answers = teacher(images)
        assert torch.allclose(answers, expected, atol=1e-5) and not answers.requires_grad
        assert torch.allclose(loaded(folder, precision="bf16")(images), expected, atol=0.1 * expected.std().item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["sky", "car", "road"]}, "the teacher knows the classes sky, road, car, the training images have sky, car, road"),
        ({"classes": [*NAMES, "tree"]}, "the teacher knows the classes sky, road, car, the training images have sky, road, car, tree"),
        ({"channels": 1}, "the teacher was made for channels 3, the student sees 1"),
        ({"image_size": (96, 96)}, r"scaled to \[64, 96\], the student's are scaled to \[96, 96\]: give both the same image_size"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused(channel, options, message):
    with pytest.raises(ValueError, match=message):
        loaded(channel[0], **options)


def test_classes_without_names_are_those_with_these_numbers(channel):
    """`class_names` is for results and pictures: one run may have set it, and another not."""
    assert loaded(channel[0], ["0", "1", "2"]).name == loaded(channel[0]).name
    with pytest.raises(ValueError, match="knows the classes sky, road, car, the training images have 0, 1"):
        loaded(channel[0], ["0", "1"])


def test_a_classifier_cannot_teach_pixels_nor_a_segmenter_images(channel, tmp_path):
    classifier = timm_models.build("pvt_v2_b0", TINY, 3)
    export.save(classifier, tmp_path, name="pvt_v2_b0", options=TINY, classes=NAMES, image_size=64)
    with pytest.raises(ValueError, match="model.safetensors is not a segmenter from train_segmentation.py"):
        loaded(tmp_path)
    with pytest.raises(ValueError, match="gives every pixel a class: take a classifier"):
        load(channel[0], NAMES, channels=3, image_size=64)


def test_weights_of_another_decoder_are_refused(channel, tmp_path):
    for file in channel[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((tmp_path / "config.json").read_text())
    described["decoder"]["channels"] = 16
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="model.safetensors does not fit pvt_v2_b0 .*'channels': 16"):
        loaded(tmp_path)


def test_a_teacher_below_the_least_miou_is_refused():
    require("validation_miou", 0.5, 0.5, "resnet50")
    with pytest.raises(ValueError, match="resnet50 has a mean IoU of 0.4900 .* below min_teacher_miou 0.5"):
        require("validation_miou", 0.49, 0.5, "resnet50")
