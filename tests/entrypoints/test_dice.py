"""The Dice loss against its formula in plain loops, and against segmentation-models-pytorch's."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from training.tasks.losses import dice_loss, dice_sums

from tests.entrypoints.ranks import run_ranks

LOGITS = torch.tensor(np.round(4 * np.sin(1 + 2 * np.arange(120)), 3).reshape(2, 3, 4, 5))
MASKS = torch.tensor((np.arange(40) * 7 % 11 % 3).reshape(2, 4, 5))
WITH_IGNORED = MASKS.clone()
WITH_IGNORED[0, 0], WITH_IGNORED[1, :, 4] = 255, 255


def loss(logits: torch.Tensor, masks: torch.Tensor, ignore_index: int = 255) -> torch.Tensor:
    return dice_loss(dice_sums(logits, masks, ignore_index))


def by_loops(logits: torch.Tensor, masks: torch.Tensor, ignore_index: int) -> float:
    """Pixel by pixel in Python's numbers."""
    images, classes, height, width = logits.shape
    both, predicted, labelled = ([0.0] * classes for _ in range(3))
    for image, row, column in np.ndindex(images, height, width):
        label = masks[image, row, column].item()
        if label == ignore_index:
            continue
        exponents = [math.exp(value) for value in logits[image, :, row, column].tolist()]
        for number, exponent in enumerate(exponents):
            predicted[number] += exponent / sum(exponents)
        both[label] += exponents[label] / sum(exponents)
        labelled[label] += 1
    losses = [1 - 2 * both[c] / (predicted[c] + labelled[c]) for c in range(classes) if labelled[c]]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("masks", [MASKS, WITH_IGNORED, torch.where(MASKS == 1, 2, MASKS)])
@pytest.mark.parametrize("ignore_index", [255, 0])
def test_it_is_the_formula_over_labelled_pixels_and_the_classes_that_occur(masks, ignore_index):
    masks = torch.where(masks == 255, ignore_index, masks)
    assert loss(LOGITS, masks, ignore_index).item() == pytest.approx(by_loops(LOGITS, masks, ignore_index), rel=1e-12)


@pytest.mark.parametrize(("masks", "expected"), [(torch.where(WITH_IGNORED == 255, 0, WITH_IGNORED), 0.7309231289691298), (WITH_IGNORED, 0.7552695837864113)])  # fmt: skip
def test_it_is_that_of_segmentation_models_pytorch(masks, expected):
    # segmentation_models_pytorch 0.6.0: DiceLoss("multiclass", smooth=0, ignore_index=255), or without, of these in float64
    assert loss(LOGITS, masks).item() == pytest.approx(expected, rel=1e-12)


def test_a_perfect_prediction_has_none_and_a_wrong_one_all_of_it():
    masks = torch.tensor([[[0, 1, 1, 255]]])
    right = 100.0 * torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 0]]]), 2).permute(0, 3, 1, 2)
    assert loss(right, masks).item() == pytest.approx(0, abs=1e-6)
    assert loss(-right, masks).item() == pytest.approx(1, abs=1e-6)


def test_its_gradient_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(lambda logits: loss(logits, WITH_IGNORED), LOGITS.clone().requires_grad_())


@pytest.mark.parametrize("masks", [torch.full((2, 4, 5), 255), torch.zeros(2, 4, 5, dtype=torch.int64)])
def test_absent_classes_and_a_batch_without_labels_leave_finite_gradients(masks):
    logits = (1000 * LOGITS.float()).requires_grad_()
    found = loss(logits, masks)
    found.backward()
    assert math.isfinite(found.item()) and logits.grad.isfinite().all()
    if (masks == 255).all():
        assert found.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_of_many_pixels_are_summed_in_float32(dtype):
    """fp16 ends at 65,504, and bf16 counts to 256."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 400, 500, generator=rng).to(dtype)
    masks = torch.randint(0, 3, (1, 400, 500), generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(logits, masks)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(logits.double(), masks).item(), rel=1e-5)


def test_the_sums_of_parts_add_up_to_those_of_the_whole():
    parts = sum(dice_sums(LOGITS[n : n + 1], WITH_IGNORED[n : n + 1], 255) for n in range(2))
    assert torch.allclose(parts, dice_sums(LOGITS, WITH_IGNORED, 255))


def test_two_ranks_with_unlike_halves_learn_what_one_does_from_the_whole(tmp_path):
    """One rank's half has no label of class 2, and hardly any at all; the loss and DDP's averaged gradient are those of the batch."""
    body = """
        from training.data.batches import MaskedBatch
        from training.distributed.world import World
        from training.tasks.segmentation import Segmentation
        from training.settings.segmentation import SegmentationSettings
        from training.measure.timeline import Timeline

        rng = torch.Generator().manual_seed(0)
        images = torch.randn(4, 1, 6, 6, generator=rng)
        masks = torch.randint(0, 3, (4, 6, 6), generator=rng, dtype=torch.uint8)
        masks[:2][masks[:2] == 2] = 1
        masks[0], masks[1, 1:] = 255, 255
        settings = SegmentationSettings(model="x", classes=3, dice_weight=0.7)

        def learn(world, part):
            torch.manual_seed(1)
            model = nn.Conv2d(1, 3, 3, padding=1)
            trained = nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
            task = Segmentation(trained, None, settings, world, Timeline(world.device))
            [losses] = task(MaskedBatch(images[part], masks[part], *torch.zeros(2, 1)))
            losses["loss"].backward()
            means = {name: (world.all_reduce_sum(value.detach().clone()) / world.size).item() for name, value in losses.items()}
            return [means, model.weight.grad.flatten().tolist()]

        with process_group() as world:
            found = learn(world, slice(2 * world.rank, 2 * world.rank + 2))
        alone = learn(World(0, 1, 0, torch.device("cpu"), "none", "test"), slice(0, 4))
        (out / f"{world.rank}.json").write_text(json.dumps([found, alone]))
    """
    done = run_ranks(tmp_path, body)
    assert [item.returncode for item in done] == [0, 0], done
    for rank in range(2):
        (losses, gradient), (whole_losses, whole_gradient) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(losses) == {"loss", "cross_entropy", "dice_loss"} and losses["dice_loss"] > 0.1
        assert losses == pytest.approx(whole_losses, rel=1e-5)
        assert gradient == pytest.approx(whole_gradient, rel=1e-4, abs=1e-6)
