"""Batches: the same order at any number of processes, from any step on, whatever fits a device; every held-out image once."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate
from training.data.batches import EvaluationBatches, TrainingBatches, share_of_batch, views_of
from training.data.loaders import Data, Loaders, held_out_loader, open_loaders
from training.data.orders import FreeOrder, of_view
from training.data.workers import Workers
from training.distributed.world import World
from training.settings.scripts import TrainingSettings


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


class Numbers(Dataset):
    """Gives back what is asked for."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw) -> tuple[int, int]:
        return draw


def loaders(images: int = 24, *, workers: int = 0, ranks: tuple[int, int] = (0, 1), micro: int | None = None, **values) -> Loaders:  # fmt: skip
    settings = TrainingSettings(
        **{"global_batch_size": 4, "num_workers": workers, "worker_type": "processes", **values}
    )
    data = Data(["a"], Numbers(images), Numbers(7), default_collate)
    size = micro or settings.global_batch_size // ranks[1]
    return open_loaders(data, settings, world(*ranks), batch_size_per_device=size)


def steps_of(ranks: int, accumulation: int = 1, *, images: int = 50, epoch: int = 2, first: int = 0, **values) -> list:
    """The draws of every optimizer step of all ranks together, in the order of the ranks and of their parts."""
    samplers = [
        TrainingBatches(images, 8, world(rank, ranks), 3, accumulation=accumulation, **values) for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.start(epoch, first)
    shares = []
    for sampler in samplers:
        parts = list(sampler)
        assert len(parts) == (len(sampler) - first) * accumulation
        assert all(len(part) == 8 // ranks // accumulation for part in parts)
        shares.append([sum(parts[at : at + accumulation], []) for at in range(0, len(parts), accumulation)])
    return [sum(step, []) for step in zip(*shares, strict=True)]


def drawn(loader) -> list[tuple[int, int]]:
    return [draw for views, numbers in loader for draw in zip(views.tolist(), numbers.tolist(), strict=True)]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_global_batches_are_the_same_at_any_world_size_and_in_any_number_of_parts(ranks, accumulation):
    steps = steps_of(ranks, accumulation)
    assert steps == steps_of(1)
    assert len(steps) == 6 and len({number for step in steps for _, number in step}) == 48


def test_a_rank_takes_its_part_of_each_batch_in_order():
    whole = steps_of(1)
    second = TrainingBatches(50, 8, world(1, 2), 3, accumulation=2)
    second.start(2)
    assert list(second)[:3] == [whole[0][4:6], whole[0][6:8], whole[1][4:6]]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (4, 2)])
def test_resumed_within_an_epoch_at_another_world_size_the_same_order_goes_on(ranks, accumulation):
    assert steps_of(ranks, accumulation, first=4) == steps_of(2)[4:]
    assert steps_of(ranks, accumulation, first=6) == []


def test_another_epoch_or_seed_is_another_order():
    def order(seed: int, epoch: int) -> tuple:
        return tuple(TrainingBatches(50, 10, world(), seed).indices(epoch).tolist())

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(1, 4)}) == 9
    assert order(0, 1) == order(0, 1)
    assert of_view(FreeOrder(8), 2**32 - 1, 1).tolist() == [3, 7, 1, 6, 0, 5, 4, 2], (
        "numpy, or this code, shuffles otherwise"
    )


def test_the_numbers_of_an_epoch_are_those_that_all_ranks_draw():
    for epoch in (1, 2, 3):
        found = TrainingBatches(50, 8, world(), 3, views=2).indices(epoch)
        assert found.dtype == np.int64
        assert found.tolist() == [number for step in steps_of(2, views=2, epoch=epoch) for _, number in step]


@pytest.mark.parametrize(("ranks", "accumulation", "together"), [(1, 1, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2), (8, 1, 2)])
def test_a_ranks_own_images_are_those_that_it_draws_wherever_it_resumes(ranks, accumulation, together):
    everyones = []
    for rank in range(ranks):
        batches = TrainingBatches(50, 8, world(rank, ranks), 3, accumulation=accumulation, views=2, together=together)
        for first in (0, 4):
            batches.start(2, first)
            own = batches.own_indices(2)
            assert own.dtype == np.int64 and own.shape == (6, accumulation, 8 // ranks // accumulation)
            assert [[index for _, index in part] for part in batches] == [
                *map(list, own[first:].reshape(-1, own.shape[2]))
            ]
        everyones.append(own)
    assert np.unique(everyones).tolist() == sorted(batches.indices(2).tolist())


def test_views_come_round_again():
    assert [[*views_of(epoch, 3)] for epoch in range(1, 8)] == [[1], [2], [3], [1], [2], [3], [1]]
    assert [[*views_of(epoch, None)] for epoch in range(1, 5)] == [[1], [2], [3], [4]]
    assert [[*views_of(epoch, 4, 2)] for epoch in range(1, 6)] == [[1, 2], [1, 2], [3, 4], [3, 4], [1, 2]]
    assert [[*views_of(epoch, None, 3)] for epoch in (3, 4)] == [[1, 2, 3], [4, 5, 6]]
    assert {view for step in steps_of(2, views=3, epoch=5) for view, _ in step} == {2}
    assert {view for step in steps_of(2, epoch=5) for view, _ in step} == {5}


@pytest.mark.parametrize("size", [8, 11])
def test_an_epoch_that_repeats_a_view_draws_the_same_images_in_another_order(size):
    """So what one pass keeps of a view is all that later passes need; without views each epoch leaves out others."""
    batches = TrainingBatches(61, size, world(), 3, views=2)
    assert set(batches.indices(1)) == set(batches.indices(3)) == set(batches.indices(5)) != set(batches.indices(2))
    assert len({tuple(batches.indices(epoch).tolist()) for epoch in (1, 3, 5)}) == 3
    assert all(len(batches.indices(epoch)) == len(set(batches.indices(epoch))) == 61 // size * size for epoch in (1, 3))
    free = TrainingBatches(61, size, world(), 3)
    assert set(free.indices(1)) != set(free.indices(3))


def test_neighbours_stay_together_when_a_view_is_drawn_again():
    batches = TrainingBatches(64, 8, world(), 0, views=1)
    first, again = (batches.indices(epoch).reshape(-1, 2).tolist() for epoch in (1, 2))
    assert sorted(first) == sorted(again) and first != again


@pytest.mark.parametrize(
    ("images", "batch", "ranks", "accumulation", "message"),
    [
        (200, 100, 8, 1, "global_batch_size 100 is not divisible by 8 processes: 96 or 104"),
        (200, 4, 8, 1, "global_batch_size 4 is not divisible by 8 processes: 8$"),
        (200, 96, 8, 5, "12 images of each process do not divide into 5 parts: 4 or 6"),
        (20, 24, 8, 1, "20 training images make no batch of global_batch_size 24: lower it to 16 or less"),
        (5, 8, 8, 1, "5 training images make no batch .*: give at least 8 images, one a process"),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused_with_the_nearest_that_can(images, batch, ranks, accumulation, message):
    with pytest.raises(ValueError, match=message):
        TrainingBatches(images, batch, world(0, ranks), 0, accumulation=accumulation)


@pytest.mark.parametrize(("micro", "valid"), [(5, "4 or 6"), (7, "6 or 12"), (13, "12$")])
def test_a_device_batch_that_does_not_divide_the_share_is_refused_with_the_nearest_that_do(micro, valid):
    message = rf"batch_size_per_device {micro} does not divide the 12 images of each process \(global_batch_size 24 over 2\): {valid}"
    with pytest.raises(ValueError, match=message):
        loaders(global_batch_size=24, ranks=(0, 2), micro=micro)
    with pytest.raises(ValueError, match="is not divisible by 5 processes: 20 or 25"):
        loaders(global_batch_size=24, ranks=(0, 5))
    assert share_of_batch(24, world(1, 3)) == 8


def test_loaders_accumulate_what_a_device_cannot_take_at_once():
    made = loaders(24, global_batch_size=12, ranks=(1, 2), micro=2)
    made.train_batches.start(3)
    assert made.train_batches.accumulation == 3 and len(made.train_batches) == 2
    assert [len(numbers) for _, numbers in made.train] == [2] * 6
    assert [len(numbers) for _, numbers in made.validation] == [2, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_gives_the_epoch_and_step_that_it_was_started_with_whatever_was_read_ahead(workers):
    made, order = loaders(workers=workers), TrainingBatches(24, 4, world(), 0)

    def expected(epoch: int, step: int) -> list:
        return [(epoch, number) for number in order.indices(epoch)[step * 4 :].tolist()]

    for epoch, step in ((1, 0), (2, 3), (2, 5), (3, 0)):
        made.train_batches.start(epoch, step)
        assert drawn(made.train) == expected(epoch, step)
    made.train_batches.start(4)
    left = iter(made.train)
    next(left)  # workers have read ahead by now
    made.train_batches.start(7, 2)
    assert drawn(made.train) == expected(7, 2)
    made.train_batches.start(8)
    begun = iter(made.train)
    made.train_batches.start(9)
    assert next(begun)[0].tolist() == [8] * 4, "an epoch that has begun stays as it is"


def test_loaders_take_nothing_from_the_global_random_numbers():
    """Else a run that is resumed within an epoch would go on with other dropout."""
    made = loaders(workers=1)
    before = torch.random.get_rng_state()
    made.train_batches.start(1)
    assert len(drawn(made.train)) == 24 and len(drawn(made.train)) == 24 and len(drawn(made.validation)) == 7
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_keeps_its_workers_and_an_evaluation_leaves_none():
    def alive() -> set[int]:
        return {process.pid for process in multiprocessing.active_children()}

    others, made = alive(), loaders(workers=2)
    drawn(made.validation)
    assert not alive() - others
    drawn(made.train)
    kept = alive() - others
    drawn(made.validation), drawn(made.train)
    assert alive() - others == kept and len(kept) == 2


@pytest.mark.parametrize(("images", "size", "ranks"), [(10, 4, 3), (7, 3, 4), (1, 8, 2), (12, 4, 1)])
def test_every_held_out_image_comes_exactly_once(images, size, ranks):
    samplers = [EvaluationBatches(images, size, world(rank, ranks)) for rank in range(ranks)]
    draws = [draw for sampler in samplers for batch in sampler for draw in batch]
    assert sorted(draws) == [(0, number) for number in range(images)]
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]


def test_a_held_out_loader_of_its_own_takes_any_batch_size():
    loader = held_out_loader(Numbers(10), 4, Workers("processes", 0), world())
    assert [len(numbers) for _, numbers in loader] == [4, 4, 2]
