"""`make test` and `make test-slow`: together they run every test that needs no Docker engine, and none twice."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

from tests.conftest import ROOT

TARGETS = {
    "test-device": [["--dist", "loadfile", "tests/device"]],
    "test": [["--ignore=tests/device", "-m", "not slow"]],
    "test-slow": [
        ["--ignore=tests/device", "-m", "slow and not alone"],
        ["--ignore=tests/device", "-m", "slow and alone"],
    ],
}
"""What each gives pytest: tests/device is a session of its own, which looks at its lines when all of it has run. Tests that measure a quiet
machine, or make it busy, run with none beside them."""


def given(target: str) -> list[list[str]]:
    """The arguments of a target's calls of pytest."""
    [recipe] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    calls = [shlex.split(line) for line in recipe.splitlines()]
    return [words[1:] for words in calls if words[0] in ("$(PYTEST)", "$(ALONE)")]


def test_the_targets_differ_in_the_marker_alone():
    assert {target: given(target) for target in TARGETS} == TARGETS
    assert "\t$(MAKE) --jobs=2 lint test-device WORKERS=$(WORKERS)\n" in (ROOT / "Makefile").read_text()


def test_no_test_on_the_stand_in_gpu_is_slow():
    """They run whole, in `make test`."""
    assert not [file for file in (ROOT / "tests/device").rglob("*.py") if "mark.slow" in file.read_text()]


def test_ffcv_is_built_once_its_headers_are_there(tmp_path):
    pip, headers, calls = (tmp_path / name for name in ("venv/bin/pip", "headers", "calls"))
    pip.parent.mkdir(parents=True)
    pip.write_text(
        f'#!/bin/sh\nmkdir -p {tmp_path}/others\necho "$@" >> {calls}\ncase "$*" in *ffcv==*) test -e {headers};; esac\n'
    )
    pip.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def made() -> tuple[bool, bool, int]:
        command = ["make", f"{tmp_path}/others/.ffcv", f"VENV={tmp_path}/venv", f"OTHERS={tmp_path}/others"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        stamps = [(tmp_path / "others" / name).exists() for name in (".installed", ".ffcv")]
        return *stamps, len(calls.read_text().splitlines())

    assert made() == (True, False, 2), "without headers the build fails, and make goes on"
    assert made() == (True, False, 3), "and it is tried again"
    headers.touch()
    assert made() == (True, True, 4)
    assert made() == (True, True, 4), "once"
