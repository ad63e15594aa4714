"""Answers for pixels in a label bank: what is kept is what the teacher gave to the precision of its storage, at its own grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training.tasks.losses import temperature_kl
from training.teacher.bits import packed_bits, unpacked_bits
from training.teacher.feature_format import FeatureFormat
from training.teacher.pixel_records import PixelLayout
from training.teacher.tensor_bits import pack_bits, unpack_bits

CPU = torch.device("cpu")


def realistic(images: int = 4, classes: int = 21, side: int = 12) -> torch.Tensor:
    """Regions of one class each with soft edges, as a segmenter's answers are."""
    rng = torch.Generator().manual_seed(3)
    coarse = torch.randn(images, classes, 3, 3, generator=rng) * 4
    smooth = F.interpolate(coarse, (side, side), mode="bilinear")
    return smooth + 0.05 * torch.randn(images, classes, side, side, generator=rng)


def through_a_record(layout: PixelLayout, output):
    content = layout.pack(output)
    records = layout.encode(content.numpy())
    first, later = layout.rounded(content), layout.decode(records, CPU)
    if layout.features is None:
        assert torch.equal(first, later), "the first time they are what a record gives later"
    else:
        assert all(torch.equal(one, other) for one, other in zip(first, later, strict=True))
    return later, records


@pytest.mark.parametrize(("top_k", "precision"), [(0, "int8"), (1, "int8"), (1, "int4")])
def test_an_odd_grid_is_kept_as_exactly_as_an_even_one(top_k, precision):
    """Every place of an odd one has to meet its own logits again, not those half a place beside it."""
    loss = {}
    for side in (24, 25):
        logits = realistic(side=side)
        kept, _ = through_a_record(PixelLayout(side, side, 21, top_k, precision, None), logits)
        loss[side] = float(temperature_kl(kept, logits, 1.0))
    assert loss[25] < 1.3 * loss[24], loss


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_device_packs_numbers_of_few_bits_as_numpy_reads_them(bits):
    numbers = np.random.RandomState(bits).randint(0, 2**bits, (5, 13)).astype(np.uint8)
    packed = pack_bits(torch.from_numpy(numbers), bits)
    assert np.array_equal(packed.numpy(), packed_bits(numbers, bits))
    assert np.array_equal(unpack_bits(packed, 13, bits).numpy(), unpacked_bits(packed.numpy(), 13, bits))


@pytest.mark.parametrize("features", [None, FeatureFormat("tokens", (2, 3, 5), "int4")])
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize(("classes", "top_k"), [(2, 1), (5, 0), (5, 3), (21, 1), (150, 5), (256, 0)])
def test_the_first_use_equals_every_later_one_bit_for_bit_and_numpy_reads_the_same(classes, top_k, precision, features):
    layout = PixelLayout(7, 5, classes, top_k, precision, features)
    logits = torch.randn(6, classes, 7, 5) * torch.logspace(-6, 3, 6)[:, None, None, None]
    logits[0] = 3.3
    output = logits if features is None else (logits, torch.randn(6, *features.shape))
    decoded, records = through_a_record(layout, output)
    decoded, found = decoded if features is None else decoded[0], layout.tensors(records)
    assert {*found} == {
        "coarse",
        *(("logits", "classes", "residual") if top_k else ()),
        *(("features",) if features else ()),
    }
    found = {name: torch.from_numpy(values) for name, values in found.items()}
    expected = F.interpolate(found["coarse"], scale_factor=2, mode="bilinear")[..., :7, :5]
    if top_k:
        kept, places = (found[name].permute(0, 3, 1, 2) for name in ("logits", "classes"))
        others = expected.scatter(1, places.long(), -math.inf).logsumexp(1, keepdim=True)
        expected = (expected - others + found["residual"][:, None]).scatter(1, places.long(), kept)
    torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-4)


def test_the_kept_classes_are_the_teachers_in_its_order_and_their_probability_is_half_a_step_from_the_teachers():
    logits = realistic()
    for precision, steps in (("int8", 255), ("int4", 15)):
        layout = PixelLayout(12, 12, 21, 3, precision)
        decoded, records = through_a_record(layout, logits)
        found = {name: torch.from_numpy(values) for name, values in layout.tensors(records).items()}
        kept, classes = logits.topk(3, dim=1)
        assert torch.equal(found["classes"].permute(0, 3, 1, 2).long(), classes)
        rest = logits.scatter(1, classes, -math.inf).logsumexp(1)
        below = kept[:, :1] - torch.cat([kept[:, 1:], rest[:, None] - math.log(18)], dim=1)
        again = -torch.cat([found["logits"][..., 1:], found["residual"][..., None] - math.log(18)], dim=3).permute(
            0, 3, 1, 2
        )
        off = (again.sqrt() - below.sqrt()).abs() * steps / below.amax((1, 2, 3), keepdim=True).sqrt()
        assert 0.4 < off.max() < 0.51 + 2**-10 * steps
        at_them = decoded.scatter(1, classes, -math.inf).logsumexp(1)
        (
            torch.testing.assert_close(at_them, found["residual"], rtol=1e-4, atol=1e-4),
            "the rest has its probability in sum",
        )


def test_a_rest_of_one_class_needs_no_coarse_logits():
    few = realistic(classes=3)
    decoded, _ = through_a_record(PixelLayout(12, 12, 3, 2, "int8"), few)
    assert (few.softmax(1) - decoded.softmax(1)).abs().max() < 0.01


def test_the_coarse_logits_are_those_of_two_by_two_places():
    logits = realistic(side=12).repeat_interleave(2, 2).repeat_interleave(2, 3)[..., :23, :]
    decoded, _ = through_a_record(PixelLayout(23, 24, 21, 0, "int8"), logits)
    inner = decoded[..., 1:-1:2, 1:-1:2] + decoded[..., 2::2, 1:-1:2][..., :11, :]
    assert inner.shape[1] == 21 and decoded.shape == logits.shape
    corner = (logits - logits.amax(1, keepdim=True))[..., 0, 0]
    torch.testing.assert_close(
        decoded[..., 0, 0] - decoded[..., 0, 0].amax(1, keepdim=True), corner, rtol=0.02, atol=0.05
    )


@pytest.mark.parametrize(("temperature", "bound"), [(1.0, 0.01), (2.0, 0.15)])
def test_the_loss_from_the_kept_answers_is_close_to_that_from_the_teacher(temperature, bound):
    """Scaled up to the pixels, as training has it; more that is kept loses less."""
    logits = realistic(side=32)
    logits = logits + 6 * F.one_hot(logits.argmax(1), 21).permute(0, 3, 1, 2)  # edges

    def upsampled(coarse: torch.Tensor) -> torch.Tensor:
        return F.interpolate(coarse, (64, 64), mode="bilinear")

    student = (0.6 * upsampled(F.avg_pool2d(logits, 3, 1, 1))).requires_grad_()
    exact, errors = temperature_kl(student, upsampled(logits), temperature), {}
    gradient = torch.autograd.grad(exact, student)[0]
    for top_k, precision in ((0, "int4"), (1, "int4"), (3, "int4"), (3, "int8")):
        decoded, _ = through_a_record(PixelLayout(32, 32, 21, top_k, precision), logits)
        loss = temperature_kl(student, upsampled(decoded), temperature)
        moved = (torch.autograd.grad(loss, student)[0] - gradient).norm() / gradient.norm()
        errors[top_k, precision] = (abs(loss / exact - 1).item(), moved.item())
    assert errors[1, "int4"][0] < bound and errors[1, "int4"][1] < 0.1
    assert errors[3, "int8"][1] < errors[3, "int4"][1] < errors[1, "int4"][1] < errors[0, "int4"][1] / 3


def test_the_default_takes_a_tenth_of_the_same_logits_in_fp16_where_classes_are_many():
    places = 128 * 128
    sizes = {
        (classes, top_k): PixelLayout(128, 128, classes, top_k, "int4").size
        for classes in (5, 19, 150)
        for top_k in (0, 1)
    }
    assert sizes[19, 1] == places * (19 + 4 + 5) // 8 + 8 and sizes[5, 0] == places * 5 // 8 + 8
    smaller = {key: 2 * key[0] * places / size for key, size in sizes.items()}
    assert all(smaller[classes, 0] > 15.9 for classes in (5, 19, 150))
    assert smaller[19, 1] > 10 and smaller[150, 1] > 14 and smaller[5, 1] > 6


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_a_record_cannot_hold_are_refused_with_the_fix(value):
    layout, logits = PixelLayout(2, 2, 4, 1, "int4"), torch.ones(2, 4, 2, 2)
    logits[1, 2, 1, 1] = value
    with pytest.raises(
        ValueError, match="logits of pixels that are not finite, .*: set teacher_precision to bf16 or fp32"
    ):
        layout.encode(layout.pack(logits).numpy())
