"""Held-out images that are larger than the crops that training sees: how many of them pass through a model at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from training.data.loaders import open_loaders
from training.data.masks import open_data
from training.distributed.world import World
from training.engine.held_out_size import WholeImages, evaluation_bytes
from training.engine.state import prepare
from training.models import segmenter
from training.settings.segmentation import SegmentationSettings
from training.tasks.evaluation import evaluate_pixels
from training.tasks.segmentation import whole_images

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
LAYERS = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
A_PIXEL = 4 * (8 + 8 + 4)
"""Bytes: ReLU's input and output, and the logits of the pass before."""


def test_an_evaluation_holds_its_largest_operator_and_the_logits_of_the_pass_before():
    assert evaluation_bytes(LAYERS, torch.zeros(2, 3, 16, 16)) == 2 * 16 * 16 * A_PIXEL
    assert evaluation_bytes(lambda images: LAYERS(images)[:, :2], torch.zeros(1, 3, 16, 16)) == 16 * 16 * A_PIXEL, (
        "a view keeps all of its storage"
    )


def test_copies_of_weights_are_no_part_of_what_an_image_takes():
    def forward(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return LAYERS(images)

    image = torch.zeros(1, 3, 16, 16)
    assert evaluation_bytes(forward, image.repeat(2, 1, 1, 1)) == 2 * evaluation_bytes(forward, image)


@pytest.mark.parametrize(
    ("crops", "room", "expected"),
    [
        (16, 1e9, 4),  # the pixels of 16 crops are those of four images
        (16, 3.5 * 32 * 32 * A_PIXEL, 3),
        (3, 1e9, 1),
        (16, 0, 1),  # a smaller batch there is none
    ],
)
def test_whole_images_have_no_more_pixels_and_take_no_more_memory_than_crops(crops, room, expected):
    said: list[str] = []
    whole = WholeImages(torch.zeros(1, 3, 32, 32), (16, 16), [lambda images: images, LAYERS])
    assert whole.batch_size(crops, room, ALONE, said.append) == expected
    assert said == [
        f"evaluation: {expected} of the held-out images at once, which are 32 × 32 pixels; training passes {crops} crops of 16 × 16"
    ]


SETTINGS = SegmentationSettings(
    model="resnet10t",
    model_options={"channels": (8, 8, 16, 16), "stem_width": 8},
    classes=3,
    decoder_channels=8,
    image_size=(64, 96),
    crop_size=(32, 32),
    global_batch_size=6,
    num_workers=0,
    precision="fp32",
)


def state_of(settings: SegmentationSettings):
    torch.manual_seed(0)
    model = segmenter.build(settings.model, settings.model_options, settings.classes, decoder_channels=8)
    return prepare(model, settings, 1, ALONE)


def test_images_are_whole_where_training_sees_less():
    state, image = state_of(SETTINGS), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    whole = whole_images(SETTINGS, image, state=state)
    assert whole.image.shape == (1, 3, 64, 96) and whole.image.dtype == torch.uint8
    mode, buffers = state.model.training, [buffer.clone() for buffer in state.model.buffers()]
    assert whole.batch_size(12, 1e9, ALONE, lambda _: None) == 2
    assert state.model.training == mode and all(map(torch.equal, state.model.buffers(), buffers))
    for crop_size in (None, (64, 96), (128, 64)):
        assert whole_images(replace(SETTINGS, crop_size=crop_size), image, state=state) is None


def test_metrics_do_not_depend_on_how_many_images_are_evaluated_at_once(tmp_path):
    rng = np.random.RandomState(0)
    for number in range(7):
        for kind, array in (
            ("images", rng.randint(0, 256, (50, 70, 3), np.uint8)),
            ("masks", rng.randint(0, 3, (50, 70)).astype(np.uint8)),
        ):
            file = tmp_path / kind / f"{number}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(array).save(file)
    data, model = open_data(tmp_path, tmp_path, SETTINGS, 3), state_of(SETTINGS).model
    found = []
    for size in (None, 1, 2, 5):
        loaders = open_loaders(data, SETTINGS, ALONE, batch_size_per_device=6, held_out_batch_size=size)
        assert max(len(images) for images, _ in loaders.validation) == (size or 6)
        assert {len(batch.images) for batch in loaders.train} == {6}
        found.append(evaluate_pixels(model, loaders.validation, ALONE, classes=["0", "1", "2"], ignore_index=255))
    for one in found[1:]:
        assert one["validation_iou"] == found[0]["validation_iou"]
        assert one["validation_loss"] == pytest.approx(found[0]["validation_loss"], rel=1e-6)
