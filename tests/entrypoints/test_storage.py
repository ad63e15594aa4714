"""Storage that fails for a moment costs a run nothing; one that fails for long ends it by its own name, and no image is taken for broken."""

from __future__ import annotations

import builtins
import errno
import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.data import masks, storage, views
from training.data.batches import SampleKey
from training.data.broken import LISTING
from training.data.decode.decoding import BrokenImage, read_file
from training.data.loaders import open_loaders
from training.data.sources.shards import LabelledShards
from training.data.storage import StorageError
from training.distributed.world import World
from training.runtime.back_off import doubling
from training.runtime.failure import describe
from training.servers.back_off import LONGEST_BACK_OFF, pause_after
from training.servers.pool import LOST_SECONDS
from training.settings.segmentation import SegmentationSettings

from tests.entrypoints.shard_channels import picture, settings, write_channel

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
PASSING = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EREMOTEIO)
FAILING = "/proc/self/mem"
"""Its first page is nobody's, so that each read fails with EIO, in any process."""

Fail = Callable[..., Counter[str]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses of a millisecond, in a process that has not waited yet."""
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(storage, "_said", -float("inf"))


@pytest.fixture
def fail(monkeypatch) -> Fail:
    """Lets the first reads of files whose path holds a text fail, as a mount does; gives how often each file was opened."""
    opened: Counter[str] = Counter()
    whole = open

    def fails(part: str, number: int = errno.EIO, times: float = 1) -> Counter[str]:
        def open_or_fail(file, *arguments, **options):
            if part in str(file):
                opened[str(file)] += 1
                if opened[str(file)] <= times:
                    raise OSError(number, os.strerror(number), str(file))
            return whole(file, *arguments, **options)

        monkeypatch.setattr(builtins, "open", open_or_fail)
        return opened

    return fails


@pytest.fixture
def images(tmp_path) -> Path:
    """Eight images of one class for training and for evaluation, and as many with masks."""
    for split in ("train", "validation"):
        for folder in (f"classes/{split}/a", f"pairs/{split}/images", f"pairs/{split}/masks"):
            (tmp_path / folder).mkdir(parents=True)
            for index in range(8):
                value = index % 2 if folder.endswith("masks") else index
                Image.fromarray(np.full((16, 16), value, np.uint8)).save(tmp_path / folder / f"{index}.png")
    return tmp_path


def opened(images: Path, **values):
    root = images / "classes"
    return views.open_data(root / "train", root / "validation", settings(**values), 3, output=images / "output")


def shards(root: Path) -> LabelledShards:
    return LabelledShards(write_channel(root, 4, 4))


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_an_image_that_could_not_be_read_for_a_moment_is_trained_on_and_stays_in_the_evaluation(images, fail, number):
    data = opened(images)
    fail("/5.png", number, times=3)
    assert data.training[(1, 5)].image_index == 5
    assert data.held_out[(0, 5)] is not None
    assert not (images / "output" / LISTING).exists()


def test_an_image_and_a_mask_that_could_not_be_read_for_a_moment_are_trained_on(images, fail):
    chosen = SegmentationSettings(model="x", classes=2, image_size=(32, 32), global_batch_size=2)
    root = images / "pairs"
    data = masks.open_data(root / "train", root / "validation", chosen, 3, output=images / "output")
    count = fail("/5.png")
    assert data.training[(1, 5)].image_index == 5 and data.held_out[(0, 5)] is not None
    assert {Path(file).parent.name for file in count} == {"images", "masks"} and {*count.values()} == {2}
    assert not (images / "output" / LISTING).exists()


@pytest.mark.parametrize("number", [*storage.OF_THE_FILE], ids=errno.errorcode.get)
def test_what_is_wrong_with_one_file_makes_it_a_broken_image_at_once(images, fail, number):
    count = fail("/5.png", number, times=float("inf"))
    with pytest.raises(BrokenImage, match="5.png cannot be read: "):
        read_file(images / "classes/train/a/5.png")
    assert [*count.values()] == [1]
    data = opened(images)
    assert data.training[(1, 5)].image_index == 6 and data.held_out[(0, 5)] is None
    assert len((images / "output" / LISTING).read_text().splitlines()) == 2


class Impatient:
    """Images whose reader waits a millisecond for storage, in whichever process it is."""

    def __init__(self, images: views.TrainingViews):
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, draw: SampleKey) -> views.LabelledView:
        storage.FIRST_PAUSE = storage.LONGEST_PAUSE = 0.001
        return self._images[draw]


@pytest.mark.parametrize(
    ("workers", "kind", "name"),
    [
        (0, "auto", "StorageError"),
        (2, "threads", "StorageError"),
        (1, "processes", "StorageError"),
        (2, "loader", "OSError"),
    ],
)
def test_storage_that_fails_for_long_ends_the_run_by_its_own_name(images, workers, kind, name):
    for index in range(8):
        (images / f"classes/train/a/{index}.png").unlink()
        (images / f"classes/train/a/{index}.png").symlink_to(FAILING)
    data = opened(images)
    data = replace(data, training=Impatient(data.training))
    chosen = settings(num_workers=workers, worker_type=kind)
    loaders = open_loaders(data, chosen, ALONE, batch_size_per_device=8)
    loaders.train_batches.start(1)
    with pytest.raises(OSError) as failure:
        list(loaders.train)
    first, *_ = describe(failure.value, "0").splitlines()
    place = f"{images}/classes/train/a"
    assert re.match(
        rf"rank 0: {name}: storage fails on \S+: {place}/\d.png: Input/output error \(EIO\), in 8 tries over \d+ s\. ", first
    )  # fmt: skip
    assert first.endswith("a run resumes from its last checkpoint")
    assert not (images / "output" / LISTING).exists()


def test_nothing_is_remembered_of_storage_that_failed(images, fail):
    data = opened(images)
    fail("/5.png", times=storage.TRIES)
    with pytest.raises(StorageError):
        data.training[(1, 5)]
    assert data.training[(1, 5)].image_index == 5


def test_the_error_reaches_a_process_that_has_no_such_class(images, fail):
    """As that of `launcher prepare` has not, whose workers read by the entry scripts' rules."""
    fail("/5.png", times=float("inf"))
    with pytest.raises(StorageError) as raised:
        read_file(images / "classes/train/a/5.png")
    travelled = pickle.loads(pickle.dumps(raised.value))
    assert type(travelled) is OSError and str(travelled) == str(raised.value)


def test_a_process_says_once_that_it_waits(images, fail, capfd, monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-3")
    data = opened(images)
    fail(".png", times=2)
    for index in range(8):
        assert data.training[(1, index)].image_index == index
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("waiting for storage on algo-3, up to 0 s per read: ")
    assert line.endswith("classes/train/a/0.png: Input/output error (EIO)")


def test_storage_is_waited_for_tens_of_seconds_but_less_than_a_server(monkeypatch):
    monkeypatch.undo()
    slept: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: slept.append(seconds))
    with pytest.raises(StorageError):
        storage.read_with_retries(lambda: _raise(errno.EIO), "x")
    assert slept == sorted(slept) and len(slept) == storage.TRIES - 1 and 40 < sum(slept) < LOST_SECONDS - 10


def test_a_loader_that_ends_does_not_wait_for_storage(images, monkeypatch, fail):
    monkeypatch.setattr(storage, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 60.0)
    data = opened(images)
    loaders = open_loaders(
        data, settings(num_workers=2, worker_type="threads", global_batch_size=2), ALONE, batch_size_per_device=2
    )
    loaders.train_batches.start(1)
    order = [index for draws in loaders.train_batches for _, index in draws]
    failing = fail(f"/{order[2]}.png", times=float("inf"))
    batches = iter(loaders.train)
    next(batches)
    while not failing:
        time.sleep(0.001)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 10


def test_waits_double_up_to_the_longest_however_often_it_failed():
    assert [doubling(failures, 0.5, 16) for failures in (1, 2, 3, 6, 7)] == [0.5, 1, 2, 16, 16]
    assert pause_after(5000) == LONGEST_BACK_OFF


# -- shards ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing_reads(monkeypatch) -> Callable[..., list[int]]:
    """Lets the next reads at a place of any file fail; gives the descriptors that were read."""
    whole, descriptors = os.pread, list[int]()

    def fails(times: float, number: int = errno.EIO) -> list[int]:
        def read_or_fail(descriptor: int, length: int, offset: int) -> bytes:
            descriptors.append(os.fstat(descriptor).st_ino)
            if len(descriptors) <= times:
                raise OSError(number, os.strerror(number))
            return whole(descriptor, length, offset)

        monkeypatch.setattr(os, "pread", read_or_fail)
        return descriptors

    return fails


pytestmark = pytest.mark.usefixtures("disk")


def test_a_shard_that_could_not_be_read_for_a_moment_is_read(tmp_path, failing_reads):
    source = shards(tmp_path / "train")
    failing_reads(3)
    assert source.image(5) == picture(5)


def test_a_shard_is_opened_again_where_the_mount_knows_the_open_file_no_more(tmp_path, failing_reads, monkeypatch):
    source = shards(tmp_path / "train")
    assert source.image(5) == picture(5)
    counted, whole = [], os.open
    monkeypatch.setattr(os, "open", lambda *arguments: counted.append(arguments[0]) or whole(*arguments))
    failing_reads(1, errno.ESTALE)
    assert source.image(5) == picture(5) and counted == [tmp_path / "train/part-1.tar"]


def test_a_shards_storage_that_fails_for_long_is_named(tmp_path, failing_reads):
    source = shards(tmp_path / "train")
    failing_reads(float("inf"))
    with pytest.raises(StorageError, match=rf"^storage fails on \S+: {tmp_path}/train/part-1.tar: Input/output error"):
        source.image(5)


def test_a_shard_that_is_gone_is_named_at_once(tmp_path):
    source = shards(tmp_path / "train")
    (tmp_path / "train/part-1.tar").unlink()
    with pytest.raises(ValueError, match=r"part-1.tar: image 5 cannot be read: No such file"):
        source.image(5)


def _raise(number: int) -> bytes:
    raise OSError(number, os.strerror(number))


def test_an_image_of_a_shard_takes_one_read_with_its_name(tmp_path, failing_reads):
    """On FSx each read is a round trip; its name, which only messages need, lies before it."""
    source = shards(tmp_path / "train")
    reads = failing_reads(0)
    assert source.image(4) == picture(4) and source.name(4).endswith("4.png") and len(reads) == 1
    assert source.name(2).endswith("2.png") and len(reads) == 2, "of one that was not read its header alone is"


def test_a_shard_whose_mount_is_gone_hinders_no_other(tmp_path, failing_reads, monkeypatch):
    """A restarted mount knows none of the old handles."""
    source = shards(tmp_path / "train")
    assert (source.image(0), source.image(5)) == (picture(0), picture(5))
    other, fstat = source._files[0].descriptor, os.fstat

    def stale(descriptor: int) -> os.stat_result:
        if descriptor == other:
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", stale)
    failing_reads(1, errno.ESTALE)
    assert source.image(5) == picture(5)
