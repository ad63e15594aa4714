"""Shards: those of others, what an index must agree with, a clear word for each way to be broken, and copies ahead of use."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import signal
import tarfile
import threading
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from training.data.broken import BrokenImages
from training.data.loaders import open_loaders
from training.data.masks import MaskedImages
from training.data.sources import shard_cache, shards
from training.data.sources.channels import open_source
from training.data.sources.shard_cache import ReadAhead, ShardCache
from training.data.sources.shard_index import INDEX, find_shards, read_index, scan_shards, write_index
from training.data.sources.shards import LabelledShards, ShardReading
from training.data.views import open_data
from training.distributed.world import World
from training.runtime.environment import is_streamed
from training.settings.scripts import LabelledImageSettings
from training.settings.segmentation import SegmentationSettings

from tests.entrypoints.ranks import from_clean_forks


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


def settings(**values) -> LabelledImageSettings:
    return LabelledImageSettings(**{"image_size": 8, "global_batch_size": 8, **values})


def picture(number: int, size: tuple[int, int] = (9, 8)) -> bytes:
    """A PNG of one grey, which tells its number."""
    file = io.BytesIO()
    Image.new("L", size, number % 256).save(file, "PNG")
    return file.getvalue()


def write_shard(file: Path, members: dict[str, bytes]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_channel(root: Path, *counts: int, classes: int = 3) -> Path:
    """Shards of so many pictures each, numbered through them; their class is their number modulo `classes`."""
    number = 0
    for shard, count in enumerate(counts):
        members = {}
        for _ in range(count):
            members[f"{number:04d}.png"], members[f"{number:04d}.cls"] = picture(number), b"%d" % (number % classes)
            number += 1
        write_shard(root / f"part-{shard:x}.tar", members)
    (root / "classes.txt").write_text("".join(f"class {label}\n" for label in range(classes)))
    return root


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch) -> Path:
    """This host's own disk, for copies and for indices that were made here."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setattr(shard_cache, "tempfile", disk_at(folder))
    return folder


def disk_at(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(gettempdir=lambda: str(folder))


# -- what is read ------------------------------------------------------------------------------------------------------


def test_images_are_numbered_through_the_shards_and_each_has_its_class(tmp_path):
    opened = LabelledShards(write_channel(tmp_path / "train", 5, 3, 7))
    assert len(opened) == 15 and opened.classes == ["class 0", "class 1", "class 2"]
    assert opened.labels.tolist() == [number % 3 for number in range(15)]
    assert [opened.encoded(number) for number in range(15)] == [picture(number) for number in range(15)]
    assert opened.name(6) == f"{tmp_path}/train/part-1.tar: 0006.png"
    assert "15 images in 3 shards" in opened.notes[1] and "no index.npz" in opened.notes[0]


def test_labels_may_be_numbers_or_names_in_cls_or_json(tmp_path):
    members = {}
    labels = {"a.cls": b"2\n", "b.json": b'{"label": 1, "other": 0}', "c.json": b'{"label": "dog"}', "d.cls": b"cat", "e.json": b"2"}  # fmt: skip
    for name, text in labels.items():
        members[f"sub.d/{name[0]}.x.jpg"], members[f"sub.d/{name}"] = picture(0), text
        members[f"sub.d/{name[0]}.jpg"] = picture(1)
    members |= {"sub.d/e.json": members.pop("sub.d/e.json"), "README": b"", "._a.jpg": b"junk"}
    write_shard(tmp_path / "train/a.tar", members)
    (tmp_path / "train/classes.json").write_text(json.dumps(["cat", "dog", "cow"]))
    assert LabelledShards(tmp_path / "train").labels.tolist() == [2, 1, 1, 0, 2]


def test_without_names_classes_are_their_numbers(tmp_path):
    (write_channel(tmp_path / "train", 4) / "classes.txt").unlink()
    assert LabelledShards(tmp_path / "train").classes == ["0", "1", "2"]


def test_a_limit_keeps_the_first_images_of_each_class(tmp_path):
    opened = LabelledShards(write_channel(tmp_path / "train", 5, 3, 7), images_per_class=3)
    assert [opened.encoded(number) for number in range(9)] == [picture(number) for number in range(9)]
    assert len(opened) == 9 and sorted(opened.order.of_view(0, 1).tolist()) == list(range(9))


def test_a_name_of_any_length_and_script_is_read(tmp_path):
    long = "ünï 码/" + "x" * 180
    write_shard(tmp_path / "train/a'; echo.tar", {f"{long}.png": picture(7), f"{long}.cls": b"0"})
    opened = LabelledShards(tmp_path / "train")
    assert opened.encoded(0) == picture(7) and "a'; echo.tar: " in opened.name(0)
    assert "/xxx" in opened.name(0), "as much as the tar header holds"


def test_threads_and_forked_and_spawned_processes_read_the_same(tmp_path):
    opened = LabelledShards(write_channel(tmp_path / "train", *[4] * 6), reading=ShardReading(window=1))
    expected = [picture(number) for number in range(24)]
    found: list = [None] * 4

    def read(thread: int) -> None:
        found[thread] = [[opened.encoded(number) for number in range(24)] for _ in range(20)]

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 20] * 4, "with more shards than stay open"
    assert [pickle.loads(pickle.dumps(opened)).encoded(number) for number in range(24)] == expected
    forking = from_clean_forks().Process(target=_read_in_forks, args=(opened, tmp_path / "forks"))
    forking.start()
    forking.join()
    assert pickle.loads((tmp_path / "forks").read_bytes()) == expected


def _read_in_forks(opened: LabelledShards, file: Path) -> None:
    """Of a process without other threads: as data workers are forked, with a file already open."""
    opened.encoded(0)
    with get_context("fork").Pool(2) as pool:
        file.write_bytes(pickle.dumps(pool.map(opened.encoded, range(24))))


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 2)])
def test_loaders_bring_every_image_once_also_after_a_stop_at_another_world_size(tmp_path, workers, ranks):
    for split in ("train", "validation"):
        write_channel(tmp_path / split, 9, 11, 13, 7, 12, 12)
    chosen = settings(num_workers=workers, shuffle_window_shards=3)
    data = open_data(tmp_path / "train", tmp_path / "validation", chosen, 1)

    def seen(rank: int, size: int, first: int, last: int) -> Counter:
        loaders = open_loaders(data, chosen, world(rank, size), batch_size_per_device=8 // size)
        loaders.train_batches.start(2, first)
        batches = [batch for batch, _ in zip(loaders.train, range(last - first), strict=False)]
        for batch in batches:
            assert torch.equal(batch.images[:, 0, 0, 0], batch.indices.to(torch.uint8)), "the image that was asked for"
        return Counter(number for batch in batches for number in batch.indices.tolist())

    together = seen(0, 1, 0, 3)
    for rank in range(ranks):
        together += seen(rank, ranks, 3, 8)
    assert len(together) == 64 and set(together.values()) == {1}
    held_out = Counter()
    for rank in range(ranks):
        loaders = open_loaders(data, chosen, world(rank, ranks), batch_size_per_device=8 // ranks)
        held_out += Counter(int(value) for images, _ in loaders.validation for value in images[:, 0, 0, 0])
    assert held_out == Counter(range(64))


def test_masks_are_read_from_shards_as_from_folders(tmp_path):
    chosen = SegmentationSettings(model="x", classes=4, image_size=(32, 32), global_batch_size=2)
    members = {}
    for number in range(5):
        mask = np.zeros((40, 50), np.uint8)
        mask[number:, 7:] = 3
        for kind, array in (("images", mask * 60), ("masks", mask)):
            (tmp_path / "folder" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(tmp_path / "folder" / kind / f"{number}.png")
        members[f"{number}.png"] = (tmp_path / f"folder/images/{number}.png").read_bytes()
        members[f"{number}.mask.png"] = (tmp_path / f"folder/masks/{number}.png").read_bytes()
    write_shard(tmp_path / "shards/a.tar", members)
    skipping = BrokenImages(fail=False)
    folder, opened = (MaskedImages(tmp_path / kind, chosen, broken=skipping) for kind in ("folder", "shards"))
    for number in range(5):
        for one, other in zip(folder[(0, number)], opened[(0, number)]):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="2.mask.png: class 3 at row 2"):
        MaskedImages(tmp_path / "shards", replace(chosen, classes=3), broken=skipping)[(0, 2)]
    with pytest.raises(ValueError, match="hold masks, not labels: train_segmentation.py"):
        LabelledShards(tmp_path / "shards")
    with pytest.raises(ValueError, match="hold labels, not masks"):
        MaskedImages(write_channel(tmp_path / "train", 3), chosen, broken=skipping)


# -- the index ---------------------------------------------------------------------------------------------------------


def indexed(root: Path) -> Path:
    """A channel with its index beside it."""
    write_index(root / INDEX, scan_shards(root, find_shards(root), None))
    return root


def test_an_index_beside_the_shards_gives_the_same_as_their_headers(tmp_path, monkeypatch):
    root = write_channel(tmp_path / "train", 5, 3)
    before = LabelledShards(root)
    indexed(root)
    monkeypatch.setattr(shards, "scan_shards", None)
    after = LabelledShards(root)
    assert after.digest() == before.digest() and after.labels.tolist() == before.labels.tolist()
    assert len(after.notes) == 1


def test_an_index_that_was_made_here_is_made_once(tmp_path, monkeypatch):
    root = write_channel(tmp_path / "train", 5, 3)
    digest = LabelledShards(root).digest()
    monkeypatch.setattr(shards, "scan_shards", None)
    assert LabelledShards(root).digest() == digest and not (root / INDEX).exists()
    monkeypatch.setattr(shards, "scan_shards", scan_shards)
    write_channel(root, 5, 4)
    assert len(LabelledShards(root)) == 9, "other shards have another one"


def test_the_digest_changes_with_what_the_images_are(tmp_path):
    def digest(**values) -> str:
        write_channel(tmp_path / "train", 5, 3)
        if values.get("label"):
            write_channel(tmp_path / "train", 5, 3, classes=2)
        if values.get("name"):
            (tmp_path / "train/classes.txt").write_text("a\nb\nc\n")
        if values.get("rename"):
            (tmp_path / "train/part-0.tar").rename(tmp_path / "train/part-9.tar")
        found = LabelledShards(tmp_path / "train", values.get("limit")).digest()
        shutil.rmtree(tmp_path / "train")
        return found

    found = [digest(), digest(label=True), digest(name=True), digest(rename=True), digest(limit=1)]
    assert len(set(found)) == 5 and digest() == found[0]


def test_an_index_of_a_million_images_opens_from_16_megabytes_and_reading_keeps_nothing(tmp_path):
    import tracemalloc

    root, count = write_channel(tmp_path / "train", 40), 1_000_000
    index = scan_shards(root, find_shards(root), None)
    many = np.resize(np.arange(40), count)
    fields = {name: getattr(index, name)[many] for name in ("offsets", "lengths", "labels")}
    from dataclasses import replace

    write_index(root / INDEX, replace(index, counts=np.array([count]), **fields))
    tracemalloc.start()
    opened = LabelledShards(root)
    assert len(opened) == count and tracemalloc.get_traced_memory()[0] < 30 << 20
    before = tracemalloc.get_traced_memory()[0]
    for number in range(0, count, 200):
        opened.encoded(number), opened.name(number)
    assert tracemalloc.get_traced_memory()[0] - before < 100_000
    tracemalloc.stop()


# -- what is wrong -----------------------------------------------------------------------------------------------------


def damage(root: Path, how: str) -> None:
    shard = root / "part-1.tar"
    whole = shard.read_bytes()
    if how == "missing":
        shard.unlink()
    elif how == "another":
        shutil.copy(shard, root / "part-7.tar")
    elif how == "shorter":
        shard.write_bytes(whole[:2500])
    elif how == "index cut":
        (root / INDEX).write_bytes((root / INDEX).read_bytes()[:300])
    elif how == "index old":
        values = dict(np.load(root / INDEX)) | {"format": 0}
        np.savez(root / INDEX, **values)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"not those of index.npz there: part-1.tar is missing. Copy them again, or, .* remove index.npz"),
        ("another", "part-7.tar is not in the index"),
        ("shorter", r"part-1.tar has 2,500 bytes, not 10,240\. Copy"),
        ("index cut", "index.npz cannot be read as an index of shards: .* Remove it, and a new one is made"),
        ("index old", "index.npz cannot be read .* of format 0, not 1"),
    ],
)
def test_shards_that_do_not_agree_with_their_index_are_named_with_the_fix(tmp_path, how, message):
    root = indexed(write_channel(tmp_path / "train", 4, 3, 4))
    damage(root, how)
    with pytest.raises(ValueError, match=message):
        LabelledShards(root)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": picture(0)}, r"a.tar: a has no label: a.cls .*, a.json .*, or a.mask.png"),
        ({"a.cls": b"0"}, "a.tar: a has no image, only cls. Images are .jpg, .jpeg, .png, .webp"),
        ({"a.png": picture(0), "a.cls": b"-1"}, "a.cls holds b'-1', not a class number"),
        ({"a.png": picture(0), "a.cls": b"dog"}, "a.cls holds b'dog', not a class number, or a name of classes.txt"),
        ({"a.png": picture(0), "a.json": b'{"klass": 1}'}, "a.json holds .* as {\"label\": …}"),
        ({"a.png": picture(0), "a.cls": b"3"}, "a.tar: a.png has class 3, and .* has 3 names of classes, so 0 to 2 are valid"),
        ({"readme": b""}, "its 1 shards hold no images"),
    ],
)  # fmt: skip
def test_a_sample_that_is_not_of_the_convention_is_named_with_what_is_valid(tmp_path, members, message):
    write_shard(tmp_path / "train/a.tar", members)
    (tmp_path / "train/classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(ValueError, match=message):
        LabelledShards(tmp_path / "train")


@pytest.mark.parametrize("keep", [0, 100, 2000, 4096, 10240 - 10240 % 512 - 7 * 512])
def test_a_shard_that_was_cut_anywhere_is_named(tmp_path, keep):
    root = write_channel(tmp_path / "train", 3, 4)
    whole = (root / "part-1.tar").read_bytes()
    used = len(whole.rstrip(b"\0"))
    (root / "part-1.tar").write_bytes(whole[: min(keep, -(-used // 512) * 512)])
    with pytest.raises(ValueError, match=r"part-1.tar is (cut short|no whole tar).*again"):
        LabelledShards(root)


def test_a_shard_that_changes_under_the_run_is_named(tmp_path):
    root = write_channel(tmp_path / "train", 3, 4)
    opened = LabelledShards(root)
    os.truncate(root / "part-1.tar", 600)
    with pytest.raises(ValueError, match="part-1.tar ends within image 6"):
        opened.encoded(6)
    again = pickle.loads(pickle.dumps(opened))
    (root / "part-0.tar").unlink()
    with pytest.raises(ValueError, match="part-0.tar: image 1 cannot be read: No such file"):
        again.encoded(1)


def test_shards_beside_class_folders_are_refused_and_folders_stay_folders(tmp_path):
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/a.png").write_bytes(picture(0))
    assert type(open_source(tmp_path / "train", settings())).__name__ == "LabelledFolder"
    write_channel(tmp_path / "train", 2)
    with pytest.raises(ValueError, match=r"holds 1 shards \(part-0.tar …\) and 1 folders \(cat …\): move one kind"):
        open_source(tmp_path / "train", settings())


# -- copies ------------------------------------------------------------------------------------------------------------


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
    return LabelledShards(root, reading=ShardReading(streamed=True)).encoded(number)


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


def test_a_full_disk_and_a_small_limit_leave_shards_to_be_read_in_place(tmp_path, monkeypatch, disk):
    root = indexed(write_channel(tmp_path / "train", 4, 4))
    small = LabelledShards(root, reading=ShardReading(streamed=True, cache_bytes=100))
    assert small.encoded(5) == picture(5) and copies(disk) == []
    assert "raise shard_cache_gb" in small.notes[-1]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache.shutil, "copyfileobj", full)
    assert _read_streamed(root, 2) == picture(2) and not list(disk.rglob("*.part"))


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


def test_an_index_survives_writing_and_reading(tmp_path):
    root = write_channel(tmp_path / "train", 2, 0, 3)
    index = scan_shards(root, find_shards(root), None)
    write_index(tmp_path / INDEX, index)
    again = read_index(tmp_path / INDEX)
    assert again.names == ["part-0.tar", "part-1.tar", "part-2.tar"] and again.counts.tolist() == [2, 0, 3]
    assert again.offsets.tolist() == index.offsets.tolist() and not len(again.mask_offsets)
