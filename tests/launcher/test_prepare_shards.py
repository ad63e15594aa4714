"""Preparing shards: killed and continued, with broken images, read again, and by the library whose convention it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import webdataset
from PIL import Image
from training.data.sources.shards import LabelledShards, ShardReading, UnlabelledShards

import launcher
from launcher.prepare import prepare, verify
from tests.conftest import wait_until
from tests.launcher.test_prepare import nasty_images, tree, write_images


def files_of(folder) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if not name.startswith(".")}


def members(shard: Path) -> list[str]:
    with tarfile.open(shard) as tar:
        return tar.getnames()


def photos(folder: Path, count: int = 60, classes: int = 3) -> Path:
    """Noise as JPEG, about 8 kB each."""
    rng = np.random.RandomState(0)
    for number in range(count):
        file = folder / f"class {number % classes}" / f"it's {number}.x.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.randint(0, 256, (60, 80, 3), np.uint8)).save(file, quality=90)
    return folder


def test_shards_without_labels_hold_each_image_once_untouched(tmp_path):
    source = photos(tmp_path / "in")
    words = prepare(str(source), tmp_path / "out", shard_size="100KB", unlabelled=True)
    assert "60 images without labels; 60 written" in words
    opened = UnlabelledShards(tmp_path / "out/unlabelled", ShardReading())
    originals = sorted(file.read_bytes() for file in source.rglob("*.jpg"))
    assert sorted(opened.image(number) for number in range(len(opened))) == originals
    assert not any(name.endswith((".cls", ".png")) for shard in tmp_path.glob("out/*/*.tar") for name in members(shard))
    assert not (tmp_path / "out/unlabelled/classes.txt").exists()
    count = len([*tmp_path.glob("out/unlabelled/*.tar")])
    assert count > 3 and f"60 images decoded, {count} shards with the right checksum" in verify(tmp_path / "out")
    with pytest.raises(ValueError, match="its shards hold no labels: give them as the channel unlabelled"):
        LabelledShards(tmp_path / "out/unlabelled")


def test_shards_hold_each_image_once_untouched_with_its_class(tmp_path):
    source = photos(tmp_path / "in")
    words = prepare(str(source), tmp_path / "out", shard_size="100KB")
    assert "45 training and 15 validation images in 3 classes; 60 written" in words
    originals = {file.read_bytes(): file.parent.name for file in source.rglob("*.jpg")}
    found = Counter()
    for split in ("train", "validation"):
        opened = LabelledShards(tmp_path / "out" / split)
        assert opened.classes == ["class 0", "class 1", "class 2"]
        for number, label in enumerate(opened.labels.tolist()):
            assert originals[opened.image(number)] == opened.classes[label]
            found[opened.image(number)] += 1
    assert len(found) == 60 and set(found.values()) == {1}
    sizes = [file.stat().st_size for file in tmp_path.glob("out/*/*.tar")]
    assert len(sizes) > 4 and max(sizes) < 120_000
    for shard in tmp_path.glob("out/train/*.tar"):
        kinds = {name.split("class-")[1][0] for name in members(shard)}
        assert kinds == {"0", "1", "2"}, "a shard is a fair sample"
    before = files_of(tmp_path / "out")
    assert "0 written, 60 already there" in prepare(str(source), tmp_path / "out", shard_size="100KB")
    assert files_of(tmp_path / "out") == before and "60 images decoded" in verify(tmp_path / "out")


def test_the_webdataset_library_reads_our_shards(tmp_path):
    source = photos(tmp_path / "in", 12)
    prepare(str(source), tmp_path / "out", shard_size="30KB")
    shards = sorted(str(file) for file in (tmp_path / "out/train").glob("*.tar"))
    read = webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls")
    opened = LabelledShards(tmp_path / "out/train")
    seen = list(read)
    assert [label for _, label in seen] == opened.labels.tolist() and len(seen) == 9
    assert all(pixels.shape == (60, 80, 3) for pixels, _ in seen)


def test_killed_at_any_point_it_goes_on_and_the_shards_are_the_same_bytes(tmp_path):
    source = photos(tmp_path / "in", 200)
    prepare(str(source), tmp_path / "whole", size=50, shard_size="20KB", jobs=1)
    whole, target = files_of(tmp_path / "whole"), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "launcher",
        "prepare",
        str(source),
        str(target),
        "--size",
        "50",
        "--shards",
        "20KB",
    ]
    workers = []
    for kills in (1, 4, 9):
        process = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(list(target.glob("*/*.tar"))) >= kills or process.poll() is not None)  # noqa: B023
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not psutil.wait_procs(workers, 60)[1], "they end with it, later on a busy machine"
        finished = list(target.glob("*/*.tar"))
        assert all(file.read_bytes() == whole[file.relative_to(target).as_posix()] for file in finished)
    words = prepare(str(source), target, size=50, shard_size="20KB", jobs=2)
    there = int(words.split(" written, ")[1].split()[0])
    assert sum(len(members(file)) // 2 for file in finished) <= there
    assert there < 200 or len(finished) == len([name for name in whole if name.endswith(".tar")]), (
        "all, before the kill"
    )
    assert files_of(target) == whole


def test_a_shard_that_was_lost_is_made_again_the_same(tmp_path):
    source = photos(tmp_path / "in", 30)
    (source / "class 0/broken.jpg").write_bytes(b"no image")
    words = prepare(str(source), tmp_path / "out", shard_size="50KB")
    assert "1 image could not be read" in words and "class 0/broken.jpg: cannot be read as an image" in words
    before = files_of(tmp_path / "out")
    lost = sorted(tmp_path.glob("out/train/*.tar"))[1]
    lost.unlink()
    with pytest.raises(launcher.UserError, match="cannot be read"):
        verify(tmp_path / "out")
    assert "0 written" not in prepare(str(source), tmp_path / "out", shard_size="50KB")
    assert files_of(tmp_path / "out") == before and "class 0/broken.jpg" in (tmp_path / "out/broken.txt").read_text()


def test_verification_names_a_shard_that_was_changed(tmp_path):
    prepare(str(photos(tmp_path / "in", 12)), tmp_path / "out", shard_size="1MB")
    shard = tmp_path / "out/train/train-00000.tar"
    data = bytearray(shard.read_bytes())
    data[3000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(launcher.UserError, match="train-00000.tar has changed since it was written"):
        verify(tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["", '{"samples": "', "[]", "null", '{"samples": 1, "images of a shard": {"train": 0}}']
)
def test_damaged_records_of_shards_are_named_or_written_again(tmp_path, text):
    source, target = photos(tmp_path / "in", 12), tmp_path / "out"
    prepare(str(source), target, shard_size="1MB")
    before = files_of(target)
    (target / ".shards/train-00000.tar.json").write_text(text)
    assert "9 written, 3 already there" in prepare(str(source), target, shard_size="1MB")
    assert files_of(target) == before
    (target / ".shards/plan.json").write_text(text)
    with pytest.raises(launcher.UserError, match=r".shards/plan.json is damaged: .*\n.*rm -r"):
        prepare(str(source), target, shard_size="1MB")
    (target / "train/index.npz").write_text(text)
    with pytest.raises(launcher.UserError, match="cannot be read as an index of shards"):
        verify(target)


def test_a_record_that_names_broken_images_by_path_is_made_again(tmp_path):
    """As records did before the source could be spelled otherwise: no image would be found by it."""
    source, record = photos(tmp_path / "in", 12), tmp_path / "out/.shards/train-00000.tar.json"
    prepare(str(source), tmp_path / "out", shard_size="1MB")
    record.write_text(json.dumps({**json.loads(record.read_text()), "broken": {"in/class 0/1.jpg": "no image"}}))
    assert "9 written, 3 already there" in prepare(str(source), tmp_path / "out", shard_size="1MB")
    assert json.loads(record.read_text())["broken"] == {}


def test_no_list_of_classes_is_written_through_a_planted_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    source = str(photos(tmp_path / "in", 12))
    prepare(source, tmp_path / "out", shard_size="1MB", jobs=1)
    (tmp_path / "out/train/classes.txt").unlink()
    (tmp_path / "out/train/classes.txt").symlink_to(tmp_path / "mine")
    prepare(source, tmp_path / "out", shard_size="1MB", jobs=1)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "out/train/classes.txt").read_text() == "class 0\nclass 1\nclass 2\n"


def test_an_image_that_could_not_be_read_is_in_its_shard_once_it_can(tmp_path):
    write_images(tmp_path / "in", *(f"a/{number}.png" for number in range(8)))
    whole = (tmp_path / "in/a/0.png").read_bytes()
    (tmp_path / "in/a/0.png").write_bytes(b"")
    how = {"shard_size": "1KB", "jobs": 1}
    assert "1 image could not be read" in prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    assert "0 written, 7 already there\n1 image could not" in prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    for record in (tmp_path / "out/.shards").glob("train-*.json"):  # a damaged one
        record.write_text(record.read_text().replace('"broken": {}', '"broken": {"99": "not there"}'))
    assert "1 image could not be read" in prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    (tmp_path / "in/a/0.png").write_bytes(whole)
    done = prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    assert "could not be read" not in done and "8 images decoded" in verify(tmp_path / "out")
    written = int(done.partition("; ")[2].split()[0])
    assert 1 <= written < 8, "its shard alone"


def test_another_source_under_the_same_name_is_refused(tmp_path):
    source = photos(tmp_path / "in", 12)
    prepare(str(source), tmp_path / "out", shard_size="1MB")
    (source / "class 0/new.jpg").write_bytes((source / "class 0/it's 0.x.jpg").read_bytes())
    with pytest.raises(launcher.UserError, match="it holds other images than at the first run .*\n.*rm -r"):
        prepare(str(source), tmp_path / "out", shard_size="1MB")
    with pytest.raises(launcher.UserError, match="shard_size '1MB', now None"):
        prepare(str(source), tmp_path / "out")


def test_nasty_images_come_into_shards_as_into_folders(tmp_path):
    for split in ("train", "validation"):
        names = nasty_images(tmp_path / "in" / split / "a")
    prepare(str(tmp_path / "in"), tmp_path / "folder", size=20)
    words = prepare(str(tmp_path / "in"), tmp_path / "shards", size=20, shard_size="1MB")
    assert "10 training and 10 validation images" in words and "6 images could not be read" in words
    opened = LabelledShards(tmp_path / "shards/train")
    assert len(opened) == len(names)
    found = {opened.image(number) for number in range(len(opened))}
    assert found == {file.read_bytes() for file in (tmp_path / "folder/train/a").iterdir()}


def test_masks_travel_in_the_shards_of_their_images(tmp_path, prepared):
    from training.data.broken import BrokenImages
    from training.data.masks import MaskedImages
    from training.settings.segmentation import SegmentationSettings

    (tmp_path / "folder").symlink_to(prepared("shapes"))
    assert "300 training and 100 validation images with masks" in prepare(
        "shapes", tmp_path / "shards", shard_size="1MB"
    )
    settings = SegmentationSettings(model="x", classes=4, image_size=(64, 64), global_batch_size=4)
    one, other = (
        MaskedImages(tmp_path / kind / "train", settings, broken=BrokenImages(fail=True))
        for kind in ("folder", "shards")
    )

    def contents(images: MaskedImages) -> set[bytes]:
        pairs = (images[(0, number)] for number in range(len(images)))
        return {image.numpy().tobytes() + mask.numpy().tobytes() for image, mask in pairs}

    assert contents(one) == contents(other) and len(contents(one)) == 300


def test_the_command_writes_and_verifies_shards_in_a_folder_of_any_name(tmp_path):
    target = tmp_path / "a'; echo ünï"
    command = [sys.executable, "-m", "launcher", "prepare"]
    made = subprocess.run([*command, "digits", str(target), "--shards", "1MB"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    verified = subprocess.run([*command, "--verify", str(target)], capture_output=True, text=True)
    assert verified.returncode == 0 and "1797 images decoded, " in verified.stdout, verified.stderr
    lacking = subprocess.run([*command, "digits"], capture_output=True, text=True)
    assert lacking.returncode == 2 and "TARGET: missing" in lacking.stderr
    assert json.loads((target / "prepared.json").read_text())["shard_size"] == "1MB" and os.listdir(
        target / "validation"
    )
