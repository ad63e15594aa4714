"""Images with masks through NVIDIA DALI on the CPU: what the reference path shows of them, and masks to the bit."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from training.data.batches import MaskedBatch
from training.data.dali.pipeline import DaliBatches
from training.data.decode.decoding import BrokenImage
from training.data.loaders import open_loaders
from training.data.masks import open_data
from training.distributed.world import World
from training.settings.segmentation import SegmentationSettings

import launcher
from launcher.prepare import prepare

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
KINDS = ("JPEG", "on its side", "grey", "PNG", "palette", "WebP", "CMYK", "large")


def settings(**values) -> SegmentationSettings:
    small = {"classes": 4, "image_size": (60, 90), "crop_size": (48, 64), "min_scale": 0.5, "max_scale": 2.0}
    return SegmentationSettings(
        model="x", **{**small, "global_batch_size": 4, "horizontal_flip": True, "num_workers": 1, "seed": 3, **values}
    )


@pytest.fixture
def root(tmp_path) -> Path:
    """Eight photographs of all kinds of files, with the quarters of their brightness as masks."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number, kind in enumerate(KINDS):
        size = (640, 427) if kind == "large" else (100 + 20 * number, 150 - 9 * number)
        image = Image.fromarray(load_sample_images().images[number % 2]).resize(size, Image.Resampling.LANCZOS)
        mask = Image.fromarray(np.asarray(image.convert("L")) // 64)
        exif, how = Image.Exif(), {"format": "JPEG", "quality": 92}
        if kind == "on its side":
            exif[0x0112] = 6
            image, how = image.transpose(Image.Transpose.ROTATE_90), {**how, "exif": exif}
        elif kind in ("PNG", "WebP", "palette"):
            image, how = (
                image.convert("P") if kind == "palette" else image,
                {"format": "WEBP" if kind == "WebP" else "PNG"},
            )
            how |= {"lossless": True} if kind == "WebP" else {}
        elif kind in ("grey", "CMYK"):
            image = image.convert("L" if kind == "grey" else kind)
        ending = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[how["format"]]
        image.save(tmp_path / f"images/{number}.{ending}", **how)
        mask.save(tmp_path / f"masks/{number}.png")
    return tmp_path


def epochs(root: Path, world: World = ALONE, channels: int = 3, views: int = 2, output: Path | None = None, **values) -> list[MaskedBatch]:  # fmt: skip
    chosen = settings(**values)
    data = open_data(root, root, chosen, channels, output=output)
    loaders = open_loaders(data, chosen, world, batch_size_per_device=chosen.global_batch_size // world.size)
    assert isinstance(loaders.train, DaliBatches) == (chosen.preprocessing == "dali")
    made = []
    for epoch in range(1, views + 1):
        loaders.train_batches.start(epoch)
        made += loaders.train
    return made


def fidelity(one: torch.Tensor, other: torch.Tensor) -> float:
    """Peak signal to noise, in dB."""
    return float(10 * torch.log10(255**2 / (one.double() - other.double()).square().mean().clamp(min=1e-9)))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_the_reference_paths_and_masks_are_so_to_the_bit(root, channels):
    found, wanted = (epochs(root, channels=channels, views=6, preprocessing=name) for name in ("dali", "cpu_reference"))
    assert len(found) == len(wanted) == 12
    seen = set()
    for one, other in zip(found, wanted, strict=True):
        assert one._fields == other._fields and one.images.shape == other.images.shape == (4, channels, 48, 64)
        assert one.images.dtype == one.masks.dtype == torch.uint8
        assert torch.equal(one.masks, other.masks)
        for image, expected, mask in zip(one.images, other.images, other.masks, strict=True):
            assert fidelity(image, expected) > 45
            beyond = mask == 255
            assert (image[:, beyond] == 0).all(), "black where there is no image"
            seen.add(bool(beyond.any()))
    assert seen == {True, False}


def test_a_mask_lies_on_what_it_labels(root):
    """An image and its mask cut or mirrored apart would not agree."""
    for batch in epochs(root, channels=1, preprocessing="dali", min_scale=1.0, max_scale=2.0):
        agree = (batch.images[:, 0] // 64 == batch.masks)[batch.masks != 255]
        assert agree.double().mean() > 0.75


def test_two_ranks_share_the_batches_of_one(root):
    whole = epochs(root, preprocessing="dali")
    halves = [
        epochs(root, World(rank, 2, rank, torch.device("cpu"), "none", "test"), preprocessing="dali") for rank in (0, 1)
    ]
    for batch, *parts in zip(whole, *halves, strict=True):
        for name in MaskedBatch._fields:
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))


def test_what_comes_in_place_of_a_broken_image_or_mask_is_what_the_reference_path_brings(root, tmp_path):
    file = io.BytesIO()
    Image.effect_noise((90, 70), 60).save(file, "PNG")
    noise = bytearray(file.getvalue())
    noise[len(noise) // 2] ^= 255
    (root / "images/0.jpg").write_bytes(b"")
    (root / "masks/2.png").write_bytes(b"no mask")
    (root / "images/3.png").write_bytes(noise)  # its header is in order
    Image.new("L", (90, 70)).save(root / "masks/3.png")
    found, wanted = (epochs(root, preprocessing=name, output=tmp_path / name) for name in ("dali", "cpu_reference"))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.masks, other.masks)
        assert all(fidelity(image, expected) > 45 for image, expected in zip(one.images, other.images, strict=True))
    listings = [sorted((tmp_path / name / "broken_images.txt").read_text().splitlines()) for name in ("dali", "cpu_reference")]  # fmt: skip
    assert listings[0] == listings[1]
    assert [line.split(" cannot be read as ")[0][len(str(root)) + 1 :] for line in listings[0]] == ["images/0.jpg", "images/3.png", "masks/2.png"]  # fmt: skip
    with pytest.raises(BrokenImage, match=r"(images/[03]|masks/2)\.\w+ cannot be read as"):
        epochs(root, preprocessing="dali", on_broken_image="fail")


def test_a_mask_of_another_size_ends_a_run_all_the_same(root):
    Image.new("L", (60, 39)).save(root / "masks/2.png")
    with pytest.raises(ValueError, match="masks/2.png is 60 × 39 pixels, its image 2.jpg 140 × 132"):
        epochs(root, preprocessing="dali")


@pytest.mark.slow
def test_a_run_trains_on_shards_of_pairs(tmp_path):
    prepare(
        "shapes", tmp_path / "shapes", size=64, shard_size="1MB", jobs=1
    )  # no fork beside the threads of other tests
    run = launcher.run(launcher.plan(launcher.from_values({
        "name": "dali", "script": "train_segmentation.py",
        "inputs": {name: {"folder": str(tmp_path / "shapes" / name)} for name in ("train", "validation")},
        "hyperparameters": {"model": "resnet10t", "classes": 4, "image_size": [64, 64], "max_steps": 4, "global_batch_size": 16,
                            "horizontal_flip": True, "preprocessing": "dali", "num_workers": 1},
    })))  # fmt: skip
    assert run.wait(150) == "Completed", "\n".join(line for _, line in run.logs())
    assert run.result()["steps"] == 4
    lines = "\n".join(line for _, line in run.logs())
    assert "preprocessing dali:" in lines and "on the CPU, 1 thread, as num_workers says" in lines
