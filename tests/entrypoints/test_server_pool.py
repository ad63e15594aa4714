"""A training process and its servers: the very batches it would make itself, of any kind of channel, and every server at work. Servers here are threads."""

from __future__ import annotations

import itertools
import pickle
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from training.data import masks
from training.data.batches import SampleKey, TrainingBatches
from training.data.views import open_data
from training.distributed.world import World
from training.servers import back_off, parts
from training.servers import pool as pool_module
from training.servers.actor import About, Answer, ImageServer, Opened, Part, PartFailed, ServerFailed
from training.servers.pool import Pool, look_seconds
from training.servers.proof import PROOF
from training.servers.remote import RemoteLoader
from training.servers.stream import Stream
from training.settings.scripts import LabelledImageSettings
from training.settings.segmentation import SegmentationSettings

from .photographs import jpeg
from .shard_channels import indexed, write_channel, write_shard
from .test_masks import write_pair

IMAGES, BATCH = 96, 24
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    root = tmp_path_factory.mktemp("channels")
    for part, label, number in itertools.product(("train", "validation"), range(3), range(IMAGES // 3)):
        file = root / part / f"class-{label}" / f"{number:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(Image.effect_noise((48, 40), 50 + 20 * label).convert("RGB")))
    return root


def settings(**values) -> LabelledImageSettings:
    common = {
        "image_size": 24,
        "global_batch_size": BATCH,
        "min_crop_area": 0.3,
        "mixup": 0.5,
        "cutmix": 1.0,
        "seed": 3,
    }
    return LabelledImageSettings(**{**common, **values})


def data(channels, **values):
    return open_data(channels / "train", channels / "validation", settings(**values), 3)


class Threads:
    """Servers as the pool asks them: each a thread over its own images, with faults that a test turns on."""

    def __init__(self, images, collate, count: int = 2, teacher=None):
        self._pools = {f"images/host-{number}/0/1/x": ThreadPoolExecutor(1) for number in range(count)}
        self.images = images
        self.servers = {name: ImageServer(lambda: (images, collate, teacher)) for name in self._pools}
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.slow: dict[str, float] = {}
        self.asked: list[tuple[str, int]] = []
        self.most = self.waiting = 0
        self.lock = threading.Lock()

    def names(self):
        return dict.fromkeys(self._pools, 1)

    def about(self, server: str):
        return self._ticket(server, self.servers[server].about)

    def ask(self, server: str, draws):
        self.asked.append((server, len(draws)))
        with self.lock:
            self.waiting += len(draws)
            self.most = max(self.most, self.waiting)
        return self._ticket(server, lambda: self.servers[server].make([*draws]))

    def teach(self, server: str, images):
        return self._ticket(server, lambda: self.servers[server].teach(images))

    def done(self, tickets, seconds: float):
        return [*wait(tickets, timeout=seconds, return_when=FIRST_COMPLETED).done] if tickets else []

    def redeem(self, ticket: Future) -> Part | About | Answer:
        error = ticket.exception()
        if error is not None:
            raise error if isinstance(error, ServerFailed) else PartFailed(str(error)) from error
        found = ticket.result()
        with self.lock:
            self.waiting -= len(found.fields[0]) if isinstance(found, Part) else 0
        return found

    def _ticket(self, server: str, work) -> Future:
        if server in self.dead:
            raise ServerFailed("it is dead")
        if server in self.silent:
            return Future()

        def run():
            time.sleep(self.slow.get(server, 0))
            if server in self.dead:
                raise ServerFailed("it died")
            return work()

        return self._pools[server].submit(run)


@pytest.fixture
def quick(monkeypatch):
    """A pool that loses patience within a test's time."""
    for name, value in (
        ("LATE", 3.0),
        ("MIN_LATE", 0.2),
        ("LOST_SECONDS", 5.0),
        ("LOOK_SECONDS", 0.2),
    ):
        monkeypatch.setattr(pool_module, name, value)
    monkeypatch.setattr(back_off, "BACK_OFF", 0.1)


def pool(servers: Threads, found, said: list[str], **values) -> Pool:
    opened = Opened(found.training, found.collate_training)
    return Pool(
        servers,
        opened,
        **{
            "go_on": True,
            "patience": 5.0,
            "first_patience": 5.0,
            "threads": 1,
            "device": CPU,
            "processes": 1,
            "log": said.append,
            **values,
        },
    )


def draws(first_step: int = 0, epochs: int = 1, rank: int = 0, size: int = 1) -> Iterator[list[SampleKey]]:
    world = World(rank, size, rank, CPU, "none", "test")
    batches = TrainingBatches(IMAGES, BATCH, world, seed=3)
    for epoch in range(1, epochs + 1):
        batches.start(epoch, first_step)
        yield from batches


def local(found, keys: Iterator[list[SampleKey]]) -> list:
    return [found.collate_training(found.training.__getitems__(batch)) for batch in keys]


def assert_same(one: list, other: list) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other):
        assert type(left) is type(right)
        for name, a, b in zip(left._fields, left, right):
            assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize(("rank", "size", "first_step"), [(0, 1, 0), (1, 3, 0), (0, 1, 2)])
def test_batches_are_those_of_the_process_itself_in_its_order(channels, rank, size, first_step):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training)
    servers.slow = {next(iter(servers.names())): 0.05}  # so that the other one is asked before all is made
    made = [*Stream(pool(servers, found, said), draws(first_step, 2, rank, size))]
    assert_same(made, local(found, draws(first_step, 2, rank, size)))
    assert len({server for server, _ in servers.asked}) == 2 and not said


def test_a_faster_server_gets_more(channels):
    found = data(channels)
    servers = Threads(data(channels).training, found.collate_training)
    slow, fast = servers.names()
    servers.slow = {slow: 0.2, fast: 0.02}
    assert_same([*Stream(pool(servers, found, []), draws(epochs=4))], local(found, draws(epochs=4)))
    got = {name: sum(count for server, count in servers.asked if server == name) for name in servers.names()}
    assert got[fast] > 2 * got[slow] > 0


def test_no_more_is_asked_for_than_the_window_holds(channels):
    found = data(channels)
    servers = Threads(data(channels).training, found.collate_training, 1)
    asked = pool(servers, found, [])
    batches = iter(Stream(asked, draws(epochs=20)))
    next(batches)
    time.sleep(0.5)  # nobody takes a batch meanwhile
    got = sum(count for _, count in servers.asked)
    assert got <= BATCH * (asked.window() + 1) + PROOF < 20 * IMAGES
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "server pool"]


def test_memory_bounds_the_window(channels, monkeypatch):
    found = data(channels)
    servers = Threads(data(channels).training, found.collate_training, 1)
    asked = pool(servers, found, [])
    [*Stream(asked, draws())]
    assert asked.window() > pool_module.MIN_BATCHES
    monkeypatch.setattr(pool_module, "MAX_BYTES", 3 * 24 * 24 * BATCH)
    assert asked.window() == pool_module.MIN_BATCHES


def test_a_thousand_processes_look_at_the_head_as_often_in_all_as_250():
    assert [look_seconds(processes) for processes in (1, 250, 1000)] == [5.0, 5.0, 20.0]


def test_a_server_may_be_silent_for_longer_where_many_processes_ask_it():
    """The parts of the others come first: of 64, 378 in four threads."""
    assert [pool_module.lost_seconds(processes) for processes in (1, 8, 16, 64, 1000)] == [
        60.0,
        60.0,
        120.0,
        480.0,
        480.0,
    ]


def other_images(channels, tmp_path):
    folder = tmp_path / "other"
    for file in (channels / "train").rglob("*.jpg"):
        target = folder / "train" / file.relative_to(channels / "train")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    (folder / "validation").symlink_to(channels / "validation")
    return folder


def test_time_in_which_nobody_waits_for_images_is_no_time_without_servers(channels, monkeypatch):
    found, later = data(channels), [0.0]
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))
    asked = pool(Threads(data(channels).training, found.collate_training), found, [], go_on=False)
    for _ in range(2):
        later[0] += 60  # a teacher is evaluated first, for example
        assert_same([*Stream(asked, draws())], local(found, draws()))


def test_a_pool_without_servers_waits_at_rest(channels):
    found = data(channels)
    asked = pool(Threads(data(channels).training, found.collate_training, 0), found, [], patience=1.5)
    started = time.thread_time(), time.monotonic()
    next(iter(Stream(asked, draws())))
    assert time.monotonic() - started[1] > 1.4 and asked.counts.receiving_seconds < 0.3


def test_a_waiting_trainer_has_every_server_at_work(channels):
    found = data(channels)
    servers = Threads(data(channels).training, found.collate_training, 8)
    servers.slow = dict.fromkeys(servers.names(), 0.05)
    asked, busy = pool(servers, found, []), []
    keys = ([(1, index) for index in range(first, first + 8)] for _ in range(12) for first in range(0, IMAGES, 8))
    for _ in Stream(asked, keys):  # batches of less than a part
        busy.append(sum(1 for one in asked.live if one.asked))
    assert statistics.median(busy[len(busy) // 2 :]) >= 5


def test_an_abandoned_iteration_ends_with_the_next_one(channels):
    found = data(channels)
    loader = RemoteLoader(pool(Threads(data(channels).training, found.collate_training), found, []), Epoch())
    first = iter(loader)
    next(first)
    assert_same([*loader], local(found, draws()))
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "server pool"]


class Epoch:
    def __iter__(self):
        return draws()


def test_parts_pair_what_mixing_pairs():
    assert parts.PART % 2 == 0


def test_a_part_is_as_its_fields(channels):
    found = data(channels)
    part = ImageServer(lambda: (found.training, found.collate_training)).make([(1, 3), (2, 5)])
    assert part.seconds > 0 and [one.shape for one in part.fields] == [(2, 3, 24, 24), (2,), (2,), (2,), (2,), (2,)]
    assert np.array_equal(part.fields[0][1], found.training[2, 5].image.numpy())


def class_folders(root):
    for part in ("train", "validation"):
        for number in range(40):
            file = root / part / f"class-{number % 2}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(jpeg(Image.effect_noise((48, 40), 60).convert("RGB")))
    return lambda: open_data(root / "train", root / "validation", settings(), 3)


def class_shards(root):
    for part in ("train", "validation"):
        indexed(write_channel(root / part, 20, 20))
    return lambda: open_data(root / "train", root / "validation", settings(), 3)


def mask_folders(root):
    for part in ("train", "validation"):
        for number in range(40):
            write_pair(root / part, f"{number}", np.full((40, 48), number % 3, np.uint8))
    chosen = SegmentationSettings(
        model="resnet10t", classes=3, image_size=(32, 32), global_batch_size=8, seed=3, min_scale=0.5
    )
    return lambda: masks.open_data(root / "train", root / "validation", chosen, 3)


def mask_shards(root):
    mask_folders(root / "files")
    for part in ("train", "validation"):
        members = {}
        for image in sorted((root / "files" / part / "images").iterdir()):
            members[image.name] = image.read_bytes()
            members[f"{image.stem}.mask.png"] = (root / "files" / part / "masks" / f"{image.stem}.png").read_bytes()
        write_shard(root / part / "part-0.tar", members)
    chosen = SegmentationSettings(
        model="resnet10t", classes=3, image_size=(32, 32), global_batch_size=8, seed=3, min_scale=0.5
    )
    return lambda: masks.open_data(root / "train", root / "validation", chosen, 3)


@pytest.mark.parametrize("kind", [class_folders, class_shards, mask_folders, mask_shards])
def test_every_kind_of_channel_opens_alike_on_another_host(tmp_path, monkeypatch, kind):
    here = kind(tmp_path / "here")()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(tmp_path / "there" / "train"))  # which has no other channel
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path / "output"))
    server = ImageServer(pickle.loads(pickle.dumps(here.elsewhere)))
    assert server.about()[:2] == (40, here.training.listing())
    keys = [(view, index) for view in (1, 2) for index in range(0, 40, 3)]
    expected = here.collate_training([here.training[key] for key in keys])
    found = server.make(keys)
    assert found.batch is type(expected)
    for name, a, b in zip(expected._fields, expected, found.fields):
        assert a.dtype == torch.from_numpy(b).dtype and np.array_equal(a, b), name
