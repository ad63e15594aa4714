"""Half of a step alone, and what a process and its workers take of their machine."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import Dataset
from training.data.loaders import Data, open_loaders
from training.distributed.world import World
from training.engine import probe
from training.engine.probe import RepeatedBatch, input_alone
from training.measure import usage
from training.measure.timeline import Timeline
from training.settings.scripts import ClassifierSettings

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
BURNT = 0.005
"""CPU seconds that an image of Laborious takes at least."""


class Item(NamedTuple):
    images: torch.Tensor
    indices: torch.Tensor


class Laborious(Dataset):
    """Images that cost a known time of the CPU."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, draw: tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        end = time.thread_time() + BURNT
        while time.thread_time() < end:
            pass
        return torch.zeros(1, 1, 1, dtype=torch.uint8), *draw


def collate(items: list[tuple], images: torch.Tensor | None = None) -> Item:
    pixels = torch.stack([item[0] for item in items]) if images is None else images
    return Item(pixels, torch.tensor([item[1:] for item in items]))


def loaders(workers: int, kind: str = "processes"):
    settings = ClassifierSettings(model="resnet18", global_batch_size=4, num_workers=workers, worker_type=kind)
    return open_loaders(Data(["a"], Laborious(), Laborious(), collate), settings, ALONE, batch_size_per_device=4)


@pytest.mark.parametrize(("workers", "kind"), [(0, "processes"), (2, "processes"), (2, "threads")])
def test_the_input_side_alone_is_reported_with_the_work_of_its_workers(workers, kind):
    """The epoch has 6 batches: 5 to warm up and 8 more, which hold the 30 images, are of several epochs."""
    opened, threads = loaders(workers, kind), {*threading.enumerate()}
    found = input_alone(opened, 30, ALONE)
    least = BURNT if not workers else BURNT / 2  # a worker's clock ticks, and it may be ahead by a batch or two
    assert found["input_cpu_seconds_per_image"] >= least
    ready = 2 if workers else 1  # half of the batches that count may lie ready where this process got no core
    assert 0 < found["input_images_per_second"] <= max(1, workers) / BURNT * ready * 1.05
    assert found["input_start_seconds"] >= 4 * BURNT
    assert kind == "processes" or {*threading.enumerate()} <= threads, "a probe leaves no threads behind"
    opened.train_batches.start(1, 4)
    assert len([*opened.train]) == 2, "training begins where it wants all the same"


def test_a_slow_input_side_is_measured_for_a_while_and_not_by_all_images():
    opened = loaders(0)
    assert input_alone(opened, 10**9, ALONE, most_seconds=0.0)["input_images_per_second"] > 0


def test_batches_that_come_all_at_once_count_as_many_as_are_made_side_by_side(monkeypatch):
    opened, taken = loaders(2), []
    start = opened.train_batches.start
    monkeypatch.setattr(opened.train_batches, "start", lambda *epoch: taken.append(epoch) or start(*epoch))
    clock = SimpleNamespace(
        perf_counter=map((0.02).__mul__, itertools.count()).__next__, process_time=time.process_time
    )
    monkeypatch.setattr(probe, "time", clock)  # batches take longer than they may where there is no core
    found = input_alone(opened, 10**9, ALONE, most_seconds=0.05, first_step=4, crowd=6)
    assert taken == [(1, 4), (2, 0), (3, 0)], "2 batches, 6 and 6: 7 before those that count, and at least 6"
    assert found["input_images_per_second"] == pytest.approx(6 * 4 / 0.14), "6 looks at the clock, and the last"


@pytest.mark.parametrize(
    ("workers", "kind", "crowd"), [(0, "processes", 0), (2, "processes", 2), (2, "loader", 2), (2, "threads", 0)]
)
def test_the_batches_of_several_processes_come_in_crowds(workers, kind, crowd):
    opened = loaders(workers, kind)
    assert opened.crowd == crowd
    assert dataclasses.replace(opened, train=RepeatedBatch(opened.train)).crowd == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeated_batch_is_the_first_for_ever(workers):
    opened = loaders(workers, "threads")
    opened.train_batches.start(1)
    first = next(iter(opened.train))
    repeated = RepeatedBatch(opened.train)
    for _ in range(2):
        batches = iter(repeated)
        assert all(torch.equal(next(batches).indices, first.indices) for _ in range(9))


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_step_tells_the_cpu_seconds_of_its_process_and_workers(kind):
    opened, timeline = loaders(2, kind), Timeline(torch.device("cpu"))
    opened.train_batches.start(1)
    timeline.start()
    for _ in opened.train:
        timeline.step()
    assert 3 * timeline.window().cpu * 2 >= 24 * BURNT * 0.8, "6 steps of 4 images that only the workers made"
    alone = Timeline(torch.device("cpu"))
    Laborious()[1, 0]
    alone.start()
    Laborious()[1, 0]
    alone.step()
    window = alone.window()  # the workers of before may still do theirs
    assert BURNT <= window.cpu - window.worker_cpu < 2 * BURNT, "what came before the start is not part of a step"


def test_hardware_tells_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(usage, "usable_cores", lambda: 1.5)
    reported = usage.hardware(torch.device("cpu"))
    assert (
        reported["cores"] == 1.5
        and reported["cpu"]
        and reported["torch"] == torch.__version__
        and "gpu" not in reported
    )
