"""What a plan finds about folders of images: preparations that were not finished, and channels of different classes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

import launcher
from launcher.commands import main
from launcher.prepare import prepare
from tests.conftest import as_in_a_terminal
from tests.launcher.test_prepare import write_images


def reported(folders: dict[str, str], key: str, **values) -> list[launcher.Issue]:
    """The errors about a key of a job with these inputs."""
    job = {
        "name": "a",
        "script": "train_classifier.py",
        "distribution": "none",
        "compute": {"max_hours": 0.1},
        **values,
    }
    job["inputs"] = {name: {"folder": str(folder)} for name, folder in folders.items()}
    job["hyperparameters"] = {"global_batch_size": 1, **values.get("hyperparameters", {})}
    return [issue for issue in launcher.plan(launcher.from_values(job)).errors if issue.key == key]


def told_of_classes(root, **values) -> list[str]:
    folders = {name: root / name for name in ("train", "validation")}
    return [issue.found for issue in reported(folders, "inputs.validation", **values)]


STOPS = """
import signal, sys
from launcher.commands import main
named = []
def interrupt(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith((".png", ".tar")):
        named.append(arguments[1])
        if len(named) == 2:
            signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
sys.exit(main.main(sys.argv[1:]))
"""
"""The launcher, which gets a Ctrl-C as its second file gets its name, however fast the others are."""


@pytest.mark.parametrize("how", [[], ["--shards", "50KB"], ["--unlabelled", "--size", "8", "--jpeg-quality", "80"]])
def test_a_preparation_that_was_stopped_is_no_input_until_the_named_command_has_finished_it(tmp_path, how):
    target = tmp_path / "it's data"
    split = target / ("unlabelled" if "--unlabelled" in how else "train")
    command = [sys.executable, "-c", STOPS, "prepare", "digits", str(target), "--jobs", "1", *how]
    stopped = subprocess.run(command, stderr=subprocess.DEVNULL, preexec_fn=as_in_a_terminal)
    assert stopped.returncode == 130 and len([*split.rglob("*.png"), *split.rglob("train-*.tar")]) == 1
    [issue] = reported({"train": split}, "inputs.train")
    assert issue.found == f"{target} was not finished"
    assert main.main(shlex.split(issue.fix.split(": launcher ")[1])) == 0
    assert not reported({"train": split}, "inputs.train")


def test_a_file_of_the_records_name_that_another_program_wrote_says_nothing(tmp_path):
    write_images(tmp_path, "train/a/1.png", "unlabelled/1.png")
    for text in ("", "[1]", '{"source": {}}', '{"prepared": true}'):
        (tmp_path / "prepared.json").write_text(text)
        assert not reported({"train": tmp_path / "train"}, "inputs.train"), text
    (tmp_path / "prepared.json").write_text('{"source": "digits", "unlabelled": true}')
    assert not reported({"train": tmp_path / "train"}, "inputs.train"), "it makes the folder beside this one"
    assert reported({"train": tmp_path / "unlabelled"}, "inputs.train")


def test_channels_of_different_classes_are_found_before_the_start(tmp_path):
    """As of a class of one image, which stays out of the held-out ones."""
    write_images(tmp_path / "in", *(f"{label}/{number}.png" for label in "ab" for number in range(4)), "rare/0.png")
    prepare(str(tmp_path / "in"), tmp_path)
    different = "the channels train and validation hold different classes: "
    assert told_of_classes(tmp_path) == [f"{different}only {tmp_path}/train has rare"]
    write_images(tmp_path, "validation/new/1.png", "validation/.hidden/1.png", "validation/rare/1.png")
    assert told_of_classes(tmp_path) == [f"{different}only {tmp_path}/validation has new"]
    write_images(tmp_path, "train/new/1.png")
    os.mkdir(tmp_path / "train/nothing in it")
    assert told_of_classes(tmp_path) == []


def test_classes_that_the_script_does_not_compare_are_no_mistake(tmp_path):
    write_images(tmp_path, "train/a/1.png", "train/b/1.png", "validation/a/1.png")
    assert told_of_classes(tmp_path)
    assert told_of_classes(tmp_path, script="train_segmentation.py") == []
    assert told_of_classes(tmp_path, source=str(tmp_path), script="own.py") == []
    alone = {"unlabelled": {"alone": True}}
    assert told_of_classes(tmp_path, script="train_kd.py", hyperparameters=alone) == []
    (tmp_path / "validation/validation-00000.tar").touch()
    assert told_of_classes(tmp_path) == [], "shards come with a list"
