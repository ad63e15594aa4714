"""Pictures of predictions: colours, places, legend, and that they never end a run."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from training.data.masks import open_data
from training.models.precision import Precision
from training.settings.segmentation import SegmentationSettings
from training.tasks import overlays
from training.tasks.overlays import Row, draw, voc_colour

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("number", "colour"),
    [(0, (0, 0, 0)), (1, (128, 0, 0)), (2, (0, 128, 0)), (3, (128, 128, 0)), (4, (0, 0, 128)), (8, (64, 0, 0)), (15, (192, 128, 128)),
     (20, (0, 64, 128)), (255, (224, 224, 192))],
)  # fmt: skip
def test_classes_have_the_colours_of_pascal_voc(number, colour):
    """As its annotations have them: aeroplane, bicycle, bird, boat, cat's and person's, television, void."""
    assert voc_colour(number) == colour


def test_no_two_classes_share_a_colour():
    assert len({voc_colour(number) for number in range(256)}) == 256


def row(mask: list, prediction: list, image: int = 100, channels: int = 3) -> Row:
    mask, prediction = (np.array(values, np.uint8) for values in (mask, prediction))
    return Row("one.png", np.full((*mask.shape, channels), image, np.uint8), mask, prediction)


def test_mask_and_prediction_are_tinted_beside_the_image_and_unlabelled_pixels_are_not():
    palette = [(0, 0, 0), (200, 50, 0)]
    picture = draw([row([[0, 1], [255, 1]], [[1, 1], [0, 0]])], ["sky", "road"], palette, 255)
    pixels, side = np.array(picture), overlays.PANEL
    lefts = [overlays.MARGIN + column * (side + overlays.MARGIN) for column in range(3)]
    image, sky, road = (100, 100, 100), (40, 40, 40), (160, 70, 40)  # 0.4 × 100 + 0.6 × the class's colour
    expected = [[image] * 4, [sky, road, image, road], [road, road, sky, sky]]
    for left, wanted in zip(lefts, expected):
        corners = [(y, x) for y in (side // 4, 3 * side // 4) for x in (side // 4, 3 * side // 4)]
        assert [tuple(pixels[overlays.LINE + y, left + x].tolist()) for y, x in corners] == wanted
    below = pixels[overlays.LINE + side + overlays.LINE + overlays.MARGIN :].reshape(-1, 3).tolist()
    assert [0, 0, 0] in below and [200, 50, 0] in below, "the legend"


def test_a_class_of_the_ignored_number_is_unlabelled_and_may_be_predicted():
    picture = draw([row([[0]], [[0]])], ["void", "road"], [(250, 0, 0), (0, 250, 0)], 0)
    middle = np.array(picture)[overlays.LINE + overlays.PANEL // 2]
    lefts = [overlays.MARGIN + column * (overlays.PANEL + overlays.MARGIN) + 9 for column in (1, 2)]
    assert [tuple(middle[left].tolist()) for left in lefts] == [(100, 100, 100), (190, 40, 40)]


def test_many_classes_large_and_grey_images_and_names_in_any_script_are_drawn():
    names = [f"도로 {number}" for number in range(256)]
    large = row(np.zeros((700, 1100)), np.full((700, 1100), 255), channels=1)
    picture = draw([large, row([[1]], [[2]])], names, [voc_colour(number) for number in range(256)], 255)
    assert picture.width == 3 * (overlays.PANEL + overlays.MARGIN) + overlays.MARGIN
    assert {tuple(colour) for colour in np.array(picture).reshape(-1, 3).tolist()} >= {
        voc_colour(n) for n in range(256)
    }


class Brightness(nn.Module):
    """Gives pixels of value v the class v."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(images[:, 0].long(), 3).permute(0, 3, 1, 2).float()


@pytest.fixture
def trained(tmp_path):
    """Ten held-out images, each of one class that it also shows, the fourth broken; what `save` takes beside a folder."""
    for number in range(10):
        for kind in ("images", "masks"):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            Image.new("L", (48, 40), number % 3).save(tmp_path / "data" / kind / f"{number}.png")
    (tmp_path / "data/images/3.png").write_bytes(b"\x89PNG broken")
    settings = SegmentationSettings(model="x", classes=3, image_size=(32, 32), overlays=5, global_batch_size=2)
    data = open_data(tmp_path / "data", tmp_path / "data", settings, 1)
    state = SimpleNamespace(
        evaluated=Brightness().train(), precision=Precision("fp32", CPU), world=SimpleNamespace(device=CPU)
    )
    return state, data, settings


def test_rows_are_spread_over_the_held_out_images_in_their_masks_size(trained):
    state, data, settings = trained
    found = overlays.rows(*trained)
    assert [item.name for item in found] == ["0.png", "2.png", "4.png", "6.png", "8.png"]
    for item in found:
        assert item.mask.shape == item.prediction.shape == (40, 48)
        assert (item.mask == item.prediction).all()
    assert state.evaluated.training, "in the mode that it had"
    every = SegmentationSettings(model="x", classes=3, image_size=(32, 32), overlays=99)
    assert len(overlays.rows(state, data, every)) == 9, "without the broken one"


def test_a_full_disk_costs_the_picture_and_nothing_else(trained, tmp_path):
    said: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        overlays.save(trained[0], tmp_path, *trained[1:], said.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == ["no overlays.png: OSError: [Errno 27] File too large"]
    assert not [file for file in tmp_path.iterdir() if "overlays" in file.name]
    overlays.save(trained[0], tmp_path, *trained[1:], said.append)
    assert said[1:] == [f"5 held-out images with their masks and predictions: {tmp_path / 'overlays.png'}"]
    with Image.open(tmp_path / "overlays.png") as picture:
        picture.verify()


def test_a_model_that_fails_costs_the_picture_alone(trained, tmp_path):
    said: list[str] = []
    trained[0].evaluated.forward = lambda images: images.no_such_thing
    overlays.save(trained[0], tmp_path, *trained[1:], said.append)
    assert len(said) == 1 and said[0].startswith("no overlays.png: AttributeError")
