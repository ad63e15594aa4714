"""Drawn shapes with masks: the same again, at any size."""

from __future__ import annotations

import os

from PIL import Image

from launcher.prepare import prepare
from tests.launcher.test_prepare import tree


def test_shapes_come_with_masks_and_are_drawn_the_same_again(tmp_path):
    words = prepare("shapes", tmp_path / "one")
    assert "300 training and 100 validation images with masks; 400 written" in words
    prepare("shapes", tmp_path / "two")
    files = tree(tmp_path / "one")
    assert files == tree(tmp_path / "two") and len(set(files.values())) == 800, "no two of them are alike"
    labels = set()
    for name in files:
        split, kind, file = name.split("/")
        assert (split, kind) in {(split, kind) for split in ("train", "validation") for kind in ("images", "masks")}
        image = Image.open(tmp_path / "one" / name)
        assert (image.mode, image.size) == ("RGB" if kind == "images" else "L", (64, 64))
        assert f"{split}/{'masks' if kind == 'images' else 'images'}/{file}" in files
        if kind == "masks":
            labels |= set(image.tobytes())
    assert labels == {0, 1, 2, 3, 255}
    assert "0 written, 400 already there" in prepare("shapes", tmp_path / "one")


def test_shapes_are_drawn_at_the_size_asked_for(tmp_path):
    prepare("shapes", tmp_path / "large", size=96)
    sizes = {Image.open(path).size for path in (tmp_path / "large").rglob("*.png")}
    assert sizes == {(96, 96)}
    assert set(Image.open(tmp_path / "large/train/masks" / os.listdir(tmp_path / "large/train/masks")[0]).tobytes()) <= {0, 1, 2, 3, 255}  # fmt: skip
