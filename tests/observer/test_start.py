"""The observer reaches every Python process of a run, costs those without torch next to nothing, and harms none."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from launcher_observer.after_import import after_import

import launcher
from launcher.insight.measurements import read
from launcher.planner import python_start
from launcher.planner.source_package import SourceFile, copy_files
from tests.conftest import TORCH_LOOP, assert_nothing_left, wait_until

HEAVY = {"contextlib", "functools", "json", "pathlib", "re", "subprocess", "threading", "torch", "typing"}
"""Modules whose imports take milliseconds each."""


@pytest.fixture
def code(tmp_path) -> Path:
    """A folder as the source package has it, with nothing of a script."""
    folder = tmp_path / "code"
    copy_files(python_start.with_python_start([], observe=True, secrets={}), folder)
    return folder


@pytest.fixture
def job(tmp_path, code) -> dict[str, str]:
    """Variables of a job's processes, as the toolkit sets them."""
    (tmp_path / "data").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "LAUNCHER_"))}
    return {
        **inherited,
        "PYTHONPATH": str(code),
        "SM_OUTPUT_DATA_DIR": str(tmp_path / "data"),
        "SM_CURRENT_HOST": "algo-2",
    }


def python(
    environ: dict[str, str], text: str, *options: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", text]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


def recorded(environ: dict[str, str]) -> Path:
    """Where a job's processes record."""
    return Path(environ["SM_OUTPUT_DATA_DIR"], "launcher-observer", environ["SM_CURRENT_HOST"])


def sampled(folder: Path) -> bool:
    """Whether a whole sample lies in a host's folder."""
    return any(file.stat().st_size for file in folder.glob("profiler-output/system/incremental/*/*.json"))


# -- what a process pays, and whether it is observed ------------------------------------------------------------------


def test_a_process_without_torch_loads_next_to_nothing_prints_nothing_and_has_its_host_sampled(job):
    done = python(job, "import sys; print(sorted(sys.modules))")
    assert (done.returncode, done.stderr) == (0, "")
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert "launcher_observer.start" in loaded and not loaded & HEAVY
    wait_until(lambda: sampled(recorded(job)), what="a sample of a run that was shorter than an interval")


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"SM_OUTPUT_DATA_DIR": "/nowhere/data"}, []),  # the toolkit itself, and pip, have none
        ({"LAUNCHER_OBSERVE": "false"}, []),
        ({"LAUNCHER_OBSERVE": "False"}, []),
        *(({"LAUNCHER_OBSERVE": word}, []) for word in ("off", "no", "0")),
        ({}, ["-I"]),
        ({}, ["-S"]),
    ],
)
def test_what_is_no_process_of_a_job_or_wants_no_observer_has_none(job, change, options):
    seen = "import sys; print([name for name in sys.modules if name.startswith('launcher_observer.system')])"
    done = python({**job, **change}, seen, *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "") and not recorded(job).exists()


def test_a_folder_that_is_named_takes_the_place_of_the_jobs(job, tmp_path):
    named = tmp_path / "here"
    named.mkdir()
    assert python({**job, "LAUNCHER_OBSERVER_FOLDER": str(named)}, "pass").stderr == ""
    wait_until(lambda: sampled(named), what="a sample")
    done = python({**job, "LAUNCHER_OBSERVER_FOLDER": str(tmp_path / "gone")}, "print('ran')")
    assert (done.returncode, done.stdout) == (0, "ran\n") and not recorded(job).exists()
    [line] = done.stderr.splitlines()
    assert (
        line.startswith("launcher observer: ") and f"LAUNCHER_OBSERVER_FOLDER={tmp_path}/gone is not a folder" in line
    )


def test_a_script_that_is_observed_and_trains_by_this_kits_loop_has_one_monitor(job, tmp_path):
    text = f"""
        import pathlib
        from launcher_observer.system.monitor import system_monitor
        with system_monitor(pathlib.Path({str(tmp_path / "second")!r}), 0):
            print('inside')
    """
    done = python(job, textwrap.dedent(text))
    assert (done.stdout, done.stderr) == ("inside\n", "") and not (tmp_path / "second").exists()


# -- it harms nobody --------------------------------------------------------------------------------------------------


def test_an_error_of_the_monitor_is_reported_in_one_line_and_the_hooks_are_there_all_the_same(job):
    recorded(job).mkdir(parents=True)
    (recorded(job) / "profiler-output").write_text("a file where the folder should be")
    waiting = "import sys; print(any('after_import' in type(finder).__module__ for finder in sys.meta_path))"
    done = python(job, waiting)
    assert (done.returncode, done.stdout) == (0, "True\n")
    [line] = done.stderr.splitlines()
    assert line.startswith("launcher observer: no system metrics: ") and line.endswith("the script goes on without it")


def test_an_error_as_the_hooks_take_hold_is_reported_in_one_line_and_torch_is_imported(job, code):
    (code / "launcher_observer/torch_hooks.py").write_text("raise RuntimeError('broken')\n")
    done = python(job, "import torch; print(torch.ones(2).sum().item())")
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert done.stderr == (
        "launcher observer: no steps are measured: RuntimeError('broken'); the script goes on without it\n"
    )


def test_a_script_that_waits_for_its_children_does_not_wait_for_the_monitor(job):
    text = "import os\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('no children')"
    assert python(job, text).stdout == "no children\n"


def test_where_ended_children_are_ignored_the_monitor_starts_without_a_word(job):
    ignored = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, '-c', ''])"
    started = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ignored], env=job, capture_output=True, text=True, timeout=60
    )
    assert (started.returncode, started.stderr) == (0, "")
    wait_until(lambda: sampled(recorded(job)), what="a sample")


def test_a_pipe_that_reads_a_process_ends_with_it_although_the_monitor_goes_on(job):
    first = subprocess.Popen(
        [sys.executable, "-c", "print('ready', flush=True); input()"],
        env=job,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert first.stdout.readline() == b"ready\n"
    other = subprocess.Popen([sys.executable, "-c", "input()"], env=job, stdin=subprocess.PIPE)
    wait_until(lambda: sampled(recorded(job)), what="a sample")
    assert first.communicate(b"\n", timeout=60) == (b"", b"")
    other.communicate(b"\n", timeout=60)


# -- other users of the same hooks ------------------------------------------------------------------------------------


def test_the_next_sitecustomize_of_the_path_runs_as_it_would_alone(job, code, tmp_path):
    other = tmp_path / "of the image"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.path.append('/added')\nNAME = 'of the image'\n")
    text = "import sitecustomize, sys; print(sitecustomize.NAME, sitecustomize.__file__, sys.path[-1])"
    alone = python({**job, "PYTHONPATH": str(other)}, text)
    both = python({**job, "PYTHONPATH": f"{code}{os.pathsep}{other}"}, text)
    assert alone.stdout == both.stdout == f"of the image {other}/sitecustomize.py /added\n" and both.stderr == ""
    (other / "sitecustomize.py").write_text("import nowhere\n")
    alone = python({**job, "PYTHONPATH": str(other)}, "print('ran')")
    both = python({**job, "PYTHONPATH": f"{code}{os.pathsep}{other}"}, "print('ran')")
    assert (alone.stdout, alone.stderr) == (both.stdout, both.stderr) and "No module named 'nowhere'" in both.stderr


def test_the_source_folders_own_sitecustomize_hides_the_next_one_as_it_would_alone(job, tmp_path):
    own = b"import os\nos.environ['SEEN'] = 'own'\n"
    files = python_start.with_python_start(
        [SourceFile("sitecustomize.py", None, len(own), own)], observe=True, secrets={}
    )
    copy_files(files, tmp_path / "source")
    (tmp_path / "next").mkdir()
    (tmp_path / "next/sitecustomize.py").write_text("import os\nos.environ['SEEN'] += ' next'\n")
    path = f"{tmp_path / 'source'}{os.pathsep}{tmp_path / 'next'}"
    done = python({**job, "PYTHONPATH": path}, "import os; print(os.environ['SEEN'])")
    assert (done.stdout, done.stderr) == ("own\n", "")
    wait_until(lambda: sampled(recorded(job)), what="a sample")
    again = python_start.with_python_start(files, observe=False, secrets={})
    assert [file.read() for file in again if file.path.startswith("sitecustomize")] == [own]


def test_an_agents_sitecustomize_that_runs_the_next_of_the_path_runs_once(job, code, tmp_path):
    """Its next is the launcher's, which was first; the one behind both runs too."""
    agent, last = tmp_path / "agent", tmp_path / "last"
    for folder in (agent, last):
        folder.mkdir()
    (agent / "sitecustomize.py").write_text(
        "import os, sys\n"
        "from importlib.machinery import PathFinder\n"
        "path = [place for place in sys.path if place != os.path.dirname(__file__)]\n"
        "spec = PathFinder.find_spec('sitecustomize', path)\n"
        "print('agent', flush=True)\n"
        "spec.loader.load_module('sitecustomize')\n"
    )
    (last / "sitecustomize.py").write_text("print('last')\n")
    path = os.pathsep.join(map(str, (code, agent, last)))
    done = python({**job, "PYTHONPATH": path}, "print('ran')")
    assert (done.stdout, done.stderr) == ("agent\nlast\nran\n", "")


def test_two_launchers_on_one_path_observe_once(job, code, tmp_path):
    copy_files(python_start.with_python_start([], observe=True, secrets={}), tmp_path / "second")
    path = f"{code}{os.pathsep}{tmp_path / 'second'}"
    count = "import sys; print(sum('after_import' in type(finder).__module__ for finder in sys.meta_path))"
    done = python({**job, "PYTHONPATH": path}, count)
    assert (done.stdout, done.stderr) == ("1\n", "")


# -- through a backend ------------------------------------------------------------------------------------------------


def test_the_plan_says_who_is_observed_and_who_is_not_and_why(script_job):
    def line(**values) -> str:
        [found] = [line for line in str(launcher.plan(script_job(**values))).splitlines() if "  observed " in line]
        return found.removeprefix("  observed    ")

    assert line(text="print(1)\n").startswith("steps, data loading and the machine are measured")
    assert line(text="print(1)\n", observe=False) == "no: observe: false"
    for word in ("false", "off", "no", "0"):
        switch = {"LAUNCHER_OBSERVE": word}
        assert line(text="print(1)\n", environment=switch) == f"no: environment.LAUNCHER_OBSERVE is {word}"
    own = "from training.engine.run import started\n"
    assert line(text=own) == "no: script.py opens its run with training.engine.run, which measures it"
    kit = launcher.from_values(
        {"name": "kit", "script": "train_classifier.py", "hyperparameters": {"model": "resnet18"}}
    )
    assert not [file for file in launcher.plan(kit).files if file.path == python_start.FILE]


def test_a_run_without_torch_has_system_metrics_and_leaves_no_process(script_job):
    text = """
        import os, pathlib, time
        output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
        while not any(file.stat().st_size for file in output.rglob("*.algo-1.json")):
            time.sleep(0.05)
    """
    run = launcher.run(launcher.plan(script_job(text)))
    assert run.wait(120) == "Completed", run.outcome()
    assert not [line for _, line in run.logs() if "observer" in line]
    assert [name for name, host in read(run.name).hosts.items() if host.cores] == ["algo-1"]
    assert_nothing_left(run)


@pytest.mark.slow
def test_every_rank_of_every_host_is_followed_and_every_host_sampled(script_job):
    job = script_job(TORCH_LOOP, distribution="torchrun", compute={"instance_count": 2})
    run = launcher.run(launcher.plan(job))
    assert run.wait(120) == "Completed", run.outcome()
    measured = read(run.name)
    assert {(steps.rank, steps.host) for steps in measured.ranks} == {(0, "algo-1"), (1, "algo-2")}
    assert set(measured.hosts) == {"algo-1", "algo-2"}
    assert_nothing_left(run)


def test_a_run_that_wants_no_observer_leaves_nothing_of_it(script_job):
    text = """
        import os, sys
        assert not any(name.startswith("launcher_observer") for name in sys.modules)
        assert os.listdir(os.environ["SM_OUTPUT_DATA_DIR"]) == []
        from training.runtime.metrics import PHASES
    """
    job = script_job(text, observe=False)
    run = launcher.run(launcher.plan(job))
    assert run.wait(120) == "Completed", run.outcome()
    source = Path(job.source)
    (source / "training").mkdir()
    (source / "training/mine.py").write_text("x = 1\n")
    alone = launcher.plan(script_job("from training.mine import x\n", observe=False))
    assert [file.path for file in alone.files] == ["script.py", "training/mine.py"]
    assert launcher.run(alone).wait(120) == "Completed"


def test_a_folder_that_is_named_later_is_recorded_in(tmp_path):
    """As in a notebook, whose first call found none, and whose second a wrong one."""
    code = """
        import os, sys
        from launcher_observer import start
        for folder in (None, "not-there", sys.argv[1]):
            if folder is not None:
                os.environ["LAUNCHER_OBSERVER_FOLDER"] = folder
            start.start()
            print(start._started)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "LAUNCHER_"))}
    entrypoints = Path(launcher.__file__).parents[1] / "entrypoints"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**environment, "PYTHONPATH": str(entrypoints)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    assert "not-there is not a folder: create it" in done.stderr


def test_a_folder_that_is_named_from_here_is_meant_wherever_the_script_goes(job, tmp_path):
    """As Hydra goes to the run's own."""
    (tmp_path / "measured").mkdir()
    text = "import os; os.chdir('/'); print(os.environ['LAUNCHER_OBSERVER_FOLDER'])"
    done = python({**job, "LAUNCHER_OBSERVER_FOLDER": "measured"}, text, folder=tmp_path)
    assert (done.stdout, done.stderr) == (f"{tmp_path}/measured\n", "")


def test_a_module_that_imports_the_one_with_the_hooks_is_told_of_with_the_next_import(monkeypatch, tmp_path):
    """As lightning and safetensors.torch do, which import torch first."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "outer_of_two.py").write_text("import inner_of_two\nvalue = 1\n")
    for name in ("inner_of_two", "third_of_all"):
        (tmp_path / f"{name}.py").write_text("")
    found: list[object] = []

    def take_hold(inner: ModuleType) -> None:
        after_import("inner_of_two", found.append)
        after_import("outer_of_two", lambda outer: found.append(outer.value))
        assert found == [inner]

    after_import("inner_of_two", take_hold)
    importlib.import_module("outer_of_two")
    importlib.import_module("third_of_all")
    assert found[1:] == [1]


@pytest.mark.parametrize("name", ["hidden_for_now", "a_stub_for_now"])
def test_a_module_that_a_script_hides_for_a_while_is_awaited(monkeypatch, tmp_path, name):
    """As with `mock.patch.dict(sys.modules, {"torch": None})` around the import of something else."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for module in (name, f"beside_{name}"):
        (tmp_path / f"{module}.py").write_text("value = 1\n")
    found: list[object] = []
    after_import(name, lambda module: found.append(module.value))
    with mock.patch.dict(sys.modules, {name: ModuleType(name) if "stub" in name else None}):
        importlib.import_module(f"beside_{name}")
    assert found == []
    importlib.import_module(name)
    assert found == [1]
