"""Benchmarks are run by hand, so that a name which moved would be found months later."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

FOLDER = ROOT / "tests/benchmarks"


def test_every_benchmark_can_be_imported():
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    assert "engine" in names
    text = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", text], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
