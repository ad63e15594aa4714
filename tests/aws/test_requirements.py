"""requirements.txt of the source package: made for what a script imports and an image lacks, never beside the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import launcher
from launcher.aws import catalog, requirements
from launcher.backends.aws import Aws
from launcher.config.entrypoints import entrypoints_folder
from launcher.planner.source_package import source_files

NEW_IMAGE = {"framework_version": "2.13", "python": "py312"}
AWS_IMAGE = {"framework_version": "2.0.1", "python": "py310"}
BY_ADDRESS = {"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"}
OWN_IMAGE = {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"}


def required(
    source: Path | None, script: str = "train.py", image: dict | None = AWS_IMAGE, **hyperparameters
) -> dict[str, str]:
    """Package -> version in the requirements.txt of the source package; {} without one."""
    job = launcher.from_values({"name": "test", "script": script, "image": image, "hyperparameters": hyperparameters})
    files, issues = source_files(source or entrypoints_folder())
    assert issues == []
    sent = Aws().source_files(job, files)
    assert sent == sorted(sent, key=lambda file: file.path)
    found = [file for file in sent if file.path == "requirements.txt"]
    assert len(found) <= 1
    if not found:
        return {}
    text = found[0].read().decode()
    assert found[0].size == len(text) and found[0].mode == 0o644
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.fixture
def write(tmp_path):
    """Writes files of a source folder and returns it: `write({"train.py": "import timm"})`."""

    def write(files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "script", ["train_classifier.py", "train_kd.py", "train_segmentation.py", "label_images.py", "label_pixels.py"]
)
@pytest.mark.parametrize("image", [NEW_IMAGE, BY_ADDRESS, None], ids=["by version", "by address", "none yet"])
def test_the_kits_scripts_bring_what_awss_images_lack_as_it_was_tested(script, image):
    assert required(None, script, image) == dict(catalog.packages().pins)


@pytest.mark.parametrize("image", [AWS_IMAGE, {"framework_version": "2.10", "python": "py313"}])
def test_opencv_is_the_images_own_where_it_has_one(image):
    """A newer one takes no numpy 1, and torch of those images takes no numpy 2."""
    pins = dict(catalog.packages().pins)
    assert pins.pop("opencv-python-headless") and required(None, "train_kd.py", image) == pins


def test_what_a_setting_needs_is_required_with_it_alone():
    brought = required(None, "train_kd.py", export_onnx=True)
    without = required(None, "train_kd.py", export_onnx=False)
    assert set(brought) == {*without, "onnx", "onnxruntime"} and not {"onnx", "onnxruntime"} & set(without)


def test_ray_travels_with_a_job_that_preprocesses_on_other_hosts_alone():
    without = required(None, "train_kd.py", worker_type="processes")
    assert required(None, "train_kd.py", worker_type="remote") == {**without, "ray": "2.60.0"} and "ray" not in without
    constraints = (Path(__file__).parents[2] / ".ci/constraints.txt").read_text()
    assert "\nray==2.60.0\n" in constraints, "the version that is tested"


@pytest.mark.parametrize(
    ("image", "package"),
    [
        ({"framework_version": "2.1.0", "python": "py310"}, "nvidia-dali-cuda120"),
        ({"framework_version": "2.8", "python": "py312"}, "nvidia-dali-cuda120"),
        (BY_ADDRESS, "nvidia-dali-cuda130"),
        ({"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker"}, "nvidia-dali-cuda120"),
        ({"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker"}, "nvidia-dali-cuda130"),
        (AWS_IMAGE, None),
    ],
)  # fmt: skip
def test_dali_is_required_for_the_images_cuda(image, package):
    brought = required(None, "train_classifier.py", image, preprocessing="dali")
    assert set(brought) - set(catalog.packages().pins) == ({package} if package else set())
    constraints = (Path(__file__).parents[2] / ".ci/constraints.txt").read_text()
    assert package is None or f"nvidia-dali-cuda130=={brought[package]}\n" in constraints, "the version that is tested"
    assert "dali" not in str(required(None, "train_classifier.py", image, preprocessing="cpu"))


def test_an_image_of_the_users_own_is_left_as_it_is():
    assert required(None, "train_kd.py", OWN_IMAGE) == {}


def test_a_script_that_needs_nothing_beyond_the_image_brings_nothing(write):
    assert required(write({"train.py": "import torch, numpy as np\nfrom PIL import Image"})) == {}


@pytest.mark.parametrize(("own", "lacks"), [("opencv-python==4.12", []), ("opencv-contrib-python-headless", []), ("timm", ["opencv-python-headless"])])  # fmt: skip
def test_of_packages_with_the_same_module_one_is_enough(write, own, lacks):
    """Two would overwrite each other's cv2."""
    source = write({"train.py": "import cv2", "requirements.txt": f"{own}\n"})
    values = {
        "name": "x",
        "script": "train.py",
        "source": str(source),
        "image": {"framework_version": "2.14.0", "python": "py312"},
    }
    job = launcher.from_values(values)
    assert [line.partition("==")[0] for line in requirements.lacking(job, source_files(source)[0])] == lacks


def test_the_users_own_requirements_are_not_touched(write, tmp_path):
    source = write({"train.py": "import timm", "requirements.txt": "timm==0.9.2\n"})
    assert required(source) == {"timm": "0.9.2"}


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "import timm"},
        {"train.py": "import os, timm.data as data"},
        {"train.py": "from timm.models import create_model"},
        {"train.py": "def main():\n    try:\n        import timm\n    except ImportError:\n        timm = None"},
        {"train.py": "import helper", "helper.py": "import timm"},
        {"train.py": "from helper import build", "helper.py": "import timm"},
        {"train.py": "import models", "models/__init__.py": "import timm"},
        {"train.py": "import models.vit", "models/vit.py": "import timm"},
        {"train.py": "import models.vit", "models/__init__.py": "import timm", "models/vit.py": ""},
        {"train.py": "from models import vit", "models/__init__.py": "", "models/vit.py": "import timm"},
        {"train.py": "import models", "models/__init__.py": "from . import vit", "models/vit.py": "import timm"},
        {"train.py": "import models", "models/__init__.py": "from .vit import build", "models/vit.py": "import timm"},
        {"train.py": "import models.a.b", "models/a/b.py": "from ..vit import x", "models/vit.py": "import timm"},
        {"train.py": "import a", "a.py": "import b", "b.py": "import a, timm"},
        {"train.py": "from training import models", "training/models.py": "import timm"},
    ],
    ids=lambda files: " + ".join(f"{path}: {text!r}" for path, text in files.items()),
)
def test_an_import_is_found_through_the_source_files(write, files):
    assert list(required(write(files))) == ["timm"]


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "x = 'import timm'  # import timm"},
        {"train.py": "", "unused.py": "import timm"},
        {"train.py": "import timm", "timm.py": ""},
        {"train.py": "from timm.models import create_model", "timm/__init__.py": "", "timm/models.py": ""},
        {"train.py": "from models import timm", "models.py": "timm = 1"},
        {"train.py": "import helper", "helper.py": "not python ("},
        {"train.py": "import helper", "helper.py": "\0"},
    ],
    ids=lambda files: " + ".join(f"{path}: {text!r}" for path, text in files.items()),
)
def test_what_only_looks_like_an_import_brings_nothing(write, files):
    assert required(write(files)) == {}


def test_a_script_in_a_folder_finds_modules_beside_it_and_at_the_top(write):
    files = {"jobs/train.py": "import beside, top", "jobs/beside.py": "import timm", "top.py": "import safetensors"}
    assert set(required(write(files), "jobs/train.py")) == {"timm", "safetensors"}


def test_the_same_script_brings_the_same_bytes(write):
    source = write({"train.py": "import safetensors, timm"})
    job = launcher.from_values({"name": "test", "script": "train.py", "image": AWS_IMAGE})
    first, second = (requirements.complete(job, source_files(source)[0]) for _ in range(2))
    assert [file.read() for file in first] == [file.read() for file in second]


def test_the_requirements_are_shown_by_a_plan_for_sagemaker_and_by_no_other(write):
    values = {"name": "t", "script": "train.py", "source": str(write({"train.py": "import timm"}))}
    job = launcher.from_values({**values, "compute": {"instance_type": "ml.m5.xlarge"}})
    source_files = {on: [file.path for file in launcher.plan(job, on=on).files] for on in ("aws", "process")}
    assert "requirements.txt" in source_files["aws"]
    assert "requirements.txt" not in source_files["process"]
