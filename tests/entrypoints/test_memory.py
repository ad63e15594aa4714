"""What a step keeps in memory: counted on models whose bytes can be counted by hand."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training.distributed.world import World
from training.engine import batch_size, memory
from training.engine.memory import Footprint
from training.models.precision import Precision
from training.runtime import failure
from training.settings.distillation import DistillationSettings
from training.settings.scripts import TrainingSettings

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU, "none", "test")
FOUR = World(0, 4, 0, CPU, "gloo", "test")


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


class Trial:
    """Holds what it is given, by images."""

    def __init__(self, held: dict[int, int | None]):
        self.held = held.__getitem__


KEPT = Footprint(weights=100, optimizer=200, average=0, activations=10, teacher_activations=4)


def test_two_small_steps_tell_what_a_step_takes_on_a_gpu():
    trial = Trial({4: 300 + 50 + 4 * 30, 16: 300 + 50 + 16 * 30})
    now, without = memory.as_tried(KEPT, {"zero": replace(KEPT, activations=20)}, trial, 128)
    assert (now.activations, now.teacher_activations, now.workspace) == (30, 12, 50)
    assert now.step(10) == KEPT.step(10) + 50 + 10 * 20 and without["zero"].activations == 60


def test_a_teacher_beside_the_student_takes_memory_of_its_own():
    beside = replace(KEPT, teacher_beside=True)
    assert beside.step(8) == KEPT.step(8) + 8 * 4 and (KEPT.per_image, beside.per_image) == (10, 14)
    assert beside.largest_batch(2000) == (2000 * 0.9 - 400) // 14 < KEPT.largest_batch(2000)


@pytest.mark.parametrize("held", [{4: 470, 16: None}, {4: None, 16: 900}])
def test_a_small_step_that_does_not_fit_leaves_the_prediction(held):
    assert memory.as_tried(KEPT, {}, Trial(held), 128) == (KEPT, {})


def test_a_step_holds_at_least_what_its_forward_pass_keeps():
    """Workspaces may shrink as batches grow."""
    assert memory.as_tried(KEPT, {}, Trial({4: 900, 16: 500}), 128)[0].activations == KEPT.activations


def test_too_few_images_and_losses_of_pairs_are_not_tried():
    assert memory.as_tried(KEPT, {}, Trial({}), 7) == (KEPT, {})
    related = replace(KEPT, pairs=1.0)
    assert memory.as_tried(related, {}, Trial({}), 128) == (related, {})


def test_an_images_activations_are_what_autograd_keeps_of_it():
    """ReLU keeps its output, which is the second Linear's input: 8 numbers; the first keeps the 12 of the image."""
    model, image = flat(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)), torch.rand(1, 3, 2, 2)
    assert memory.activation_bytes(model, image, Precision("fp32", CPU)) == (12 + 8) * 4


def test_bf16_keeps_fewer_bytes_of_an_image():
    model, image = (
        flat(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
        torch.rand(1, 3, 2, 2),
    )
    full, half = (memory.activation_bytes(model, image, Precision(name, CPU)) for name in ("fp32", "bf16"))
    assert full == (12 + 64 + 64) * 4 and half == (12 + 64 + 64) * 2


def test_measuring_changes_neither_buffers_nor_random_numbers():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    image, before, generator = torch.rand(1, 3, 4, 4), model[1].running_mean.clone(), torch.get_rng_state()
    memory.activation_bytes(model, image, Precision("fp32", CPU))
    assert torch.equal(model[1].running_mean, before) and model[1].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), generator)


def test_measuring_leaves_nothing_in_memory():
    """What a function saves of its own output, such as here a ReLU's, would live for ever if it were kept by a hook."""
    model, outputs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), []
    for module in model:
        module.register_forward_hook(lambda _module, _inputs, output: outputs.append(weakref.ref(output)))
    assert memory.activation_bytes(model, torch.zeros(1, 3, 8, 8, dtype=torch.float32), Precision("fp32", CPU))
    assert len(outputs) == 8 and [output() for output in outputs] == [None] * 8


def test_a_teacher_holds_its_widest_layer():
    model = flat(nn.Linear(12, 40), nn.Linear(40, 5))
    assert memory.working_bytes(model, torch.rand(2, 3, 2, 2)) == (12 + 40) * 4


def test_the_optimizers_state_is_shared_by_zero_alone():
    model = nn.Linear(10, 10)
    sizes = [
        memory.optimizer_bytes(model, TrainingSettings(optimizer=name, zero=zero), FOUR)
        for name, zero in (("adamw", False), ("adamw", True), ("sgd", False))
    ]
    assert sizes == [880, 220, 440]


def test_the_largest_batch_fills_what_headroom_leaves_beside_weights_gradients_and_state():
    step = Footprint(weights=100, optimizer=200, average=0, teacher=50, activations=10, teacher_activations=4)
    assert step.fixed == 450
    assert step.largest_batch(1000) == (900 - 450) // 10
    assert step.largest_batch(400) == 0


def test_passes_that_accumulate_beside_ddps_buckets_hold_another_copy_of_the_gradients():
    step = Footprint(weights=100, optimizer=200, average=0, activations=10, share=24)
    assert (step.step(24), step.step(12)) == (400 + 240, 400 + 100 + 120)
    assert replace(step, share=0).step(12) == 400 + 120
    assert step.largest_batch(700) == (630 - 500) // 10
    assert step.largest_batch(720) == 24, "the whole share is one pass, though 15 images that accumulate would not fit"
    assert step.largest_batch(1000) == (900 - 400) // 10
    assert "gradients 0.0 MB, accumulated gradients 0.0 MB" in batch_size.explain(step, {}, 700)[0]
    assert "accumulated" not in batch_size.explain(step, {}, 720)[0]


@pytest.mark.parametrize(("world", "share"), [(ALONE, 0), (FOUR, 24)])
def test_the_share_of_processes_that_exchange_gradients_belongs_to_what_a_step_holds(world, share):
    model = flat(nn.Linear(12, 5))
    state = SimpleNamespace(
        trainable=model,
        model=model,
        world=world,
        settings=TrainingSettings(global_batch_size=96),
        average=None,
        precision=Precision("fp32", CPU),
    )
    image = torch.zeros(1, 3, 2, 2)
    data = SimpleNamespace(collate_training=lambda _: SimpleNamespace(images=image), training={(1, 0): None})
    now, without = memory.measure([state, state], data)
    assert [one.share for one in (now, *without.values())] == [share] * (1 + len(without))


@pytest.mark.parametrize(
    ("asked", "fits", "expected"), [(None, 1, 24), ("auto", 100, 24), ("auto", 10, 8), ("auto", 5, 4), (6, 1, 6)]
)
def test_a_process_takes_whole_parts_of_its_share(asked, fits, expected):
    settings = TrainingSettings(global_batch_size=96, batch_size_per_device=asked)
    assert batch_size.batch_size_per_device(settings, FOUR, fits) == expected


@pytest.mark.parametrize(
    ("values", "fits", "words"),
    [
        ({"global_batch_size": 30}, 1, "global_batch_size 30 is not divisible by 4 processes: 28 or 32"),
        ({"global_batch_size": 96, "batch_size_per_device": "auto"}, 0, "not even one image fits"),
    ],
)
def test_a_batch_that_does_not_divide_or_fit_names_what_does(values, fits, words):
    with pytest.raises(ValueError, match=words):
        batch_size.batch_size_per_device(TrainingSettings(**values), FOUR, fits)


@pytest.mark.parametrize(
    ("fits", "before", "expected", "words"),
    [
        (100, None, 24, "24 (auto)"),
        (100, 8, 8, "8 (auto, as before)"),
        (8, 8, 8, "8 (auto, as before)"),
        (7, 8, 6, "6 (auto): the previous 8 no longer fits"),
        (100, 7, 24, "24 (auto)"),  # no part of this share: the global batch was another
    ],
)
def test_a_run_that_goes_on_takes_the_size_that_it_had_where_it_still_fits(fits, before, expected, words, monkeypatch):
    said: list[str] = []
    settings = TrainingSettings(global_batch_size=24, batch_size_per_device="auto")
    report = SimpleNamespace(log=said.append)
    monkeypatch.setattr(batch_size, "capacity", lambda _: 10_000)
    step = Footprint(weights=0, optimizer=0, average=0, activations=9_000 / fits)
    assert batch_size.choose_batch_size(step, {}, settings, ALONE, report, Trial({}), before) == expected
    assert said[-1].startswith(f"batch_size_per_device: {words}")


def test_the_report_says_what_each_setting_saves_and_what_would_fit_without_it():
    now = Footprint(
        weights=100_000_000, optimizer=50_000_000, average=0, teacher=30_000_000, activations=1e6, teacher_activations=0
    )
    without = {"zero": replace(now, optimizer=200_000_000)}
    first, second = batch_size.explain(now, without, 2_000_000_000)
    assert "weights 100.0 MB, gradients 100.0 MB, optimizer 50.0 MB, teacher 30.0 MB, and 1.0 MB per image" in first
    assert "2.00 GB available: 1,520 images fit at once" in first
    assert "zero saves 150.0 MB" in second and "without it 1,370 would fit" in second


def test_a_process_may_use_its_share_of_the_machines_memory():
    assert 0 < batch_size.capacity(ALONE) < 2**50


def test_bf16_adds_the_copies_that_autocast_makes_of_weights():
    model = flat(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    assert memory.cast_bytes(model, Precision("bf16", CPU)) == (12 * 8 + 8 * 5) * 2
    assert memory.cast_bytes(model, Precision("fp32", CPU)) == 0
    step = Footprint(weights=100, optimizer=0, average=0, activations=10, casts=50)
    assert step.fixed == 250 and step.step(4) == 290


def test_a_full_gpu_is_told_what_to_change_from_what_was_predicted(monkeypatch):
    settings = TrainingSettings(global_batch_size=96, precision="fp32")
    advice = batch_size.when_full(24, 24, 61.2e9, 40_000_000_000, settings)
    assert advice == (
        "A step of 24 images was predicted to take 61.20 GB of 40.00 GB: set batch_size_per_device: 12, or batch_size_per_device: auto, or "
        "zero: true, and resume; or start over with precision: bf16, or a smaller model or image_size"
    )
    monkeypatch.setattr(failure, "progress", failure.Progress(out_of_memory=advice))
    text = failure.describe(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.17 GiB"), "3")
    assert f"cause: the GPU's memory is full. {advice}" in text


def test_a_teacher_with_a_stream_can_go_without():
    settings = DistillationSettings(
        student="x", batch_size_per_device="auto", zero=True, copy_stream=True, teacher_stream=True
    )
    assert ": set teacher_stream: false, and resume;" in batch_size.when_full(1, 8, 1e9, 10**9, settings)


def test_nothing_is_left_to_change_but_the_model():
    settings = TrainingSettings(batch_size_per_device="auto", precision="bf16", zero=True)
    advice = batch_size.when_full(1, 8, 1e9, 10**9, settings)
    assert advice.endswith(": resume on a larger device; or start over with a smaller model or image_size")
