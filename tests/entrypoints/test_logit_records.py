"""Records of a teacher's logits: what is kept is what the teacher said, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training.teacher.bits import packed_bits, unpacked_bits
from training.teacher.label_bank import Seal
from training.teacher.logit_records import RecordLayout


def realistic_logits(images: int = 64, classes: int = 1000) -> torch.Tensor:
    """As ImageNet models give them: one or a few classes stand out of a bell of many others."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(images, classes, generator=draw)
    for height in (12.0, 8.0, 6.0, 5.0):
        place, share = torch.randint(classes, (images, 1), generator=draw), torch.rand(images, 1, generator=draw)
        logits.scatter_add_(1, place, height * (0.6 + 0.4 * share))
    return logits


def through_a_record(logits: torch.Tensor, top_k: int | None, precision: str = "fp32") -> torch.Tensor:
    layout = RecordLayout(logits.shape[1], top_k, precision)
    packed = layout.pack(logits)
    decoded = layout.decode(layout.encode(packed.numpy()), logits.device)
    assert torch.equal(layout.rounded(packed), decoded), "the first time they are what a record gives later"
    return decoded


def test_at_temperature_one_the_kept_classes_and_the_rest_in_sum_have_the_teachers_probability():
    logits = realistic_logits()
    decoded = through_a_record(logits, 10)
    largest = logits.topk(10).indices
    assert torch.equal(decoded.gather(1, largest), logits.gather(1, largest))
    torch.testing.assert_close(
        decoded.softmax(1).gather(1, largest), logits.softmax(1).gather(1, largest), rtol=1e-5, atol=1e-7
    )
    rest = decoded.scatter(1, largest, -torch.inf)
    assert all(row[row > -torch.inf].unique().numel() == 1 for row in rest), "the rest is even"


def test_another_temperature_costs_little_with_many_classes_kept_and_nothing_with_all():
    """The even tail weighs the most that it can at T > 1, so that the kept classes get too little, never too much."""
    logits = realistic_logits()
    largest = logits.topk(10).indices
    for temperature, bounds in {
        2: {10: 0.12, 100: 0.07, 500: 0.015, None: 1e-6},
        4: {10: 0.04, 100: 0.025, 500: 0.006, None: 1e-6},
    }.items():
        true = (logits / temperature).log_softmax(1)
        errors = []
        for top_k, bound in bounds.items():
            cached = (through_a_record(logits, top_k) / temperature).log_softmax(1)
            errors.append(F.kl_div(cached, true, reduction="batchmean", log_target=True).item())
            assert errors[-1] < bound, (temperature, top_k)
            assert (cached.gather(1, largest) <= true.gather(1, largest) + 1e-5).all()
        assert errors == sorted(errors, reverse=True) and errors[0] > 1e-3


def test_one_class_less_than_all_loses_nothing():
    logits = realistic_logits(classes=7)
    torch.testing.assert_close(through_a_record(logits, 6), logits, rtol=0, atol=1e-5)


def test_fp16_holds_a_bf16_teachers_logits_as_they_are_and_others_to_eleven_bits():
    logits = 10 * realistic_logits()
    rounded = logits.bfloat16().float()
    rounded[rounded.abs() < 1e-4] = 0
    assert torch.equal(through_a_record(rounded, None, "fp16"), rounded)
    torch.testing.assert_close(through_a_record(logits, None, "fp16"), logits, rtol=2**-11, atol=1e-7)
    assert torch.equal(through_a_record(logits, None, "fp32"), logits)


def test_more_than_65536_classes_keep_their_numbers():
    logits = torch.zeros(1, 70_000)
    logits[0, [69_999, 65_536, 3]] = torch.tensor([9.0, 8.0, 7.0])
    decoded = through_a_record(logits, 3, "fp16")
    assert decoded[0].topk(3).indices.tolist() == [69_999, 65_536, 3]


@pytest.mark.parametrize("top_k", [3, None])
@pytest.mark.parametrize(
    ("value", "precision"),
    [
        *((torch.nan, precision) for precision in ("fp32", "fp16", "int8", "int4")),
        *((torch.inf, precision) for precision in ("fp32", "int8")),
        *((-70_000.0, "fp16"), (70_000.0, "fp16"), (70_000.0, "int8")),
    ],
)
def test_logits_that_a_record_cannot_hold_are_refused_with_the_fix(value, precision, top_k):
    logits = torch.full((2, 4), 1.0)
    logits[1, : 3 if value < 0 else 1] = value
    with pytest.raises(ValueError, match="not finite, or beyond what .* set teacher_precision to bf16 or fp32"):
        through_a_record(logits, top_k, precision)


def test_a_rest_of_impossible_classes_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        through_a_record(torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]]), 2)


def test_a_checksum_breaks_with_any_bit_and_holds_at_no_other_place():
    layout = RecordLayout(12, 3, "fp16")
    seal, numbers = Seal(b"key", layout.size), np.arange(4)
    records = layout.encode(layout.pack(realistic_logits(4, 12)).numpy())
    seal.close(records, numbers, 1)
    assert seal.holds(records, numbers, 1).all()
    for bit in range(layout.size * 8):
        damaged = records.copy()
        damaged[:, bit // 8] ^= 1 << bit % 8
        assert not seal.holds(damaged, numbers, 1).any(), bit
    assert not seal.holds(records, numbers[::-1].copy(), 1).any()
    assert not seal.holds(records, numbers, 2).any()
    assert not Seal(b"another", layout.size).holds(records, numbers, 1).any()
    for weight in ("_start", "_index", "_view"):  # the rng of 2**-32 that a record of zeros has the checksum zero
        setattr(seal, weight, np.uint64(0))
    assert not seal.holds(np.zeros_like(records), numbers, 1).any()


# --- quantised


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("classes", [2, 10, 257, 1000])
@pytest.mark.parametrize("top_k", [1, 7, None])
def test_the_first_use_of_logits_equals_every_later_one_bit_for_bit(classes, top_k, precision):
    """At any size of logits, where all are equal, and where one stands out."""
    top_k = None if top_k is None or top_k >= classes else top_k
    logits = realistic_logits(32, classes) * torch.logspace(-6, 3, 32)[:, None]
    logits[0], logits[1] = 3.3, 0.0
    logits[2, 0] = 6e4
    through_a_record(logits, top_k, precision)


@pytest.mark.parametrize(("precision", "steps"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("top_k", [10, None])
def test_a_quantised_logit_is_half_a_step_from_the_teachers_and_the_largest_is_exact_beside_the_rest(
    precision, steps, top_k
):
    logits = realistic_logits()
    decoded = through_a_record(logits, top_k, precision)
    kept = logits.topk(top_k or 1000)
    distances = kept.values[:, :1] - kept.values
    found = decoded.max(1, keepdim=True).values - decoded.gather(1, kept.indices)
    step = distances.max(1, keepdim=True).values / steps
    assert ((found - distances).abs() <= step * (0.5 + 2e-3 * steps / 2)).all() and (found[:, 0] == 0).all()
    if top_k is not None:
        others = decoded.scatter(1, kept.indices, -torch.inf).logsumexp(1)
        expected = logits.scatter(1, kept.indices, -torch.inf).logsumexp(1)
        torch.testing.assert_close(others - decoded.amax(1), expected - logits.amax(1), rtol=1e-3, atol=1e-3)


def test_logits_that_all_are_one_keep_their_value():
    alike = torch.full((2, 9), -1.5)
    assert torch.equal(through_a_record(alike, None, "int4"), alike)
    torch.testing.assert_close(through_a_record(alike, 3, "int4"), alike, rtol=0, atol=1e-3)


def test_ten_of_a_thousand_logits_take_a_fiftieth_of_all_in_fp16():
    sizes = {precision: RecordLayout(1000, 10, precision).size for precision in ("fp32", "fp16", "int8", "int4")}
    assert sizes == {"fp32": 64, "fp16": 44, "int8": 36, "int4": 28}, "2,000 bytes are all of them in fp16"


@pytest.mark.parametrize("bits", [1, 4, 5, 8, 10, 17, 24])
def test_numbers_of_few_bits_lie_one_behind_the_other(bits):
    numbers = np.random.RandomState(bits).randint(0, 2**bits, (5, 13)).astype(np.uint32)
    numbers[0], numbers[1] = 0, 2**bits - 1
    packed = packed_bits(numbers, bits)
    assert packed.shape == (5, -(-13 * bits // 8)) and np.array_equal(unpacked_bits(packed, 13, bits), numbers)
    written_out = "".join(f"{number:0{bits}b}"[::-1] for number in numbers[2])
    assert packed[2, 0] == int(written_out[:8].ljust(8, "0")[::-1], 2)
