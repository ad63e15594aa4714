"""The order of images in shards: every image once, nearly sequential, the same at any number of ranks, partners together."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from training.data.batches import TrainingBatches
from training.data.mixing import partners
from training.data.orders import FreeOrder, JointOrder, ShardOrder, of_epoch, of_view
from training.distributed.world import World


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


def draws(order: ShardOrder, ranks: int, *, epoch: int = 1, first: int = 0, batch: int = 16, **values) -> list[list]:
    """What all ranks draw together, step by step, in the order of the ranks."""
    parts = []
    for rank in range(ranks):
        batches = TrainingBatches(order.epoch_images, batch, world(rank, ranks), 5, order=order, **values)
        batches.start(epoch, first)
        parts.append(list(batches))
    count = len(parts[0]) // (len(batches) - first) if len(batches) > first else 1
    return [
        sum((part for rank in parts for part in rank[at : at + count]), []) for at in range(0, len(parts[0]), count)
    ]


COUNTS = [
    [7, 12, 9, 1, 20, 13, 8, 11, 5, 14, 6, 10, 9],  # of all sizes
    [40],
    [25, 25, 25],
    [0, 30, 0, 31],
]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("window", [1, 3, 32])
def test_a_view_holds_every_image_once_and_an_epoch_its_first_ones(counts, window):
    order = ShardOrder(np.array(counts), window)
    view = of_view(order, 5, 2)
    assert sorted(view.tolist()) == list(range(sum(counts)))
    for epoch in (2, 4):
        drawn = of_epoch(order, 5, 2, epoch, sum(counts) // 8, 8)
        assert sorted(drawn.ravel().tolist()) == sorted(view[: drawn.size].tolist())


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (4, 2), (8, 1)])
def test_global_batches_are_the_same_at_any_world_size_also_after_a_stop_within_an_epoch(ranks, accumulation):
    order = ShardOrder(np.array(COUNTS[0]), 4)
    whole = draws(order, 1, epoch=3)
    assert draws(order, ranks, epoch=3, accumulation=accumulation) == whole
    resumed = whole[:3] + draws(order, ranks, epoch=3, first=3, accumulation=accumulation)
    numbers = [number for step in resumed for _, number in step]
    assert resumed == whole and len(numbers) == len(set(numbers)) == 125 // 16 * 16


@pytest.mark.parametrize("batch", [16, 24, 6])
def test_partners_come_in_one_batch_also_when_a_view_is_drawn_again(batch):
    order = ShardOrder(np.array([16] * 12), 6)
    for epoch in (1, 2, 5):
        other = partners(order, 5, 1)
        steps = draws(order, 1, epoch=epoch, batch=batch, views=1)
        assert sum(len(step) for step in steps) == 192 // batch * batch
        for step in steps:
            numbers = {number for _, number in step}
            assert all(int(other[number]) in numbers for number in numbers)
    first, again = (draws(order, 1, epoch=epoch, views=1) for epoch in (1, 2))
    assert first != again and sorted(map(sorted, first)) != sorted(map(sorted, again))


def test_images_of_few_shards_are_read_at_a_time_and_each_shard_in_one_stretch():
    counts = np.full(64, 100)
    order, shard_of = ShardOrder(counts, 16), np.repeat(np.arange(64), counts)
    shards = shard_of[of_epoch(order, 0, 1, 1, 200, 32)]
    assert max(len(np.unique(shards[at : at + 5])) for at in range(195)) <= 3 * 16
    for shard in range(64):
        steps = np.flatnonzero((shards == shard).any(axis=1))
        assert steps[-1] - steps[0] < 55, "a window of 16 shards of 100 images is 50 steps of 32"
    assert len(np.unique(shards[:10])) == 16 and (np.diff(np.unique(shards[:10])) != 1).any(), (
        "shuffled among each other"
    )


@pytest.mark.parametrize(("ranks", "most"), [(1, 64), (2, 33), (4, 17), (8, 9), (16, 9)])
def test_a_rank_reads_its_part_of_the_shards(ranks, most):
    counts = np.full(64, 100)
    order, shard_of = ShardOrder(counts, 16), np.repeat(np.arange(64), counts)
    shards = shard_of[of_epoch(order, 0, 1, 1, 200, 32)].reshape(200, ranks, -1)
    assert max(len(np.unique(shards[:, rank])) for rank in range(ranks)) <= most


def test_views_epochs_and_seeds_differ_and_the_order_is_settled_for_ever():
    order = ShardOrder(np.array([5, 4, 6]), 2)
    found = {tuple(of_epoch(order, seed, view, epoch, 2, 6).ravel().tolist()) for seed, view, epoch in
             [(0, 1, 1), (0, 2, 2), (0, 1, 3), (1, 1, 1)]}  # fmt: skip
    assert len(found) == 4
    settled = [10, 12, 1, 3, 13, 9, 14, 11, 7, 8, 2, 0, 6, 5, 4]
    assert of_view(order, 3, 1).tolist() == settled, (
        "numpy, or this code, shuffles otherwise: checkpoints go on elsewhere"
    )


def shards_of(count: int, images: int) -> ShardOrder:
    return ShardOrder(np.full(count, images), 3)


JOINT = [
    (FreeOrder(20), FreeOrder(50), 24),
    (FreeOrder(21), FreeOrder(51), 25),
    (FreeOrder(1), FreeOrder(40), 40),
    (FreeOrder(30), FreeOrder(1), 1),
    (FreeOrder(16), shards_of(9, 11), 33),
    (shards_of(4, 7), shards_of(9, 11), 99),
    (shards_of(4, 7), FreeOrder(90), 9),
]


@pytest.mark.parametrize(("labelled", "others", "part"), JOINT)
def test_a_view_of_two_kinds_holds_all_of_one_and_the_next_part_of_the_other(labelled, others, part):
    order, own = JointOrder(labelled, others, part), labelled.epoch_images
    seen = []
    for view in range(1, 2 * (others.epoch_images // part) + 1):
        found = of_view(order, 5, view)
        assert sorted(found.tolist()) == list(range(own + others.epoch_images))
        drawn = found[: order.epoch_images]
        assert sorted(drawn[drawn < own].tolist()) == list(range(own))
        seen.append(drawn[drawn >= own].tolist())
        assert len(seen[-1]) == part
    turns = [sum(seen[at : at + others.epoch_images // part], []) for at in (0, len(seen) // 2)]
    assert all(len(set(turn)) == len(turn) for turn in turns), "none comes again before the others had their turn"
    assert turns[0] != turns[1] or part == others.epoch_images == 1


@pytest.mark.parametrize(("labelled", "others", "part"), JOINT)
def test_every_batch_of_two_kinds_and_every_rank_has_its_part_of_either(labelled, others, part):
    order, own = JointOrder(labelled, others, part), labelled.epoch_images
    batch = 8
    share = own / order.epoch_images
    for epoch in (1, 2, 3):
        steps = of_epoch(order, 5, 1, epoch, order.epoch_images // batch, batch)
        assert sorted(steps.ravel().tolist()) == sorted(of_view(order, 5, 1)[: steps.size].tolist())
        assert np.abs((steps < own).sum(axis=1) - share * batch).max() < 4, "two pairs, at the most"
        halves = (steps < own).reshape(-1, 2, batch // 2).sum(axis=2)
        assert np.abs(halves[:, 0] - halves[:, 1]).max() <= 2, "a pair"


@pytest.mark.parametrize(("labelled", "others", "part"), JOINT)
def test_partners_are_of_one_kind_and_in_one_batch(labelled, others, part):
    order, own = JointOrder(labelled, others, part), labelled.epoch_images
    other = partners(order, 5, 1)
    for epoch in (1, 2):
        for step in of_epoch(order, 5, 1, epoch, order.epoch_images // 4, 4):
            there = set(step.tolist())
            pairs = [(number, int(other[number])) for number in there]
            if own % 2 == 0 and part % 2 == 0:
                assert all(partner in there and (number < own) == (partner < own) for number, partner in pairs)
            else:
                assert sum((number < own) != (partner < own) for number, partner in pairs) <= 2


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (4, 2)])
def test_batches_of_two_kinds_are_the_same_at_any_world_size(ranks, accumulation):
    order = JointOrder(FreeOrder(40), shards_of(12, 13), 90)
    for views in (None, 2):
        whole = draws(order, 1, epoch=3, views=views)
        resumed = whole[:3] + draws(order, ranks, epoch=3, first=3, accumulation=accumulation, views=views)
        assert resumed == whole and draws(order, ranks, epoch=3, accumulation=accumulation, views=views) == whole


def test_the_order_of_two_kinds_is_settled_for_ever():
    found = of_epoch(JointOrder(FreeOrder(4), shards_of(3, 4), 4), 3, 2, 5, 2, 4)
    assert found.tolist() == [[3, 0, 10, 8], [2, 1, 15, 14]], (
        "numpy, or this code, shuffles otherwise: checkpoints go on elsewhere"
    )


def test_a_million_images_are_ordered_in_bounded_memory():
    order = ShardOrder(np.full(300, 3334), 32)
    batches = TrainingBatches(order.epoch_images, 1024, world(1, 4), 0, order=order)
    tracemalloc.start()
    peaks = []
    for epoch in range(1, 4):
        batches.start(epoch)
        assert sum(len(batch) for batch in batches) == 1_000_200 // 1024 * 256
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1 << 20 and max(peaks) < 200 << 20 and max(peaks) < 1.1 * peaks[0]


@pytest.mark.parametrize(
    "counts", [[1000] * 10, [1000, 9000], [10_000] * 2 + [1000] * 6, [500, 1500, 40, 2000]], ids=str
)
def test_shards_of_any_number_and_size_are_mixed_through_the_whole_epoch(counts):
    """As one shard a class, whose channel nobody shuffled before: the last fifth of an epoch showed 4 of 10 classes."""
    order, shard_of = ShardOrder(np.array(counts), 32), np.repeat(np.arange(len(counts)), counts)
    batch = 20
    steps = sum(counts) // batch
    shards = shard_of[of_epoch(order, 0, 1, 1, steps, batch)].ravel()
    for tenth in np.array_split(shards, 10):
        found = np.bincount(tenth, minlength=len(counts)) / len(tenth)
        assert found == pytest.approx(np.array(counts) / sum(counts), abs=0.06)
