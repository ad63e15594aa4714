"""Loader processes: the batches of a DataLoader in shared memory, none of them overwritten while it is used."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from training.data.loaders import open_loaders
from training.data.shared_ring import ALIGNMENT, Placed, Ring, SlotWriter, slot_bytes_for, unpack
from training.data.threads import AHEAD
from training.data.views import open_data
from training.settings.scripts import LabelledImageSettings

from .numbered_images import Numbers, batches_of, loader, processes
from .photographs import labelled
from .test_threads import IMAGES, world

SLOTS = AHEAD + 1
"""Of the ring of one process on a CPU."""

SEVERAL = [1, 3]
"""Processes."""


class Masks(Numbers):
    """Each with a mask of its own size."""

    def __getitem__(self, draw: tuple[int, int]):
        image, number = super().__getitem__(draw)
        return image, torch.full((number + 1, 3), number, dtype=torch.uint8)


def collate_masks(items, images):
    return [images, [mask for _, mask in items]]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = processes()  # of a test that failed, whose traceback keeps its loader
    yield
    gc.collect()
    assert [process for process in processes() if process not in before] == []


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    return labelled(tmp_path_factory.mktemp("photographs"), IMAGES)


# -- its batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "micro"), [(1, 6), (3, 2), (9, 2)])
def test_it_gives_the_batches_of_a_data_loader_in_its_order_from_any_step_on(photographs, threads, micro):
    def seen(workers: int) -> list[list[torch.Tensor]]:
        chosen = LabelledImageSettings(
            image_size=32, global_batch_size=6, min_crop_area=0.3, mixup=0.5, seed=3, num_workers=workers, worker_type="loader"
        )  # fmt: skip
        data = open_data(photographs / "train", photographs / "validation", chosen, 3)
        made = open_loaders(data, chosen, world(), batch_size_per_device=micro, views=3)
        found = []
        for epoch, step in ((1, 0), (2, 2), (4, 0)):
            made.train_batches.start(epoch, step)
            found += [[values.clone() for values in batch] for batch in made.train]
            found += [[*batch] for batch in made.validation]
        return found

    expected, found = seen(0), seen(threads)
    assert len(found) == len(expected) == (3 + 1 + 3) * 6 // micro + 3 * -(-IMAGES // micro)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(one, other, strict=True))
        assert other[0].is_contiguous()


@pytest.mark.parametrize("count", SEVERAL)
def test_a_batch_stays_as_it_is_while_it_is_used(count):
    """Every slot is in use then: the others hold the batches that are made ahead."""
    for number, (images, labels) in enumerate(loader(Numbers(), batches_of(*[4] * 9 * SLOTS), count)):
        time.sleep(0.01)
        assert labels.tolist() == [*range(4 * number, 4 * number + 4)]
        assert images[:, 0, 7, 7].tolist() == labels.tolist()
    assert number == 9 * SLOTS - 1


@pytest.mark.parametrize("count", SEVERAL)
def test_after_the_first_batches_all_lie_in_one_memory_and_none_is_copied_out_of_it(count):
    places = [address(images) for images, _ in loader(Numbers(), batches_of(*[4] * 20), count)]
    assert len({*places[AHEAD + 1 :]}) == 1
    owned = [*loader(Numbers(), batches_of(*[4] * 20), count, zero_copy=False)]
    assert len({address(images) for images, _ in owned}) == 20
    assert [labels[0].item() for _, labels in owned] == [*range(0, 80, 4)], "copies stay what they were"


def test_what_is_read_on_the_cpu_may_be_read_after_its_step(photographs):
    chosen = LabelledImageSettings(image_size=32, global_batch_size=2, num_workers=1, worker_type="loader")
    data = open_data(photographs / "train", photographs / "validation", chosen, 3)
    made = open_loaders(data, chosen, world(), batch_size_per_device=2)
    kept, seen = [], []
    for batch in made.train:
        kept.append((batch.indices, batch.views))
        seen.append((batch.indices.tolist(), batch.views.tolist()))
    assert [(indices.tolist(), views.tolist()) for indices, views in kept] == seen and len(seen) == IMAGES // 2


def test_batches_that_are_larger_than_a_slot_or_smaller_come_whole():
    sizes = (2, 2, 2, 2, 30, 1, 2, 40, 2, 2)
    made = [(images.clone(), labels.clone()) for images, labels in loader(Numbers(), batches_of(*sizes))]
    assert [len(images) for images, _ in made] == [len(labels) for _, labels in made] == [*sizes]
    assert torch.cat([images[:, 0, 0, 0] for images, _ in made]).tolist() == [*range(sum(sizes))]


def test_what_is_nested_in_a_batch_comes_in_its_own_sizes():
    for number, (images, masks) in enumerate(
        loader(Masks(), batches_of(*[2] * 12), zero_copy=False, collate=collate_masks)
    ):
        assert images.shape == (2, 1, 20, 20)
        assert [mask.shape for mask in masks] == [(2 * number + 1, 3), (2 * number + 2, 3)]
        assert [mask.unique().tolist() for mask in masks] == [[2 * number], [2 * number + 1]]


def test_images_that_are_left_out_leave_smaller_batches_or_none():
    absent = (1, 16, 17, 18, 21)
    made = [
        None if batch is None else (batch[0][:, 0, 0, 0].tolist(), batch[1].tolist())
        for batch in loader(Numbers(absent=absent), batches_of(*[3] * 8))
    ]
    assert made[5] == ([15], [15]) and made[6] == ([19, 20], [19, 20]) and made[7] == ([22, 23], [22, 23])
    assert made[0] == ([0, 2], [0, 2]) and made[1] == ([3, 4, 5], [3, 4, 5])
    assert [*loader(Numbers(absent=(0, 1, 2, 3)), batches_of(2, 2, 1))][:2] == [None, None]


@pytest.mark.parametrize("count", SEVERAL)
def test_no_more_batches_are_asked_for_than_are_soon_used(count):
    taken, batches = [], batches_of(*[2] * 40)
    made = iter(loader(Numbers(), (taken.append(number) or batch for number, batch in enumerate(batches)), count))
    for number in range(40):
        next(made)
        ahead = AHEAD * count if number else AHEAD  # before there is a ring they travel by themselves
        assert len(taken) == min(40, number + 1 + ahead)


# -- the ring ----------------------------------------------------------------------------------------------------------


def test_a_slot_holds_what_has_room_and_the_rest_travels():
    ring = Ring(2, 4 * ALIGNMENT)
    writer = SlotWriter(ring.slot(1))
    images = writer.empty((2, 3, 8), torch.uint8)
    images.fill_(7)
    batch = [images, torch.tensor([1.5, 2.5]), "name", torch.arange(100)]
    packed = writer.pack(batch)
    assert packed[0] == Placed(torch.uint8, (2, 3, 8), 0) and packed[1].offset == ALIGNMENT
    assert packed[2] == "name" and isinstance(packed[3], np.ndarray)
    other = Ring(2, 4 * ALIGNMENT, ring.file)  # as the other process maps it
    found = unpack(packed, other.slot(1), lambda values: values, torch.neg)
    assert torch.equal(found[0], images) and address(found[0]) == address(other.bytes) != address(images)
    assert torch.equal(found[1], batch[1]) and torch.equal(found[3], -batch[3]) and found[2] == "name"
    assert not ring.slot(0).any(), "another slot stays as it was"
    os.close(ring.file)


def test_tensors_of_every_layout_and_type_come_as_they_are():
    ring = Ring(1, 64 * ALIGNMENT)
    values = [
        torch.tensor([True, False]),  # two bytes, so that what comes next would not begin at a multiple of its own size
        torch.arange(24).view(4, 6).t(),
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(3, 5).half(),
    ]
    found = unpack(SlotWriter(ring.slot(0)).pack(values), ring.slot(0), torch.clone, torch.neg)
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(values, found, strict=True))
    os.close(ring.file)


def test_a_slot_is_as_large_as_a_batch_with_a_quarter_to_spare():
    batch = [torch.zeros(1000, dtype=torch.uint8), [torch.zeros(10), None]]
    assert slot_bytes_for(batch) == -(-1.25 * (1040 + 2 * ALIGNMENT) // ALIGNMENT) * ALIGNMENT
