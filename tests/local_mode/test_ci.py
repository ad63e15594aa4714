"""Without an engine the tests with Docker fail and are not skipped, and what starts the engine says why not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

NO_ENGINE = {**os.environ, "LAUNCHER_TEST_DOCKER": "1", "DOCKER_HOST": "unix:///nowhere/docker.sock"}


def pytest_says(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**NO_ENGINE, **environment}, capture_output=True, text=True
    ).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "path",
    [
        "tests/local_mode/test_engine.py::test_a_failing_host_gives_its_own_exit_code_and_text_and_ends_the_other",
        pytest.param("tests/local_mode/test_parity.py", marks=pytest.mark.slow),
        pytest.param(
            "tests/docker/test_images.py::test_the_local_image_is_whole_and_has_no_compiler", marks=pytest.mark.slow
        ),
    ],
)
def test_without_an_engine_a_test_that_needs_one_fails(path):
    said = pytest_says(path)
    assert ("failed" in said or "error" in said) and "skipped" not in said and "passed" not in said


def test_where_docker_is_wanted_no_test_may_skip_itself(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it():\n    pytest.skip('no engine')\n")
    assert "1 failed" in pytest_says("-p", "tests.conftest", str(tmp_path))
    assert "1 skipped" in pytest_says("-p", "tests.conftest", str(tmp_path), LAUNCHER_TEST_DOCKER="")


def test_an_engine_that_cannot_be_reached_or_started_ends_ci_with_the_reason(tmp_path):
    done = subprocess.run([ROOT / ".ci/docker-engine"], env=NO_ENGINE, capture_output=True, text=True)
    assert done.returncode == 1 and "DOCKER_HOST=unix:///nowhere/docker.sock does not answer" in done.stderr
    fakes = {
        "docker": "echo Cannot connect; exit 1",
        "dockerd": "echo no cgroups here >&2; exit 1",
        "docker-compose": "exit 0",
        "systemctl": "echo no cgroups here >&2; exit 1",
        "sudo": 'exec "$@"',
        "pidof": "exit 1",
        "rm": "exit 0",
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run([ROOT / ".ci/docker-engine"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "no cgroups here" in done.stderr, done.stderr


KNOWN = "pyyaml 5.3 PYSEC-2020-96 5.3.1"


@pytest.mark.parametrize(
    ("of_the_sample", "of_the_pins", "status"),
    [(KNOWN, "exit 0", 0), (KNOWN, "exit 1", 1), ("No known vulnerabilities found", "exit 0", 3)],
    ids=["none known", "some known", "no data"],
)
def test_an_audit_without_data_is_not_taken_for_a_clean_one(tmp_path, of_the_sample, of_the_pins, status):
    """An index without these data answers as if nothing were known, so a version with known vulnerabilities is asked for first."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/pip-audit"
    command.write_text(
        f'#!/bin/sh\ncase "$*" in *constraints*) {of_the_pins};; *) echo "{of_the_sample}"; exit 1;; esac\n'
    )
    command.chmod(0o755)
    done = subprocess.run([ROOT / ".ci/audit", tmp_path], capture_output=True, text=True)
    assert done.returncode == status
    assert ("nothing was checked" in done.stderr) == (status == 3)
    assert (".ci/constraints-oldest.txt" in done.stdout) == (status != 3)
