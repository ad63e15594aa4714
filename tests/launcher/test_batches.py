"""What a plan finds about the global batch: whether processes can share it, and whether the images make one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import launcher


def test_a_default_batch_that_does_not_divide_is_found_before_the_hosts_start():
    def reported(hosts: int, **settings: int) -> list[tuple[str, str]]:
        values = {"name": "a", "script": "train_classifier.py", "distribution": "torchrun", "hyperparameters": settings}
        plan = launcher.plan(launcher.from_values({**values, "compute": {"instance_count": hosts}}))
        return [(one.found, one.fix) for one in plan.errors if one.key == "hyperparameters.global_batch_size"]

    wrong = "do not divide evenly among 3 processes"
    assert reported(3) == [(f"64 images, the default, {wrong}", "write global_batch_size: 63 or 66")]
    assert reported(3, global_batch_size=2) == [(f"2 images {wrong}", "write global_batch_size: 3")]
    assert reported(2) == reported(3, global_batch_size=6) == []


def told_of_images(folder: Path, hosts: int = 1, **values) -> list[tuple[str, str]]:
    inputs = {"train": {"folder": str(folder)}, **values.pop("inputs", {})}
    job = {"name": "a", "script": "train_classifier.py", "distribution": "torchrun", "inputs": inputs, **values}
    plan = launcher.plan(launcher.from_values({**job, "compute": {"instance_count": hosts}}))
    return [(one.found, one.fix) for one in plan.errors if one.key == "hyperparameters.global_batch_size"]


@pytest.fixture
def five(tmp_path):
    """Five images of two classes, and a hidden file."""
    for number in range(5):
        (tmp_path / f"train/{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"train/{number % 2}/{number}.jpg").touch()
    (tmp_path / "train/0/.DS_Store").touch()
    return tmp_path / "train"


def test_a_batch_of_more_than_all_images_is_found_before_the_start(five):
    wrong = f"make no batch of the 5 files in {five}"
    assert told_of_images(five) == [
        (f"64 images, the default, {wrong}", "write global_batch_size: 5, or less; or add images")
    ]
    six = {"hyperparameters": {"global_batch_size": 6}}
    assert told_of_images(five, 2, **six) == [
        (f"6 images {wrong}", "write global_batch_size: 4, or less; or add images")
    ]
    (five / "0/all").symlink_to("..")
    assert told_of_images(five, 6, **six) == [(f"6 images {wrong}", "give at least 6 images, one a process")]
    assert told_of_images(five, hyperparameters={"global_batch_size": 5}) == []


def test_images_that_cannot_be_counted_here_are_left_to_the_script(five, tmp_path, monkeypatch):
    """Shards, and images of another channel too; and scripts that may mean anything by a batch."""
    assert told_of_images(five, source=str(tmp_path), script="own.py", hyperparameters={"global_batch_size": 64}) == []
    assert told_of_images(five, inputs={"unlabelled": {"folder": str(five)}}) == []
    (five / "train-00000.tar").touch()
    assert told_of_images(five) == []
    (five / "train-00000.tar").unlink()

    def refused(folder, onerror, **how):
        onerror(PermissionError(folder))
        yield str(folder), [], []

    monkeypatch.setattr(os, "walk", refused)
    assert told_of_images(five) == []
