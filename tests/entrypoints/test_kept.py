"""Held-out batches are decoded once, where memory has room for them."""

from __future__ import annotations

import torch
from training.data.kept import KeptBatches, budget


class Loader:
    """Two batches of 100 bytes and an empty one, counted."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        yield torch.full((10, 10), 1, dtype=torch.uint8), torch.tensor([])
        yield None
        yield torch.full((10, 10), 2, dtype=torch.uint8), torch.tensor([])


def values(batches: KeptBatches) -> list[int | None]:
    return [None if batch is None else int(batch[0][0, 0]) for batch in batches]


def test_later_passes_find_the_same_batches_in_memory():
    loader = Loader()
    batches = KeptBatches(loader, 200)
    assert [values(batches) for _ in range(3)] == [[1, None, 2]] * 3 and loader.passes == 1


def test_what_takes_more_than_its_budget_is_made_anew():
    loader = Loader()
    batches = KeptBatches(loader, 199)
    assert [values(batches) for _ in range(2)] == [[1, None, 2]] * 2 and loader.passes == 2


def test_a_pass_that_was_left_keeps_nothing():
    loader = Loader()
    batches = KeptBatches(loader, 200)
    next(iter(batches))
    assert values(batches) == [1, None, 2] and values(batches) == [1, None, 2] and loader.passes == 2


def test_nothing_of_a_workers_shared_memory_is_kept():
    shared = torch.ones(3).share_memory_()
    batches = KeptBatches([[shared]], 100)
    list(batches)
    [[kept]] = batches
    assert not kept.is_shared() and torch.equal(kept, shared)


def test_each_process_of_a_host_keeps_its_share(monkeypatch):
    alone = budget()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert 0.9 < 8 * budget() / alone < 1.1
