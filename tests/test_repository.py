"""The repository itself: its shape, its configs and what an installed wheel holds. tests/docs has its documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import launcher
from tests.conftest import ROOT
from tests.docs.documents import TRACKED

CONFIGS = sorted(path for path in TRACKED if path.startswith("configs/") and path.endswith(".yaml"))


def test_the_top_level_has_the_agreed_shape():
    folders = {path.split("/")[0] for path in TRACKED if "/" in path}
    assert folders - {".ci", ".github"} == {
        "launcher",
        "entrypoints",
        "tests",
        "notebooks",
        "configs",
        "docker",
        "docs",
    }


def steps_of(workflow: str) -> list[str]:
    """The commands of a workflow's only job."""
    [job] = yaml.safe_load(workflow)["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-") and job["timeout-minutes"] <= 60
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    [python] = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python == "3.11", "the pins' own"
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_is_here():
    [command] = steps_of((ROOT / ".github/workflows/ci.yml").read_text())
    assert os.access(ROOT / command, os.X_OK)
    for step in ("docker-engine", "install"):
        assert os.access(ROOT / ".ci" / step, os.X_OK)
    called = re.findall(r"^make ([a-z-]+)\b|&& make ([a-z-]+)", (ROOT / command).read_text(), re.MULTILINE)
    assert {name for pair in called for name in pair if name} == {"lint", "test", "test-slow", "image", "test-docker"}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_opens_with_what_it_does_and_what_to_expect(config):
    head = (ROOT / config).read_text().split("name:")[0]
    assert all(word in head for word in ("# Run:", "# Smoke:", "# Expect:")), head


@pytest.fixture(scope="module")
def with_data(prepared, tmp_path_factory) -> Path:
    """A folder with what the configs' smoke runs read."""
    place = tmp_path_factory.mktemp("with-data")
    (place / "data").mkdir()
    for source in ("digits", "photos", "shapes"):
        (place / "data" / source).symlink_to(prepared(source))
    # the pictures of `cutouts` and stamps are Debian's, and not on every machine
    (place / "data/cutouts").symlink_to("shapes")
    (place / "data/stamps").symlink_to("photos")
    (place / "data/dinov2-small").mkdir()
    (place / "data/dinov2-small/model.safetensors").touch()  # a package's, of 90 MB
    return place


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_a_job_without_mistakes(config, smoke, with_data, monkeypatch):
    monkeypatch.chdir(with_data)
    job = launcher.load(ROOT / config, smoke=smoke)
    plans = [launcher.plan(job, on="aws")]
    if all(given.source in ("folder", "file", "run") for given in job.inputs.values()):
        plans.append(launcher.plan(job))
    assert smoke <= (len(plans) == 2)
    for plan in plans:
        assert [issue for issue in plan.errors if "no such run" not in issue.found] == []


def test_a_wheel_brings_the_entry_scripts(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"launcher/commands/main.py", "launcher/backends/toolkit.py", "launcher/entrypoints/train_kd.py"} <= set(
        names
    )
    assert {"launcher/py.typed", "launcher/entrypoints/training/py.typed"} <= set(names), (
        "type checkers read annotations there"
    )
    travelling = {path for path in TRACKED if path.startswith("entrypoints/")}
    assert {name.removeprefix("launcher/") for name in names if name.startswith("launcher/entrypoints/")} == travelling
    [about] = [zipfile.ZipFile(wheel).read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert "Description-Content-Type: text/markdown" in about and about.endswith((ROOT / "README.md").read_text())
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "from launcher.config import entrypoints; print(entrypoints.entrypoints_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path / "installed")
    assert Path(done.stdout.strip()) == tmp_path / "installed/launcher/entrypoints"
