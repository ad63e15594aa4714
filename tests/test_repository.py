"""The repository itself: its shape, its documents, its configs and what an installed wheel holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml

import launcher
from launcher.prepare import prepare
from tests.conftest import ROOT

TRACKED = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
).stdout.split("\0")[:-1]
DOCUMENTS = [path for path in TRACKED if path.endswith(".md")]
CONFIGS = sorted(path for path in TRACKED if path.startswith("configs/") and path.endswith(".yaml"))


def test_the_top_level_has_the_agreed_shape():
    folders = {path.split("/")[0] for path in TRACKED if "/" in path}
    assert folders - {".ci", ".github", "docs"} == {
        "launcher",
        "entrypoints",
        "tests",
        "notebooks",
        "configs",
        "docker",
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_link_is_broken(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_a_document_exists(document):
    text = (ROOT / document).read_text()
    known = subprocess.run([sys.executable, "-m", "launcher", "--help"], capture_output=True, text=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?launcher (\w+)", text, re.MULTILINE):
        assert f"    {command} " in known, command
    for target in re.findall(
        r"\bmake ([a-z-]+)", " ".join(re.findall(r"`[^`]+`|^    .*$|^```.*?^```", text, re.MULTILINE | re.DOTALL))
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def code_blocks(kind: str) -> list[str]:
    """The README's fenced blocks of a kind (yaml, python, or nothing)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [text for found, text in blocks if found == kind]


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
    called = re.findall(r"^make ([a-z-]+)$|&& make ([a-z-]+)", (ROOT / command).read_text(), re.MULTILINE)
    assert {name for pair in called for name in pair if name} == {"lint", "test", "test-slow", "image", "test-docker"}


def test_the_workflow_for_users_in_the_readme_calls_what_is_here():
    """tests/local_mode/test_your_ci.py runs it."""
    [workflow] = [block for block in code_blocks("yaml") if block.startswith("# .github/workflows/")]
    commands = "\n".join(steps_of(workflow))
    for path in re.findall(r"vision-launcher/((?:\.ci|docker)/\S+)", commands):
        assert (ROOT / path).is_file(), path
    [extra] = re.findall(r"vision-launcher\[(\w+)\]", commands)
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [arguments] = re.findall(r"^launcher (run .*)$", commands, re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", "launcher", *arguments.split()], capture_output=True, text=True)
    assert "train.yaml: no such file" in done.stderr and "unrecognized" not in done.stderr


def test_the_mistakes_in_the_readme_are_what_is_printed(tmp_path):
    [broken] = [block for block in code_blocks("yaml") if block.startswith("# broken.yaml")]
    (tmp_path / "broken.yaml").write_text(broken)
    [shown] = [block for block in code_blocks("") if block.startswith("$ launcher run broken.yaml")]
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "run", "broken.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert shown == "$ launcher run broken.yaml\n" + done.stderr


def test_the_config_in_the_readme_is_a_job(with_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(with_data / "data")
    [config] = [block for block in code_blocks("yaml") if block.startswith("name: my-job")]
    Path("job.yaml").write_text(config)
    for smoke in (False, True):
        plan = launcher.plan(launcher.load("job.yaml", smoke=smoke))
        assert [issue.key for issue in plan.issues] == ["inputs.teacher"], (
            "nothing is wrong but that the teacher was not run yet"
        )


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_opens_with_what_it_does_and_what_to_expect(config):
    head = (ROOT / config).read_text().split("name:")[0]
    assert all(word in head for word in ("# Run:", "# Smoke:", "# Expect:")), head


@pytest.fixture(scope="module")
def with_data(tmp_path_factory) -> Path:
    """A folder with what the configs' smoke runs read."""
    place = tmp_path_factory.mktemp("with-data")
    for source in ("digits", "photos", "shapes"):
        prepare(source, place / "data" / source)
    prepare("shapes", place / "data/cutouts")  # the pictures of `cutouts` are Debian's, and not on every machine
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
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "from launcher.config import entrypoints; print(entrypoints.entrypoints_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path / "installed")
    assert Path(done.stdout.strip()) == tmp_path / "installed/launcher/entrypoints"
