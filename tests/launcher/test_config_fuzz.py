"""Thousands of broken configs: each is planned, or refused with mistakes that name their keys; none ends in an uncaught exception."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from pathlib import Path

import pytest

import launcher
from launcher.backends import base
from launcher.backends.plans import plan_config
from launcher.commands import main
from launcher.config.issues import Issue
from launcher.config.job import Job
from tests.conftest import ROOT, write_batch
from tests.launcher.config_mutations import mutated

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

CASES = 1200

QUICK = 8
"""One case in this number is always tried; the others where the slow tests run."""

BACKENDS = ("process", "aws", "docker")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty store and home, and the data that the configs name; the source files are listed once."""
    for name in ("digits", "photos", "shapes", "cutouts"):
        for part in ("train", "validation"):
            write_batch(tmp_path / "data" / name / part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    listed = functools.cache(base.source_files)
    monkeypatch.setattr(base, "source_files", lambda source, job: listed(source))
    return tmp_path


def issues_of(config: Path, number: int) -> tuple[Issue, ...]:
    """What planning finds, whether it plans or refuses; everything that it gives can be printed."""
    try:
        plan = plan_config(config, on=BACKENDS[number % len(BACKENDS)], smoke=number % 5 == 0)
    except launcher.UserError as error:
        assert str(error).encode("utf-8", "backslashreplace")
        return error.issues
    assert str(plan) and plan.to_json()
    return plan.issues


def names_its_key(issue: Issue, config: Path) -> bool:
    """Whether an issue says where: a key of a job or what stands in its place, an option, or a line of the file."""
    root = issue.key.split(" (line")[0].split(".")[0].split(":")[0]
    return (
        root in Job.model_fields
        or root == "smoke"
        or root.startswith("--on")
        or "(line" in issue.key
        or str(config) in issue.key
    )


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] if first else []) for first in range(QUICK)]
)
def test_no_config_ends_in_an_uncaught_exception_and_each_mistake_names_its_key(place, first):
    config = place / "config.yaml"
    refused = 0
    for number in range(first, CASES, QUICK):
        text = mutated(CONFIGS[number % len(CONFIGS)].read_text(), random.Random(number))
        config.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            found = issues_of(config, number)
        except Exception as error:
            raise AssertionError(f"case {number}: {error!r}\n{text}") from error
        refused += any(issue.level == "error" for issue in found)
        for issue in found:
            assert issue.found and issue.fix and names_its_key(issue, config), (number, issue, text)
    assert refused > CASES / QUICK / 2


def test_the_command_prints_them_as_utf_8(place):
    config, ends = place / "config.yaml", set()
    for number in range(60):
        text = mutated(CONFIGS[number % len(CONFIGS)].read_text(), random.Random(10_000 + number))
        config.write_bytes(text.encode("utf-8", "surrogatepass"))
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            ends.add(main.main(["plan", str(config), "--on", BACKENDS[number % len(BACKENDS)]]))
        out.flush()
        assert "Traceback" not in out.buffer.getvalue().decode()
    assert ends == {0, 2}
