"""The interface of a backend: what a new one gets by default, and that nothing else asks which one it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest

import launcher
from launcher import backends
from launcher.backends.base import Backend
from launcher.planner.plan import HostPlan
from launcher.record.records import RunFolder
from tests.conftest import ROOT


class Elsewhere(Backend):
    """No more than what every backend must say itself."""

    name = "elsewhere"

    def check(self, job, source, files):
        return []

    def source_files(self, job, files):
        return files

    def hosts(self, job):
        return (HostPlan("algo-1", "algo-1", ("true",)),)

    def world_size(self, job):
        return 1

    def toolkit_hyperparameters(self, job, run_name) -> dict[str, Any]:
        return {}

    def machine(self, job):
        return "a machine"

    def start(self, plan, folder, lock, lifeline):
        raise NotImplementedError


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_backend_is_found_by_its_name(name):
    assert backends.get(name).name == name
    assert backends.get(name).on_this_machine == (name != "aws")


def test_what_a_backend_must_say_itself_is_asked_for_when_it_is_made():
    with pytest.raises(TypeError, match="abstract"):
        type("Silent", (Backend,), {"name": "silent"})()


def test_a_backend_that_can_do_no_more_than_run_says_so(script_job):
    job, elsewhere = script_job("print(1)"), Elsewhere()
    assert elsewhere.channels(job, {"train": "/data"}) == ({"train": "/data"}, ())
    assert elsewhere.request(job, "run", {}) is None and elsewhere.price(job) is None
    assert elsewhere.about(job, None) == {} and not elsewhere.DIFFERENCES and not elsewhere.lacks("nvidia.dali")
    with pytest.raises(launcher.UserError, match="a plan for elsewhere uploads nothing"):
        elsewhere.upload(launcher.plan(job))


def test_a_run_there_is_stopped_by_a_note_and_resumed_from_its_folder(tmp_path):
    elsewhere, folder = Elsewhere(), RunFolder(tmp_path / "run-1")
    folder.path.mkdir()
    elsewhere.stop(folder, "first")
    elsewhere.stop(folder, "second")
    assert folder.read(folder.stop_request)["reason"] == "first"
    assert elsewhere.spend(folder) is None and not elsewhere.refresh(folder)
    with pytest.raises(launcher.UserError, match="run-1 runs on elsewhere"):
        elsewhere.profile(folder, 500)
    checkpoints = folder.host("algo-1") / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert "left no checkpoint" in str(elsewhere.why_not_resumed({}, folder))
    (checkpoints / "last.pt").touch()
    assert elsewhere.why_not_resumed({}, folder) is None


AS_ON_MACOS = """
import os, sys
for name in ("sched_getaffinity", "sched_setaffinity", "pipe2", "memfd_create", "posix_fadvise", "fdatasync", "O_PATH", "O_TMPFILE"):
    delattr(os, name)
import launcher
job = launcher.from_values({"name": "test", "script": "script.py", "source": sys.argv[1], "compute": {"instance_count": 2}})
print(launcher.plan(job).errors, launcher.plan(job, on="aws").price)
"""
"""Plans without what Python's `os` has on Linux only. https://docs.python.org/3/library/os.html"""


def test_planning_needs_nothing_that_linux_alone_has(tmp_path):
    (tmp_path / "script.py").write_text("print(1)")
    command = [sys.executable, "-c", AS_ON_MACOS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("() "), done.stdout + done.stderr


def test_nothing_outside_of_backends_compares_a_backends_name():
    names, found = set(backends.BACKENDS), []
    for file in (ROOT / "launcher").rglob("*.py"):
        if file.is_relative_to(ROOT / "launcher/backends"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
                if names & {
                    part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == [], "a method or a default of Backend says it"
