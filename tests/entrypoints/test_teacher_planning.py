"""A teacher that a script would refuse is refused while planning, by its config.json; one that it takes is not."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from training.models import export, segmenter
from training.teacher import frozen

import launcher
from launcher.config.issues import Issue
from launcher.planner import teachers
from tests.conftest import ROOT
from tests.entrypoints.teachers import CLASSES, archive, exported

KD = {"student": "test_vit", "student_options": {"in_chans": 1}, "image_size": 16}
SEGMENTATION = {"model": "resnet10t", "model_options": {"in_chans": 1}, "classes": 3, "class_names": CLASSES,
                "image_size": [32, 64], "hard_label_weight": 0.5}  # fmt: skip


def issues(place: Path, train: Path, settings: dict[str, Any], **more: Any) -> list[Issue]:
    script = "train_segmentation.py" if "model" in settings else "train_kd.py"
    kind = "file" if place.is_file() else "folder"
    values = {"teacher": {kind: str(place)}, "train": {"folder": str(train)}, "validation": {"folder": str(train)}}
    job = launcher.from_values(
        {"name": "x", "script": script, "inputs": values, "hyperparameters": {**settings, **more}}
    )
    return list(teachers.check(job, {"teacher": str(place), "train": str(train)}))


@pytest.fixture
def train(tmp_path) -> Path:
    for name in CLASSES:
        (tmp_path / "train" / name).mkdir(parents=True)
    return tmp_path / "train"


def segmenter_in(folder: Path) -> Path:
    model = segmenter.build("resnet10t", {"in_chans": 1}, 3, decoder_channels=8)
    export.save(model, folder, name="resnet10t", options={"in_chans": 1}, classes=CLASSES, image_size=[32, 64],
                decoder={"kind": "fpn", "channels": 8})  # fmt: skip
    return folder


CASES = {
    "it fits": ({}, None, ""),
    "channels": ({"student_options": {"in_chans": 3}}, None, "made for 1 channels, the student sees 3"),
    "other classes": ({}, "d", "knows the classes a, b, c, the training images have a, b, c, d"),
    "its own name": ({"teacher": "vit_tiny_patch16_224"}, None, ""),
    "other options": (
        {"teacher": "vit_tiny_patch16_224", "teacher_options": {"depth": 1}},
        None,
        "made for 3 channels",
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("more", "another_class", "expected"), CASES.values(), ids=CASES)
def test_a_plan_says_of_a_classifier_what_the_script_says(tmp_path, train, more, another_class, expected, packed):
    exported(tmp_path / "model")
    if another_class:
        (train / another_class).mkdir()
    place = tmp_path / "model"
    if packed:
        place = tmp_path / "packed/model.tar.gz"
        archive(tmp_path / "model", place)
    found = issues(place, train, KD, **more)
    assert [issue.level for issue in found] == (["error"] if expected else []) and expected in str(found)
    settings = {**KD, **more}
    refused = ""
    try:
        frozen.load(
            tmp_path / "model",
            sorted(entry.name for entry in train.iterdir()),
            channels=settings["student_options"]["in_chans"],
            image_size=16,
            name=settings.get("teacher"),
            options=settings.get("teacher_options"),
        )
    except ValueError as error:
        refused = str(error)
    assert bool(refused) == bool(expected), refused


@pytest.mark.parametrize("page", ["README.md", "docs/run.md"])
def test_the_first_job_of_a_page_plans_with_the_quickstarts_teacher(tmp_path, page):
    """Whose images are grey."""
    exported(tmp_path / "model")
    for name in CLASSES:
        (tmp_path / "images" / name).mkdir(parents=True)
    [text] = re.findall(r"```yaml\n(name: my-job.*?)```", (ROOT / page).read_text(), re.DOTALL)
    values = yaml.safe_load(text)
    del values["smoke"]
    values["inputs"] = {name: {"folder": str(tmp_path / "images")} for name in ("train", "validation")}
    values["inputs"]["teacher"] = {"folder": str(tmp_path / "model")}
    job = launcher.from_values(values)
    assert not [*teachers.check(job, {"teacher": str(tmp_path / "model"), "train": str(tmp_path / "images")})]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ""),
        ({"class_names": None}, ""),
        ({"class_names": ["a", "b", "d"]}, "knows the classes a, b, c, the training images have a, b, d"),
        ({"image_size": [64, 64]}, "images scaled to [32, 64], the student's are scaled to [64, 64]"),
        ({"classes": 4, "class_names": None}, "knows the classes a, b, c, the training images have 0, 1, 2, 3"),
        ({"model_options": {}}, "made for 1 channels, the student sees 3"),
    ],
)
def test_a_plan_says_of_a_segmenter_what_the_script_says(tmp_path, train, more, expected):
    place = segmenter_in(tmp_path / "model")
    settings = {**SEGMENTATION, **more}
    found = issues(place, train, settings)
    assert [issue.level for issue in found] == (["error"] if expected else []) and expected in str(found)
    names = settings["class_names"] or [str(index) for index in range(settings["classes"])]
    refused = ""
    try:
        frozen.load(
            place,
            names,
            channels=settings["model_options"].get("in_chans", 3),
            image_size=settings["image_size"],
            pixels=True,
        )
    except ValueError as error:
        refused = str(error)
    assert bool(refused) == bool(expected), refused


def test_a_segmenter_is_no_classifier_and_the_other_way_round(tmp_path, train):
    [issue] = issues(segmenter_in(tmp_path / "s"), train, KD)
    assert "gives every pixel a class" in issue.found and "train_segmentation.py" in issue.fix
    exported(tmp_path / "model")
    [issue] = issues(tmp_path / "model", train, SEGMENTATION)
    assert "gives an image a class" in issue.found and "train_kd.py" in issue.fix


def packed(place: Path, **files: bytes) -> Path:
    with tarfile.open(place, "w:gz", compresslevel=1) as opened:
        for name, content in files.items():
            about = tarfile.TarInfo(name.replace("_", "."))
            about.size = len(content)
            opened.addfile(about, io.BytesIO(content))
    return place


@pytest.mark.parametrize(
    ("content", "level", "expected"),
    [
        (b"", "error", "damaged"),
        (b"no archive", "error", "damaged"),
        (gzip.compress(b"x" * 600), "error", "damaged"),
    ],
    ids=["empty", "text", "no tar"],
)
def test_a_damaged_archive_is_refused(tmp_path, train, content, level, expected):
    (tmp_path / "model.tar.gz").write_bytes(content)
    [issue] = issues(tmp_path / "model.tar.gz", train, KD)
    assert issue.level == level and expected in issue.found


@pytest.mark.parametrize(
    ("described", "level", "expected"),
    [
        (b"{", "error", "damaged"),
        (b"[]", "error", "is no object"),
        (b'{"encoder": 3}', "error", "is no object"),
        (b'{"hello": 1}', "not checked", "is not one of timm's"),
        (b'{"architecture": "x", "pretrained_cfg": 3, "model_args": [], "label_names": "abc"}', None, ""),
        (
            b'{"architecture": "x", "pretrained_cfg": {"input_size": "x"}, "label_names": [1, null]}',
            "error",
            "classes 1, None",
        ),
    ],
)
def test_a_description_of_any_kind_is_judged_or_said_not_to_be(tmp_path, train, described, level, expected):
    found = issues(packed(tmp_path / "model.tar.gz", config_json=described), train, KD)
    assert [issue.level for issue in found] == ([level] if level else []) and expected in str(found)


def test_what_is_not_looked_at_is_said_to_be(tmp_path, train):
    late = packed(tmp_path / "late.tar.gz", model_safetensors=bytes(teachers.MAX_BYTES), config_json=b"{}")
    [issue] = issues(late, train, KD)
    assert issue.level == "not checked" and "no config.json in its first 64 MiB" in issue.found
    values = {
        "name": "x",
        "script": "train_kd.py",
        "inputs": {"teacher": {"s3": "s3://team-data/teacher/"}},
        "hyperparameters": KD,
    }
    [issue] = teachers.check(launcher.from_values(values), {})
    assert issue.level == "not checked" and "not on this machine" in issue.found
    alone = {**values, "hyperparameters": {**KD, "hard_label_weight": 1}}
    assert list(teachers.check(launcher.from_values(alone), {})) == []


def test_an_ensemble_is_not_judged(tmp_path, train):
    for number in (1, 2):
        exported(tmp_path / f"channel/{number}")
    [issue] = issues(tmp_path / "channel", train, KD)
    assert issue.level == "not checked" and "several archives or folders" in issue.found
