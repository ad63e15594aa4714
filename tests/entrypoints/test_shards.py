"""Shards: those of others, what an index must agree with, and a clear report for each way to be broken."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.data.broken import BrokenImages
from training.data.loaders import open_loaders
from training.data.masks import MaskedImages
from training.data.orders import of_view
from training.data.sources import shards
from training.data.sources.channels import open_source
from training.data.sources.shard_index import INDEX, find_shards, read_index, scan_shards, write_index
from training.data.sources.shards import LabelledShards, ShardFiles, ShardReading, UnlabelledShards
from training.data.views import open_data
from training.settings.segmentation import SegmentationSettings

from tests.entrypoints.ranks import from_clean_forks
from tests.entrypoints.shard_channels import indexed, picture, settings, world, write_channel, write_shard

pytestmark = pytest.mark.usefixtures("disk")


# -- what is read ------------------------------------------------------------------------------------------------------


def test_images_are_numbered_through_the_shards_and_each_has_its_class(tmp_path):
    opened = LabelledShards(write_channel(tmp_path / "train", 5, 3, 7))
    assert len(opened) == 15 and opened.classes == ["class 0", "class 1", "class 2"]
    assert opened.labels.tolist() == [number % 3 for number in range(15)]
    assert [opened.image(number) for number in range(15)] == [picture(number) for number in range(15)]
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
    assert [opened.image(number) for number in range(9)] == [picture(number) for number in range(9)]
    assert len(opened) == 9 and sorted(of_view(opened.order, 0, 1).tolist()) == list(range(9))


def test_a_name_of_any_length_and_script_is_read(tmp_path):
    long = "ünï 码/" + "x" * 180
    write_shard(tmp_path / "train/a'; echo.tar", {f"{long}.png": picture(7), f"{long}.cls": b"0"})
    opened = LabelledShards(tmp_path / "train")
    assert opened.image(0) == picture(7) and "a'; echo.tar: " in opened.name(0)
    assert "/xxx" in opened.name(0), "as much as the tar header holds"


def test_threads_and_forked_and_spawned_processes_read_the_same(tmp_path):
    opened = LabelledShards(write_channel(tmp_path / "train", *[4] * 6), reading=ShardReading(window=1))
    expected = [picture(number) for number in range(24)]
    found: list = [None] * 4

    def read(thread: int) -> None:
        found[thread] = [[opened.image(number) for number in range(24)] for _ in range(20)]

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 20] * 4, "with more shards than stay open"
    assert [pickle.loads(pickle.dumps(opened)).image(number) for number in range(24)] == expected
    forking = from_clean_forks().Process(target=_read_in_forks, args=(opened, tmp_path / "forks"))
    forking.start()
    forking.join()
    assert pickle.loads((tmp_path / "forks").read_bytes()) == expected


def _read_in_forks(opened: LabelledShards, file: Path) -> None:
    """Of a process without other threads: as data workers are forked, with a file already open."""
    opened.image(0)
    with get_context("fork").Pool(2) as pool:
        file.write_bytes(pickle.dumps(pool.map(opened.image, range(24))))


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


def test_a_wide_window_keeps_no_more_shards_open_than_a_process_may(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN", 3)
    opened = LabelledShards(write_channel(tmp_path / "train", *[1] * 12), reading=ShardReading(window=1000))
    assert [opened.image(index) for index in range(12)] == [picture(index) for index in range(12)]
    assert len(opened._files) == 3


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
        opened.image(number), opened.name(number)
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
        ("missing", r"do not match index.npz there: part-1.tar is missing. Copy them again, or, .* remove index.npz"),
        ("another", "part-7.tar is not in the index"),
        ("shorter", r"part-1.tar has 2,500 bytes, not 10,240\. Copy"),
        ("index cut", "index.npz cannot be read as an index of shards: .* Remove it: the next start makes a new one"),
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
        ({"a.png": picture(0), "a.cls": b"-1"}, "a.cls holds b'-1', not a class number below 1,000,000"),
        ({"a.png": picture(0), "a.cls": b"100000000"}, "a.tar: a.cls holds b'100000000', not a class number below 1,000,000"),
        ({"a.png": picture(0), "a.json": b"[" * 100_000}, "a.json holds"),
        ({"a.png": picture(0), "a.cls": b"dog"}, "a.cls holds b'dog', not a class number below 1,000,000, or a name of classes.txt"),
        ({"a.png": picture(0), "a.json": b'{"klass": 1}'}, "a.json holds .* as {\"label\": …}"),
        ({"a.png": picture(0), "a.cls": b"3"}, "a.tar: a.png has class 3, and .* has 3 class names: 0 to 2 are valid"),
        ({"readme": b""}, "its 1 shards hold no images"),
        ({"a.v2.png": picture(0), "a.v2.cls": b"0"}, r"a.tar: a.v2.png is not an image in WebDataset, .* for example to a-v2.png"),
        ({"a.1.png": picture(1), "a.1.cls": b"1", "a.png": picture(0), "a.cls": b"0"}, "a.tar: a.1.png is not an image .* to a-1.png, and its label"),
        ({"a.png": picture(0), "a.cls": b"0", "a.b.1.jpg": picture(1), "a.b.1.json": b"1"}, r"a.b.1.jpg is not an image .* to a-b-1.jpg"),
        ({"a.png": picture(0), "a.mask.png": picture(0), "a.1.png": picture(1), "a.1.mask.png": picture(1)}, "a.1.png is not an image"),
        ({"a.1.tif": picture(0), "a.1.cls": b"0"}, "a has no image, only 1.tif, 1.cls. Images are .*; `launcher prepare` converts others"),
        ([("a.png", picture(0)), ("a.cls", b"0"), ("a.png", picture(1))], "a.tar: a.png occurs twice"),
        ([("a.png", picture(0)), ("b.png", "a.png")], "a.tar: b.png is a link"),
    ],
)  # fmt: skip
def test_a_sample_that_is_not_of_the_convention_is_named_with_what_is_valid(tmp_path, members, message):
    write_shard(tmp_path / "train/a.tar", members)
    (tmp_path / "train/classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(ValueError, match=message):
        LabelledShards(tmp_path / "train")


def test_fields_of_a_sample_that_are_no_samples_are_left_aside(tmp_path):
    fields = {"a.seg.png": b"", "a.depth.tif": b"", "a.mask.json": b"", "a.txt": b""}
    write_shard(tmp_path / "train/a.tar", {"a.png": picture(0), "a.mask.png": picture(1), **fields})
    write_shard(tmp_path / "others/a.tar", {"a.png": picture(0), **fields, "readme.txt": b""})
    for channel, opened in (("train", ShardFiles), ("others", UnlabelledShards)):
        assert len(opened(tmp_path / channel, ShardReading())) == 1


@pytest.mark.parametrize("kind", ["bmp", "gif", "TIF", "tiff", "ppm", "pgm"])
def test_an_image_without_a_label_of_a_kind_that_is_not_read_from_shards_is_named(tmp_path, kind):
    write_shard(tmp_path / "others/a.tar", {"a.jpg": picture(0), f"b.{kind}": picture(1)})
    with pytest.raises(
        ValueError, match=f"a.tar: b has no image, only {kind.lower()}. Images are .jpg, .* converts others"
    ):
        UnlabelledShards(tmp_path / "others", ShardReading())


@pytest.mark.parametrize("label", [-1, 10**6, 10**8])
def test_a_label_that_an_index_makes_up_is_named_with_the_limit(tmp_path, label):
    root = indexed(write_channel(tmp_path / "train", 4))
    (root / "classes.txt").unlink()
    index = read_index(root / INDEX)
    index.labels[2] = label
    write_index(root / INDEX, index)
    with pytest.raises(
        ValueError, match=rf"part-0.tar: 0002.png has class {label}, .* 0 to 999999 are valid\. Correct"
    ):
        LabelledShards(root)


def test_a_class_name_may_hold_every_letter_but_a_line_break(tmp_path):
    root, names = write_channel(tmp_path / "train", 3), ["a\u2028b", "c\u0085d", "e\x0cf"]
    (root / "classes.txt").write_bytes("\r\n".join(names).encode())
    assert LabelledShards(root).classes == names


def test_the_same_classes_in_another_order_are_named_with_the_first_that_differs(tmp_path):
    train, validation = (write_channel(tmp_path / split, 3) for split in ("train", "validation"))
    (validation / "classes.txt").write_text("class 0\nclass 2\nclass 1\n")
    message = (
        f"same classes in another order: class 1 is 'class 1' in {train} and 'class 2' in {validation}. Put the same list in "
        "classes.txt beside the shards of each, and number the labels by it"
    )
    with pytest.raises(ValueError, match=message):
        open_data(train, validation, settings(), 1)


def test_shards_without_class_names_that_lack_the_last_class_are_refused_with_the_fix(tmp_path):
    train, validation = write_channel(tmp_path / "train", 3), write_channel(tmp_path / "validation", 2)
    names = (train / "classes.txt").read_text()
    for folder in (train, validation):
        (folder / "classes.txt").unlink()
    with pytest.raises(
        ValueError, match="only .*train has 2. Without names, .* put the same classes.txt beside the shards of both"
    ):
        open_data(train, validation, settings(), 1)
    for folder in (train, validation):
        (folder / "classes.txt").write_text(names)
    assert open_data(train, validation, settings(global_batch_size=1), 1).classes == ["class 0", "class 1", "class 2"]


@pytest.mark.parametrize("keep", [0, 100, 2000, 4096, 10240 - 10240 % 512 - 7 * 512])
def test_a_shard_that_was_cut_anywhere_is_named(tmp_path, keep):
    root = write_channel(tmp_path / "train", 3, 4)
    whole = (root / "part-1.tar").read_bytes()
    used = len(whole.rstrip(b"\0"))
    (root / "part-1.tar").write_bytes(whole[: min(keep, -(-used // 512) * 512)])
    with pytest.raises(ValueError, match=r"part-1.tar is (truncated|not a complete tar).*again"):
        LabelledShards(root)


def test_a_shard_that_changes_under_the_run_is_named(tmp_path):
    root = write_channel(tmp_path / "train", 3, 4)
    opened = LabelledShards(root)
    os.truncate(root / "part-1.tar", 600)
    with pytest.raises(ValueError, match="part-1.tar ends within image 6"):
        opened.image(6)
    again = pickle.loads(pickle.dumps(opened))
    (root / "part-0.tar").unlink()
    with pytest.raises(ValueError, match="part-0.tar: image 1 cannot be read: No such file"):
        again.image(1)


def test_shards_beside_class_folders_are_refused_and_folders_stay_folders(tmp_path):
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/a.png").write_bytes(picture(0))
    assert type(open_source(tmp_path / "train", settings())).__name__ == "LabelledFolder"
    write_channel(tmp_path / "train", 2)
    with pytest.raises(ValueError, match=r"holds 1 shards \(part-0.tar …\) and 1 folders \(cat …\): move one kind"):
        open_source(tmp_path / "train", settings())


def test_an_index_survives_writing_and_reading(tmp_path):
    root = write_channel(tmp_path / "train", 2, 0, 3)
    index = scan_shards(root, find_shards(root), None)
    write_index(tmp_path / INDEX, index)
    again = read_index(tmp_path / INDEX)
    assert again.names == ["part-0.tar", "part-1.tar", "part-2.tar"] and again.counts.tolist() == [2, 0, 3]
    assert again.offsets.tolist() == index.offsets.tolist() and not len(again.mask_offsets)
