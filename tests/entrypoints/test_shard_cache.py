"""Streamed shards are copied ahead of their use, once a host, and removed behind."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training.data import masks
from training.data.loaders import open_loaders
from training.data.sources import shard_cache
from training.data.sources.channels import Channel
from training.data.sources.shard_cache import ReadAhead, ShardCache
from training.data.sources.shard_index import INDEX, find_shards, read_index, write_index
from training.data.sources.shards import LabelledShards, ShardReading
from training.data.views import open_data
from training.runtime.environment import is_streamed
from training.settings.segmentation import SegmentationSettings

from tests.entrypoints.ranks import from_clean_forks
from tests.entrypoints.shard_channels import disk_at, indexed, picture, settings, world, write_channel, write_shard

pytestmark = pytest.mark.usefixtures("disk")


def fast_file(monkeypatch, root: Path) -> None:
    """The environment in which SageMaker's toolkit starts a script whose channel is streamed."""
    modes = {"train": {"TrainingInputMode": "FastFile"}, "validation": {"TrainingInputMode": "File"}}
    monkeypatch.setenv("SM_INPUT_DATA_CONFIG", json.dumps(modes))
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(root))


def copies(disk: Path) -> list[str]:
    return sorted(file.name for file in disk.rglob("*.tar"))


def test_a_channel_is_streamed_where_sagemaker_says_fast_file(tmp_path, monkeypatch):
    fast_file(monkeypatch, tmp_path)
    assert is_streamed(tmp_path) and not is_streamed(tmp_path / "other") and not is_streamed(tmp_path, {})


def test_streamed_shards_are_copied_ahead_in_order_and_removed_behind(tmp_path, monkeypatch, disk):
    root = indexed(write_channel(tmp_path / "train", *[8] * 12))
    fast_file(monkeypatch, root)
    size = (root / "part-0.tar").stat().st_size
    read, original = [], shutil.copyfileobj

    def copied(source, target, piece):
        read.append(Path(source.name).name)
        original(source, target, piece)

    monkeypatch.setattr(shard_cache.shutil, "copyfileobj", copied)
    chosen = settings(
        shuffle_window_shards=2, shard_cache_gb=6 * size / 1e9, num_workers=0
    )  # auto reads some to measure
    data = open_data(root, root, chosen, 1)
    assert any("streamed (FastFile): shards are copied ahead" in note for note in data.notes)
    loaders = open_loaders(data, chosen, world(), batch_size_per_device=8)
    loaders.train_batches.start(1)
    for batch in loaders.train:
        assert torch.equal(batch.images[:, 0, 0, 0], batch.indices.to(torch.uint8))
        assert len(copies(disk)) <= 6
    in_order = list(dict.fromkeys(number // 8 for number in loaders.train_batches.indices(1).tolist()))
    assert sorted(read) == sorted(f"part-{shard:x}.tar" for shard in range(12)), "each once"
    assert {name for name in read[:6]} == {f"part-{shard:x}.tar" for shard in in_order[:6]}


def test_a_shard_is_copied_once_by_whoever_needs_it_first(tmp_path, disk):
    root = indexed(write_channel(tmp_path / "train", 6))
    reading = ShardReading(streamed=True)
    LabelledShards(root, reading=reading)
    with from_clean_forks().Pool(3, initializer=_count_copies, initargs=(tmp_path / "count", disk)) as pool:
        found = pool.starmap(_read_streamed, [(root, number) for number in range(6)], chunksize=1)
    assert found == [picture(number) for number in range(6)]
    assert (tmp_path / "count").read_text() == "part-0.tar\n"


def _count_copies(file: Path, disk: Path) -> None:
    shard_cache.tempfile = disk_at(disk)
    original = shutil.copyfileobj

    def copied(source, target, piece):
        with open(file, "a") as opened:
            opened.write(f"{Path(source.name).name}\n")
        original(source, target, piece)

    shard_cache.shutil.copyfileobj = copied


def _read_streamed(root: Path, number: int) -> bytes:
    return LabelledShards(root, reading=ShardReading(streamed=True)).image(number)


def test_a_copy_that_a_kill_cut_short_is_not_taken_for_one(tmp_path, disk):
    root = indexed(write_channel(tmp_path / "train", 4, 4))
    child = from_clean_forks().Process(target=_die_while_copying, args=(root, disk))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and copies(disk) == []
    assert [file.stat().st_size for file in disk.rglob(".*.part")] == [1000]
    assert _read_streamed(root, 1) == picture(1) and copies(disk) == ["part-0.tar"]
    assert not list(disk.rglob("*.part"))


def _die_while_copying(root: Path, disk: Path) -> None:
    shard_cache.tempfile = disk_at(disk)

    def copied(source, target, piece):
        target.write(source.read(1000))
        target.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    shard_cache.shutil.copyfileobj = copied
    _read_streamed(root, 1)


NOBODY = 65534
"""The user who lays traps."""


@pytest.fixture
def shared_disk(monkeypatch) -> Iterator[Path]:
    """A folder in which all users can make files, and none can remove another's, as /tmp is."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(shard_cache, "tempfile", disk_at(folder))
    yield folder
    shutil.rmtree(folder)


def as_nobody(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, user=NOBODY, group=NOBODY, extra_groups=[])


def test_an_index_that_another_user_planted_is_not_read(tmp_path, shared_disk):
    root = write_channel(tmp_path / "train", 6)
    assert LabelledShards(root).labels.tolist() == [0, 1, 2, 0, 1, 2]
    (index,) = shared_disk.rglob(INDEX)
    planted = replace(read_index(index), labels=np.zeros(6, np.int64))
    write_index(shared_disk / "planted.npz", planted)
    shutil.rmtree(index.parents[1])
    as_nobody("mkdir", "-p", index.parent)
    as_nobody("cp", shared_disk / "planted.npz", index)
    as_nobody("chmod", "-R", "a+rwx", index.parents[1])
    with pytest.warns(UserWarning, match=f"{index.parents[1]} is not a folder that only this user can write to"):
        opened = LabelledShards(root)
    assert opened.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("trap", ["folder", "file"])
def test_a_link_that_another_user_planted_is_not_followed(tmp_path, shared_disk, trap):
    root = indexed(write_channel(tmp_path / "train", 4, 4))
    secret = tmp_path / "secret"
    secret.write_text("mine")
    secret.chmod(0o600)
    assert _read_streamed(root, 1) == picture(1)
    (copy,) = shared_disk.rglob("part-0.tar")
    shutil.rmtree(copy.parents[1])
    if trap == "folder":
        (tmp_path / "own").mkdir(mode=0o700)
        as_nobody("ln", "-s", tmp_path / "own", copy.parents[1])
    else:
        as_nobody("mkdir", "-p", copy.parent)
        as_nobody("ln", "-s", secret, copy.parent / ".part-0.tar.part")
    with pytest.warns(UserWarning, match="remove the first, or set TMPDIR"):
        assert _read_streamed(root, 1) == picture(1)
    assert secret.read_text() == "mine" and secret.stat().st_mode & 0o777 == 0o600
    assert trap == "file" or not list((tmp_path / "own").iterdir())


def test_a_folder_for_copies_is_made_for_this_user_alone_and_one_that_others_can_write_to_is_left(tmp_path, disk):
    root = indexed(write_channel(tmp_path / "train", 4))
    assert _read_streamed(root, 1) == picture(1)
    (usual,) = disk.iterdir()
    assert usual.stat().st_mode & 0o777 == 0o700
    usual.chmod(0o770)
    before = [file.stat().st_mtime_ns for file in usual.rglob("*")]
    with pytest.warns(UserWarning, match=f"keeps its index and copies of shards in {usual}-"):
        assert _read_streamed(root, 2) == picture(2)
    assert [file.stat().st_mtime_ns for file in usual.rglob("*")] == before
    (new,) = (folder for folder in disk.iterdir() if folder != usual)
    assert new.stat().st_mode & 0o777 == 0o700 and copies(new) == ["part-0.tar"]


def test_a_full_disk_and_a_small_limit_leave_shards_to_be_read_in_place(tmp_path, monkeypatch, disk):
    root = indexed(write_channel(tmp_path / "train", 4, 4))
    small = LabelledShards(root, reading=ShardReading(streamed=True, cache_bytes=100))
    assert small.image(5) == picture(5) and copies(disk) == []
    assert "raise shard_cache_gb" in small.notes[-1]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache.shutil, "copyfileobj", full)
    assert _read_streamed(root, 2) == picture(2) and not list(disk.rglob("*.part"))


def test_a_shard_of_the_same_size_that_was_made_again_is_copied_again(tmp_path):
    root = tmp_path / "train"
    for turn, numbers in enumerate(([0, 1, 2, 3], [3, 1, 0, 2])):
        samples = ([(f"{number}.png", picture(number)), (f"{number}.cls", b"%d" % number)] for number in numbers)
        write_shard(root / "a.tar", [member for sample in samples for member in sample])
        os.utime(root / "a.tar", ns=(turn, turn))
        opened = LabelledShards(root, reading=ShardReading(streamed=True))
        assert opened.labels.tolist() == numbers
        assert [opened.image(place) for place in range(4)] == [picture(number) for number in numbers]


def test_all_channels_that_are_copied_stay_within_the_limit_together(tmp_path, monkeypatch, disk):
    names = ("train", "unlabelled", "validation")
    roots = {name: indexed(write_channel(tmp_path / name, *[1] * 8)) for name in names}
    monkeypatch.setenv("SM_INPUT_DATA_CONFIG", json.dumps({name: {"TrainingInputMode": "FastFile"} for name in names}))
    for name, root in roots.items():
        monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", str(root))
    chosen = settings(shard_cache_gb=6 * (roots["train"] / "part-0.tar").stat().st_size / 1e9, global_batch_size=2)
    for unlabelled in (None, roots["unlabelled"]):
        data = open_data(roots["train"], roots["validation"], chosen, 1, unlabelled=unlabelled)
        read_all(data.training.source, data.held_out.source)
        assert len(copies(disk)) == 6


def test_channels_of_masks_that_are_copied_stay_within_the_limit_together(tmp_path, monkeypatch, disk):
    names = ("train", "validation")
    monkeypatch.setenv("SM_INPUT_DATA_CONFIG", json.dumps({name: {"TrainingInputMode": "FastFile"} for name in names}))
    for name in names:
        monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", str(tmp_path / name))
        for number in range(8):
            write_shard(tmp_path / name / f"{number}.tar", {"a.png": picture(0), "a.mask.png": picture(0)})
    size = (tmp_path / "train/0.tar").stat().st_size
    chosen = SegmentationSettings(model="x", classes=2, image_size=(32, 32), shard_cache_gb=6 * size / 1e9)
    data = masks.open_data(tmp_path / "train", tmp_path / "validation", chosen, 1)
    read_all(data.training.pairs, data.held_out.pairs)
    assert len(copies(disk)) == 6


def read_all(*channels: Channel) -> None:
    for channel in channels:
        for number in range(len(channel)):
            channel.image(number)


@pytest.mark.parametrize(
    ("processes", "limit", "ahead"),
    [(1, 4, 2), (2, 8, 2), (4, 8, 1), (4, 2, 1)],
)
def test_the_processes_of_a_host_read_ahead_within_half_of_the_limit_together_but_one_shard_each(
    tmp_path, monkeypatch, disk, processes, limit, ahead
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    root = write_channel(tmp_path / "train", *[2] * 10)
    sizes = find_shards(root)
    waits = threading.Semaphore(0)

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.release()
            return super().wait(timeout)

    reading = ReadAhead(ShardCache(root, sizes, limit * sizes["part-0.tar"]), list(sizes), np.repeat(np.arange(10), 2))
    reading._changed = Watched()
    asked_for = reading(np.arange(20))
    assert waits.acquire(timeout=20)
    asked_for(1)
    assert waits.acquire(timeout=20)
    assert copies(disk) == list(sizes)[: 1 + ahead], "the one that is read, and those ahead"
    asked_for(20)
    for thread in read_ahead_threads():
        thread.join(20)


def test_reading_ahead_stops_with_its_epoch_and_never_passes_half_of_the_limit(tmp_path, disk):
    root = write_channel(tmp_path / "train", *[2] * 10)
    sizes = find_shards(root)
    cache = ShardCache(root, sizes, limit=4 * sizes["part-0.tar"])
    fetched, arrived = [], threading.Semaphore(0)

    class Watched(ShardCache):
        def make_ready(self, name: str) -> None:
            fetched.append(name)
            arrived.release()

    watched = Watched(root, sizes, cache.limit)
    ahead = ReadAhead(watched, list(sizes), np.repeat(np.arange(10), 2))
    asked_for = ahead(np.arange(20))
    for _ in range(2):  # as many as half of the limit holds
        assert arrived.acquire(timeout=20)
    asked_for(2)
    assert arrived.acquire(timeout=20)
    assert fetched == ["part-0.tar", "part-1.tar", "part-2.tar"]
    ahead(np.arange(18, 20))
    assert arrived.acquire(timeout=20) and fetched[-1] == "part-9.tar"
    asked_for(20)  # of the epoch that was left
    for thread in threading.enumerate():
        if thread.name == "shards ahead":
            thread.join(20)
    assert fetched[3:] == ["part-9.tar"] and len(read_ahead_threads()) == 0


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shards ahead"]


def test_a_process_that_is_forked_while_a_lock_is_held_does_not_keep_it(tmp_path):
    """A data worker is, while the thread that reads ahead copies a shard; the lock would be held for ever."""
    with shard_cache.locked(tmp_path / "lock"):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
    try:
        descriptor = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    finally:
        forked.kill()
        forked.join()
