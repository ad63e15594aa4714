"""`make lint`: what ruff and mypy look at, and that mypy finds what it is there for."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
import tomllib

from tests.conftest import ROOT

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]

FROZEN = """
    class FrozenModel:
        def __init__(self, name: str, precision: str):
            self.name{precision} = name{value}


    class Teacher:
        def __init__(self, members: list[FrozenModel]):
            self.members = members

        def to(self, device: str) -> list[tuple[str, str]]:
            return [(member.precision, device) for member in self.members]
"""
"""As entrypoints/training/teacher/frozen.py had it: what `to` reads is set nowhere, and only a run with a GPU came by."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """What mypy says by the repository's own configuration of a module with that fault, and of the same without."""
    folder = tmp_path_factory.mktemp("checked")
    texts = {"faulty": FROZEN.format(precision="", value="")}
    texts["sound"] = FROZEN.format(precision=", self.precision", value=", precision")
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", str(folder / "cache")]
    command += ["--follow-imports", "silent", *(str(folder / f"{name}.py") for name in texts)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_an_attribute_that_is_read_and_never_set_is_found(checked):
    assert checked.returncode == 1, checked.stderr
    [error] = re.findall(r"^.*\bfaulty\.py:.*error: (.*)$", checked.stdout, re.MULTILINE)
    assert error == '"FrozenModel" has no attribute "precision"  [attr-defined]'


def test_the_same_with_the_attribute_has_no_error(checked):
    assert "sound.py" not in checked.stdout and "checked 2 source files" in checked.stdout, checked.stdout


def test_lint_checks_both_folders_strictly():
    [lint] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split("/")[-1] for line in lint.splitlines()] == [
        *("ruff check .", "ruff format --check --quiet .", "mypy")  # mypy reads `files`
    ]
    assert CONFIG["files"] == ["launcher", "entrypoints"] and CONFIG["strict"]
    assert not {"exclude", "disable_error_code", "ignore_errors"} & set(CONFIG)
    assert not any(
        set(override) - {"module", "ignore_missing_imports", "implicit_reexport"} for override in CONFIG["overrides"]
    )


def test_every_ignored_error_says_why():
    for file in [*(ROOT / "launcher").rglob("*.py"), *(ROOT / "entrypoints").rglob("*.py")]:
        for line in file.read_text().splitlines():
            if "# type: ignore" in line:
                assert re.search(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \S+", line), f"{file}: {line}"
