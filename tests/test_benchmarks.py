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


def test_the_page_on_large_clusters_is_what_its_script_prints():
    done = subprocess.run([sys.executable, "at_scale.py"], cwd=FOLDER, capture_output=True, text=True, check=True)
    page = (ROOT / "docs/results/at-scale.md").read_text()
    assumptions, steps, failures = done.stdout.strip().split("\n\n")
    assert assumptions.count("\n- ") >= 10 and all(part in page for part in (assumptions, steps, failures))


def test_the_best_interval_between_checkpoints_is_the_best():
    """Young's optimum against a search, and the goodput by its terms."""
    code = """
import at_scale as scale, math
between = scale.FAILURES.value * 3600 / 1024
def by(interval): return 1 - 1.4 / interval - (interval / 2 + 600) / between
best = max(by(seconds) for seconds in range(10, 20000))
assert abs(scale.goodput(1.4, 1024) - best) < 1e-6, (scale.goodput(1.4, 1024), best)
assert scale.goodput(0.04, 1024) > scale.goodput(1.4, 1024) > scale.goodput(1.4, 2048)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
