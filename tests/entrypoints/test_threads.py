"""Threads that make batches: the same ones as a DataLoader's, in the same order, and nothing left when they are not wanted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from training.data.decode.decoding import BrokenImage
from training.data.loaders import collate_items, open_loaders
from training.data.threads import AHEAD, PerBatchMemo, ThreadedLoader
from training.data.views import open_data
from training.distributed.world import World
from training.settings.scripts import LabelledImageSettings

from .numbered_images import Numbers, batches_of
from .photographs import labelled

ROOT = Path(__file__).parents[2]

IMAGES = 23


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


def settings(threads: int, **values) -> LabelledImageSettings:
    kind = "threads" if threads else "auto"
    common = {"image_size": 32, "global_batch_size": 6, "min_crop_area": 0.3, "mixup": 0.5, "seed": 3}
    return LabelledImageSettings(**{**common, "num_workers": threads, "worker_type": kind, **values})


def data_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data worker")]


def loader(dataset, batches, threads: int = 3) -> ThreadedLoader:
    return ThreadedLoader(dataset, batches, collate_items, threads)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    return labelled(tmp_path_factory.mktemp("photographs"), IMAGES)


@pytest.mark.parametrize(("threads", "micro"), [(1, 6), (3, 2), (8, 1)])
def test_threads_give_the_batches_of_a_data_loader_in_its_order(photographs, threads, micro):
    def seen(chosen: LabelledImageSettings) -> list[list[torch.Tensor]]:
        data = open_data(photographs / "train", photographs / "validation", chosen, 3)
        made = open_loaders(data, chosen, world(), batch_size_per_device=micro, views=3)
        found = []
        for epoch, step in ((1, 0), (2, 2), (4, 0)):
            made.train_batches.start(epoch, step)
            found += [*made.train, *made.validation]
        return [list(batch) for batch in found]

    expected, found = seen(settings(0)), seen(settings(threads))
    assert len(found) == len(expected) == (3 + 1 + 3) * 6 // micro + 3 * -(-IMAGES // micro)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(one, other, strict=True))
        assert other[0].is_contiguous()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_image_comes_once_over_ranks_and_threads_also_after_a_stop(photographs, ranks):
    def seen(rank: int, size: int, first: int, last: int) -> Counter:
        chosen = settings(2)
        data = open_data(photographs / "train", photographs / "validation", chosen, 3)
        made = open_loaders(data, chosen, world(rank, size), batch_size_per_device=6 // size)
        made.train_batches.start(5, first)
        batches = [batch for batch, _ in zip(made.train, range(last - first), strict=False)]
        return Counter(number for batch in batches for number in batch.indices.tolist())

    before = seen(0, 1, 0, 1)
    together = sum((seen(rank, ranks, 1, 3) for rank in range(ranks)), before)
    assert sum(before.values()) == 6 and len(together) == 18 and set(together.values()) == {1}


def test_one_image_is_made_once_for_all_that_ask_at_the_same_time():
    calls, barrier, found = [], threading.Barrier(8), []

    def slow(number: int) -> int:
        calls.append(number)
        if number == 7:
            raise BrokenImage("broken")
        return number * 10

    once = PerBatchMemo(slow)

    def ask() -> None:
        barrier.wait()
        found.append(once(3))
        with pytest.raises(BrokenImage):
            once(7)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [3, 7] and found == [30] * 8


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_fails_in_a_thread_is_raised_where_the_batch_is_awaited_and_ends_the_threads():
    made = iter(loader(Numbers(fails=(9,)), batches_of(4, 4, 4, 4)))
    assert next(made)[1].tolist() == [0, 1, 2, 3] and next(made)[1].tolist() == [4, 5, 6, 7]
    with pytest.raises(BrokenImage, match="image 9 is broken"):
        next(made)
    assert not data_workers()


def test_a_failing_sampler_is_no_end_of_the_epoch():
    def sampler():
        yield from batches_of(2, 2, 2)
        raise OSError("the index is gone")

    with pytest.raises(OSError, match="the index is gone"):
        list(loader(Numbers(), sampler()))
    assert not data_workers()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_abandoned_iteration_leaves_no_thread(taken):
    made = iter(loader(Numbers(), batches_of(*[4] * 50)))
    for _ in range(taken):
        next(made)
    assert len(data_workers()) in ((1, 2, 3) if taken else (0,))
    del made
    gc.collect()
    assert not data_workers()


def test_images_that_are_left_out_leave_smaller_batches_or_none():
    made = list(loader(Numbers(absent=(1, 4, 5, 6)), batches_of(4, 3, 2)))
    assert made[0][1].tolist() == [0, 2, 3] and made[1] is None and made[2][1].tolist() == [7, 8]
    assert made[0][0][:, 0, 0, 0].tolist() == [0, 2, 3] and made[2][0].shape == (2, 1, 20, 20)


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_no_more_batches_are_made_than_are_soon_used():
    taken, batches = [], batches_of(*[2] * 40)
    made = iter(loader(Numbers(), (taken.append(number) or batch for number, batch in enumerate(batches))))
    for number in range(40):
        next(made)
        assert len(taken) <= number + 1 + AHEAD


def in_a_process(text: str, **environ: str) -> subprocess.CompletedProcess:
    """A program that has what this file has."""
    program = f"import sys\nsys.path[:0] = {[path for path in sys.path if path]!r}\n" + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environ}, cwd=ROOT
    )


def test_threads_do_not_bring_threads_of_libraries_with_them(photographs):
    """torch and OpenCV would each start as many as there are cores, for each of ours."""
    done = in_a_process(
        f"""
        import os
        from pathlib import Path
        from tests.entrypoints.test_threads import open_data, open_loaders, settings, torch, world
        torch.set_num_threads(4)
        chosen = settings(3, global_batch_size=23, max_rotation_degrees=5.0, augmentation_load=1)
        for channels in (1, 3):
            data = open_data(Path({str(photographs)!r}) / "train", Path({str(photographs)!r}) / "validation", chosen, channels)
            made = open_loaders(data, chosen, world(), batch_size_per_device=23)
            before = len(os.listdir("/proc/self/task"))
            made.train_batches.start(1)
            batches = iter(made.train)
            next(batches)
            print(len(os.listdir("/proc/self/task")) - before)
            del batches
        """,
        OMP_NUM_THREADS="4",
    )
    started = [int(line) for line in done.stdout.split()]
    assert len(started) == 2 and all(1 <= count <= 3 for count in started), done.stdout + done.stderr


def test_a_program_that_fails_within_an_iteration_says_why_and_nothing_else():
    done = in_a_process(
        """
        from tests.entrypoints.test_threads import Numbers, batches_of, loader
        made = iter(loader(Numbers(), batches_of(*[4] * 50)))
        next(made)
        raise SystemExit("the reason")
        """
    )
    assert done.returncode == 1 and done.stderr == "the reason\n"
