"""Models behind their own normalisation: its arithmetic in every type, size and memory order, and where channels last pays."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from training.models import timm_models

from tests.entrypoints.torch_versions import fp16_on_cpu

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Seen(nn.Conv2d):
    """A convolution that keeps what it was given."""

    def __init__(self):
        super().__init__(3, 8, 3)

    def forward(self, images):
        self.images = images
        return super().forward(images)


def pixels(size: int = 16, count: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def by_hand(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images / 255 - mean) / std


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=fp16_on_cpu)])
@pytest.mark.parametrize("inner", [True, False], ids=["the model inside is cast", "all is cast"])
def test_pixels_are_normalised_exactly_whatever_the_weights_are(dtype, inner):
    model = timm_models.Normalized(Seen(), MEAN, STD)
    (model.model if inner else model).to(dtype)
    images = pixels()
    assert model(images).dtype == model.model.images.dtype == dtype
    assert torch.equal(model.model.images, by_hand(images).to(dtype))
    assert model.mean.dtype == torch.float32 and torch.equal(model.mean.flatten(), torch.tensor(MEAN))


def test_images_are_not_changed_even_where_they_are_floats():
    images = pixels().float()
    before = images.clone()
    timm_models.Normalized(nn.Identity(), MEAN, STD)(images)
    assert torch.equal(images, before)


def test_a_model_that_wants_another_size_gets_what_pillow_would_make():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8))
    images = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    for size in (16, 60):
        expected = np.array(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.float32) / 255
        model = timm_models.Normalized(nn.Identity(), [0.0] * 3, [1.0] * 3, image_size=size)
        found = model(images)[0].permute(1, 2, 0).numpy()
        assert np.abs(found - expected).max() < 1.01 / 255, "Pillow rounds to whole pixels, once in each direction"
    same = timm_models.Normalized(nn.Identity(), [0.0] * 3, [1.0] * 3, image_size=48)
    assert torch.equal(same(images), images / 255)


def test_images_come_channels_last_where_the_weights_are():
    model = timm_models.Normalized(Seen(), MEAN, STD)
    images = pixels()
    with torch.no_grad():
        expected = model(images)
        assert model.model.images.is_contiguous()
        model.to(memory_format=torch.channels_last)
        for converted in (model, copy.deepcopy(model)):
            converted(images)
            assert converted.model.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(model(images), expected, atol=1e-5)
        assert model.to(memory_format=torch.contiguous_format)(images) is not None
        assert model.model.images.is_contiguous()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("resnet50", "mobilenetv3_small_050", "efficientnet_b0", "densenet121")),
        *((name, False) for name in ("vit_small_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny", "mixer_s16_224")),
        ("regnety_008", False),  # grouped convolutions: timm's table has 0.66 times the speed
    ],
)  # fmt: skip
def test_channels_last_is_taken_where_timms_tables_show_that_it_pays(name, expected):
    with torch.device("meta"):
        assert timm_models.convolutional(timm.create_model(name)) is expected


def test_channels_must_be_those_of_the_mean():
    with pytest.raises(ValueError, match="a model for 3 channels got images with 1"):
        timm_models.Normalized(nn.Identity(), MEAN, STD)(pixels()[:, :1])


def test_attention_is_explicit_for_bf16_on_cpus_alone_and_computes_the_same():
    torch.manual_seed(0)
    model = timm_models.build("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}, 5).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)

    def fused() -> set[bool]:
        return {module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")}

    logits = {}
    for dtype, device, expected in (
        (torch.bfloat16, "cpu", False), (torch.float32, "cpu", True), (torch.bfloat16, "cuda", True),
    ):  # fmt: skip
        timm_models.choose_attention(model, dtype, torch.device(device))
        assert fused() == {expected}
        with torch.no_grad():
            logits[expected] = model(images)
    assert torch.allclose(logits[True], logits[False], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [("vit_tiny_patch16_224", False), ("resnet10t", False), ("swin_tiny_patch4_window7_224", True)],
)
def test_a_model_with_given_weights_draws_none_where_nothing_in_it_has_to_be_computed(name, drawn):
    """Swin computes where its windows lie; that is in no file of weights."""
    torch.manual_seed(0)
    usual = timm_models.create(name, {}, num_classes=4).eval()
    before = torch.get_rng_state()
    made = timm_models.create_for(usual.state_dict(), name, {}, num_classes=4).eval()
    assert torch.equal(torch.get_rng_state(), before) is not drawn
    images = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(made(images), usual(images))


def test_given_weights_are_copied_out_of_their_files_memory():
    weights = timm_models.create("resnet10t", {}, num_classes=4).state_dict()
    made = timm_models.create_for(weights, "resnet10t", {}, num_classes=4)
    for value in weights.values():
        value.zero_()
    assert made.fc.weight.abs().sum() > 0


def test_weights_of_another_model_are_refused_by_both_ways_of_making_it():
    other = timm_models.create("resnet10t", {}, num_classes=5).state_dict()
    for name in ("resnet10t", "swin_tiny_patch4_window7_224"):
        with pytest.raises(RuntimeError, match="size mismatch|Missing key"):
            timm_models.create_for(other, name, {}, num_classes=4)
