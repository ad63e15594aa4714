"""Benchmarks are run by hand, so that a name which moved would be found months later."""

from __future__ import annotations

import ast
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


def test_a_benchmark_that_imports_the_entry_scripts_modules_says_first_where_they_are():
    """Which the test above cannot see: there another one has said it."""
    for file in FOLDER.glob("*.py"):
        imported = [
            name.split(".")[0]
            for node in ast.parse(file.read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        ]
        if "training" in imported and file.stem != "engine":
            assert "engine" in imported[: imported.index("training")], file.name
