"""Features in a label bank: what is kept is what the teacher gave to the precision of its storage, and other features are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training.settings.features import FeatureSettings
from training.tasks.feature_losses import feature_loss
from training.teacher.feature_format import FeatureFormat
from training.teacher.feature_records import pack_features, unpack_features
from training.teacher.logit_records import record_layout

from tests.entrypoints.teacher_caches import (
    CLASSES,
    IMAGES,
    Model,
    batch_of,
    forget,
    no_teacher,
    opened,
)

SHAPES = {"pooled": (7,), "tokens": (2, 3, 7)}
PRECISIONS = ("fp16", "int8", "int4")


def kept(level: str = "pooled", precision: str = "int8", **changes) -> FeatureFormat:
    return FeatureFormat(**{"level": level, "shape": SHAPES[level], "precision": precision, **changes})


def realistic(*shape: int) -> torch.Tensor:
    """Half of them around 0 as a ViT's, half never below it as a CNN's; one vector has a number that stands out."""
    features = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    features[len(features) // 2 :].relu_()
    features.view(-1, shape[-1])[3, 1] = 30.0
    return features


@pytest.mark.parametrize("top_k", [4, None])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("level", SHAPES)
def test_the_first_use_equals_every_later_one_bit_for_bit_and_numpy_reads_the_same(level, precision, top_k):
    layout = record_layout(CLASSES, top_k, "int8", kept(level, precision))
    features = realistic(16, *SHAPES[level]) * torch.logspace(-6, 3, 16).reshape(-1, *[1] * len(SHAPES[level]))
    features[0], features[1] = 3.3, 0.0
    content = layout.pack((torch.randn(16, CLASSES), features))
    records = layout.encode(content.numpy())
    first, later = layout.rounded(content), layout.decode(records, torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(first, later, strict=True))
    assert first[1].shape == features.shape and np.array_equal(layout.tensors(records)["features"], first[1].numpy())
    assert records.shape == (16, layout.size) and layout.size % 4 == 0


@pytest.mark.parametrize(("precision", "steps"), [("int8", 255), ("int4", 15)])
def test_a_number_is_half_a_step_from_the_teachers_wherever_its_vector_lies(precision, steps):
    features = realistic(16, *SHAPES["tokens"]) + 50 * torch.randn(16, 1, 1, 1)
    how = kept("tokens", precision)
    found = unpack_features(how, pack_features(how, features))
    largest = features.amax(-1, keepdim=True).half().float()
    step = (largest - features.amin(-1, keepdim=True)) / steps
    off = (found - features).abs() / step
    assert (off[features <= largest] <= 0.51 + steps * 2**-11).all(), (
        "and what lies above the rounded largest gets that"
    )
    assert off.max() > 0.4


@pytest.mark.parametrize("loss", ["cosine", "smooth_l1", "relational"])
def test_in_eight_bits_the_loss_and_its_gradient_are_the_teachers(loss):
    features = torch.randn(24, 192, generator=torch.Generator().manual_seed(1))
    student = (features + 0.8 * torch.randn(24, 192, generator=torch.Generator().manual_seed(2))).requires_grad_()
    errors = {}
    for precision in PRECISIONS:
        how = kept(precision=precision, shape=(192,))
        answers = unpack_features(how, pack_features(how, features))
        losses = [feature_loss(student, taught, FeatureSettings(loss=loss)) for taught in (features, answers)]
        gradients = [torch.autograd.grad(value, student)[0] for value in losses]
        moved = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
        errors[precision] = (abs(losses[1].item() / losses[0].item() - 1), moved)
    assert errors["fp16"] < (1e-3, 2e-3) and errors["int8"][0] < 2e-3 and errors["int8"][1] < 0.02
    assert errors["int4"][0] < 0.15 and errors["int8"][1] < errors["int4"][1] / 4


def test_a_record_says_what_it_takes():
    sizes = [
        record_layout(1000, 10, "fp16", FeatureFormat("pooled", (384,), precision)).size for precision in PRECISIONS
    ]
    assert sizes == [44 + 768, 44 + 388, 44 + 196]
    assert FeatureFormat("tokens", (16, 16, 384), "int8").size == 256 * 388
    assert FeatureFormat("tokens", (2, 2, 7), "int4").size == 4 * (4 + 4), (
        "an odd number of codes ends with half a byte"
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 70_000.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_features_that_a_record_cannot_hold_are_refused_with_the_fix(value, precision):
    layout, features = record_layout(3, None, "fp16", kept(precision=precision)), torch.ones(2, 7)
    features[1, 2] = value
    with pytest.raises(ValueError, match="features that are not finite, or beyond .*: set teacher_precision"):
        layout.encode(layout.pack((torch.ones(2, 3), features)).numpy())


# -- in a cache --------------------------------------------------------------------------------------------------------


class FeatureModel:
    """Logits, and features of the same pixels."""

    def __init__(self, level: str):
        self.model, self.shape, self.seen = Model(1).requires_grad_(False), SHAPES[level], 0

    def __call__(self, images):
        self.seen += len(images)
        pixels = images.flatten(1).float()
        return self.model(images), pixels[:, : np.prod(self.shape)].reshape(-1, *self.shape).sin()


@pytest.mark.parametrize("level", SHAPES)
def test_a_filling_pass_sees_what_a_later_one_reads_and_a_broken_record_is_mended_whole(tmp_path, level):
    cache, teacher = opened(tmp_path, features=kept(level)), FeatureModel(level)
    cache.begin_epoch([1], np.arange(IMAGES))
    first = cache.answers(batch_of(np.arange(IMAGES)), teacher)
    assert cache.begin_epoch([1], np.arange(IMAGES)), "whole"
    later = opened(tmp_path, features=kept(level))
    assert later.begin_epoch([1], np.arange(IMAGES))
    read = later.answers(batch_of(np.arange(IMAGES)), no_teacher)
    forget(cache, tmp_path, [3, 4])
    mended = cache.answers(batch_of(np.arange(IMAGES)), lambda images: tuple(part + 1 for part in teacher(images)))
    assert teacher.seen == 2 * IMAGES and (cache.hits, cache.misses) == (IMAGES - 2, IMAGES + 2)
    for one, two, three in zip(first, read, mended, strict=True):
        assert torch.equal(one, two)
        others = [index for index in range(IMAGES) if index not in (3, 4)]
        assert torch.equal(three[others], one[others])
        assert torch.allclose(three[[3, 4]], one[[3, 4]] + 1, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"level": "tokens"}, r"other feature level \(there pooled, here tokens\)"),
        ({"shape": (9,)}, r"other feature shape \(there \[7\], here \[9\]\)"),
        ({"precision": "int4"}, r"other feature precision \(there int8, here int4\)"),
        (None, r"other feature level \(there pooled, here None\), feature shape .*, feature precision"),
    ],
)
def test_a_bank_of_other_features_is_refused_by_name(tmp_path, changes, said):
    opened(tmp_path, features=kept())
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, features=None if changes is None else kept(**changes))
    opened(tmp_path / "without")
    with pytest.raises(ValueError, match=r"other feature level \(there None, here pooled\)"):
        opened(tmp_path / "without", features=kept())


def test_the_size_of_a_record_with_features_is_reported_beforehand(tmp_path):
    cache = opened(tmp_path, features=kept("tokens"))
    assert "12 logits in fp16 and tokens features of 2 × 3 × 7 numbers in int8" in cache.summary()
    assert f"{cache.layout.size} bytes each" in cache.summary()
