"""Real runs of this machine, one of them beside programs that take its cores: the comparison says that they cannot be compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import launcher
from launcher.prepare import prepare
from tests.conftest import ROOT

JOB = ["hyperparameters.epochs=2", "hyperparameters.log_every=3", "hyperparameters.worker_type=processes"]


@contextmanager
def busy_programs() -> Iterator[None]:
    """Two programs a core, each of which takes what it can get: of its own session, since the kernel may share cores out by session."""
    # a test that is killed leaves none behind
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    number = 2 * (os.cpu_count() or 1)
    programs = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def trained(*overrides: str) -> launcher.Run:
    run = launcher.run(launcher.plan(launcher.load("configs/quickstart_teacher.yaml", [*JOB, *overrides])))
    assert run.wait(240) == "Completed"
    return run


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_job_beside_busy_programs_is_not_compared_with_itself_nor_is_a_fix_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("digits", "data/digits")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    quiet = trained("hyperparameters.checkpoint_every=5")
    with busy_programs():
        same = trained("hyperparameters.checkpoint_every=5")
        fixed = trained("hyperparameters.checkpoint_every=50")
        fewer = trained("hyperparameters.checkpoint_every=5", "hyperparameters.num_workers=1")
    for other, reported in (
        (same, "steps of the same settings, code and input took"),
        (fixed, "steps, which checkpoint_every cannot touch, took"),
    ):
        both = launcher.diagnose(quiet.name, other.name)
        assert both.speedup is None and both.measured.value < 0.7, str(both)
        first = str(both).splitlines()[0]
        assert first.startswith("not comparable: ") and reported in first and "in alternation" in first
        assert all(kept.obtained is None for kept in both.kept())
    first = str(launcher.diagnose(quiet.name, fewer.name)).splitlines()[0]
    # how far they drifted depends on what else ran beside the quiet one
    assert first.startswith(("not comparable: ", "speed-up ")) and "programs outside the run used" in first, first
