"""Benchmarks are run by hand, so that a name which moved would be found months later."""

from __future__ import annotations

import ast
import contextlib
import math
import subprocess
import sys
from types import ModuleType

import torch
from training.engine import loop

from tests.benchmarks import at_scale
from tests.benchmarks.other_diagnosers import TRACEML_STEPS
from tests.benchmarks.planted_gains import Row, summary
from tests.conftest import ROOT
from tests.entrypoints import test_loop

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


def test_the_page_on_large_clusters_is_what_its_script_prints(capsys):
    at_scale.main()
    page = (ROOT / "docs/results/at-scale.md").read_text()
    assumptions, *tables = capsys.readouterr().out.strip().split("\n\n")
    assert assumptions.count("\n- ") >= 10 and len(tables) == 3 and all(part in page for part in (assumptions, *tables))


def test_the_steps_on_large_clusters_have_zeros_broadcasts_both_libraries_and_both_ways_to_run_the_models():
    assert at_scale.broadcasts(8) == 0.0, "within a host it counts as computing"
    seconds = 88.2e6 / 22.926e9  # all parameters once
    for gpus, sent, turns in ((32, 32, 2), (128, 128, 4), (256, 152, 5), (1024, 152, 7)):
        assert math.isclose(at_scale.broadcasts(gpus), seconds + sent * turns * 15e-6, rel_tol=1e-4), gpus
    steps = [dict(zip(("gpus", "batch", "teacher", "models", *range(8)), row)) for row in at_scale.steps().rows]
    assert [(row["teacher"], row["models"]) for row in steps[::7]] == [step[:2] for step in at_scale.STEPS]
    for row in steps:
        nccl, without, zero, with_zero, smddp, *_ = (float(row[column].rstrip(" %")) for column in range(8))
        assert smddp <= nccl <= zero and with_zero <= without
        assert abs(zero - nccl - 1000 * at_scale.broadcasts(int(row["gpus"]))) < 0.11, row
    assert [row[0] for row in steps if row["gpus"] == "8"] == ["66.9", "52.8", "32.9", "14.1"]


def test_the_best_interval_between_checkpoints_is_the_best():
    """Young's optimum against a search, and the goodput by its terms."""
    between = at_scale.FAILURES.value * 3600 / 1024

    def by(interval: int) -> float:
        return 1 - 1.4 / interval - (interval / 2 + 600) / between

    best = max(by(seconds) for seconds in range(10, 20000))
    assert abs(at_scale.goodput(1.4, 1024) - best) < 1e-6, (at_scale.goodput(1.4, 1024), best)
    assert at_scale.goodput(0.04, 1024) > at_scale.goodput(1.4, 1024) > at_scale.goodput(1.4, 2048)


def test_traceml_is_told_each_step_and_its_model(tmp_path, monkeypatch):
    """The text that marks steps for it replaces two functions of the loop, whose arguments are none of a public interface."""
    traced: list[torch.nn.Module] = []

    @contextlib.contextmanager
    def trace_step(model: torch.nn.Module):
        traced.append(model)
        yield

    interface = ModuleType("traceml_ai.api")
    interface.init, interface.trace_step = lambda: None, trace_step
    for name, module in (("traceml_ai", ModuleType("traceml_ai")), ("traceml_ai.api", interface)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("_step", "on_device"):
        monkeypatch.setattr(loop, name, getattr(loop, name))  # so that they are put back
    exec(TRACEML_STEPS, {})
    trained = test_loop.run(tmp_path, batch_size_per_device=4)
    assert trained.outcome.steps == len(traced) == 15 and set(traced) == {trained.model}


def test_a_neighbour_that_was_not_planted_is_counted_apart_and_never_hidden():
    rows = [
        Row("data_bound", "", "data_bound"),
        Row("data_bound", "", "data_bound", neighbour_first=True),
        Row(None, "", None),
        Row(None, "", None, neighbour_first=True, neighbour_alone=True),
    ]
    text = summary(rows)
    assert "right: 4 of 4, of 1 kinds; healthy runs accused: 0 of 2" in text
    assert "counts as a mistake, first in 2: 2 of 4, healthy runs accused 1" in text
