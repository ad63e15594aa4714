"""Preparing idx files, as MNIST and Fashion-MNIST come: whole, damaged, and larger than they announce."""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import pytest
from PIL import Image

import launcher
from launcher.prepare import prepare
from launcher.prepare.sources import FASHION_CLASSES


def write_idx(folder, name: str, values: bytes, *shape: int, zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + values
    (folder / (name + (".gz" if zipped else ""))).write_bytes(gzip.compress(data) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_become_folders_with_their_own_split(tmp_path, zipped):
    source = tmp_path / "fashion"
    write_idx(source, "train-images-idx3-ubyte", bytes(range(12)) * 2, 6, 2, 2, zipped=zipped)
    write_idx(source, "train-labels-idx1-ubyte", bytes([0, 1, 2, 3, 4, 9]), 6, zipped=zipped)
    write_idx(source, "t10k-images-idx3-ubyte", bytes(range(8)), 2, 2, 2, zipped=zipped)
    write_idx(source, "t10k-labels-idx1-ubyte", bytes([3, 4]), 2, zipped=zipped)
    assert "6 training and 2 validation images in 6 classes" in prepare(str(source), tmp_path / "out")
    assert Image.open(tmp_path / f"out/train/{FASHION_CLASSES[1]}/00001.png").tobytes() == bytes([4, 5, 6, 7])
    assert (tmp_path / f"out/validation/{FASHION_CLASSES[4]}/00001.png").is_file()


@pytest.mark.parametrize(
    ("folder", "inside", "classes"),
    [
        ("fashion-x/mnist", "", ["0", "1", "2"]),
        ("fashion-x/MNIST/raw", "", ["0", "1", "2"]),
        ("data/FashionMNIST/raw", "", sorted(FASHION_CLASSES[:3])),
        ("data/fashion-mnist", "data/fashion-mnist", sorted(FASHION_CLASSES[:3])),
    ],
)
def test_fashion_mnist_is_known_by_its_own_folder_and_not_by_those_above(
    tmp_path, monkeypatch, folder, inside, classes
):
    for split in ("train", "t10k"):
        write_idx(tmp_path / folder, f"{split}-images-idx3-ubyte", bytes(12), 3, 2, 2)
        write_idx(tmp_path / folder, f"{split}-labels-idx1-ubyte", bytes([0, 1, 2]), 3)
    monkeypatch.chdir(tmp_path / inside)
    prepare("." if inside else folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == classes


def test_a_cut_idx_file_is_refused(tmp_path):
    write_idx(tmp_path / "mnist", "train-images-idx3-ubyte", bytes(5), 6, 2, 2)
    with pytest.raises(launcher.UserError, match="truncated"):
        prepare(str(tmp_path / "mnist"), tmp_path / "out")


def test_a_damaged_idx_file_is_named_with_a_fix(tmp_path):
    write_idx(tmp_path / "mnist", "train-images-idx3-ubyte", bytes(range(256)) * 40, 2560, 2, 2)
    file = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    stored = gzip.compress(gzip.decompress(whole), 0)
    for damaged in (
        whole[:10] + b"\xff" * 8 + whole[18:],  # no deflate
        stored[:-8] + bytes(4) + stored[-4:],  # another checksum
        stored[:-9],  # cut
        b"no gzip at all",
    ):
        file.write_bytes(damaged)
        with pytest.raises(launcher.UserError, match=rf"SOURCE: {file} is damaged: .*\n.*download it again"):
            prepare(str(tmp_path / "mnist"), tmp_path / "out")


@pytest.mark.parametrize("shape", [(1, 2, 2), (2**32 - 1, 2**32 - 1, 2**32 - 1), (2**20, 2**10, 2**10)])
def test_an_idx_file_that_unpacks_to_far_more_than_it_announces_or_holds_is_not_read_into_memory(tmp_path, shape):
    (tmp_path / "mnist").mkdir()
    with gzip.open(tmp_path / "mnist/train-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, *shape))
        for _ in range(256):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(launcher.UserError, match="is not an idx file of bytes, or is truncated"):
            prepare(str(tmp_path / "mnist"), tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
