"""A diagnosis of runs that failed or were stopped: their state is named, none without a step is called healthy, and a job's name means a
run that completed if its latest failed."""

from __future__ import annotations

import fcntl
import json
import shutil

import pytest

import launcher
from launcher.commands.main import main
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from tests.insight.planted import plant, write
from tests.insight.test_rules import GPU
from tests.launcher.test_store import recorded


def ran(name: str, state: str, *, steps: bool = True) -> str:
    """A run that took 9 s and ended in a state, with or without measured steps."""
    folder = recorded(name, state=state)
    folder.outcome.write_text(json.dumps({"state": state, "seconds": 9.0}))
    write(plant(phases=GPU if steps else None, gpu=96), folder.host("algo-1") / "output/data")
    return name


@pytest.mark.parametrize("state", ["Failed", "Stopped"])
def test_a_run_that_ended_before_its_first_step_is_not_called_healthy(state, capsys):
    name = ran("train-20261122-100000-aaaa", state, steps=False)
    assert main(["diagnose", name]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{name}: {state} after 9.0 s, no step measured; launcher show {name} has the reason"
    assert "No bottleneck" not in launcher.diagnose(name)._repr_html_()


def reported(source: object, capsys: pytest.CaptureFixture[str]) -> str:
    """What `launcher diagnose` of a run without measurements reports, as one line."""
    assert main(["diagnose", str(source)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_failed_run_of_which_nothing_was_measured_is_named_as_failed(tmp_path, capsys):
    run = recorded("train-20261122-100000-aaaa", state="Failed")
    said = f"{run.name} holds no measurements: Failed fix: "
    assert f"{said}launcher show {run.name} has the reason" in reported(run.name, capsys)
    copied = shutil.copytree(run.path, tmp_path / "elsewhere" / run.name)
    assert f"{said}{copied} has the reason" in reported(copied, capsys)


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ("process", "wait for its first steps: launcher logs {} -f"),
        ("aws", "they arrive when it ends, for which launcher attach {} waits"),
    ],
)
def test_a_run_under_way_of_which_nothing_is_measured_yet_is_waited_for(backend, fix, capsys):
    run = recorded("train-20261122-100000-aaaa", state="", backend=backend)
    with run.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = reported(run.name, capsys)
    assert f"holds no measurements yet: InProgress fix: {fix.format(run.name)}" in said


@pytest.mark.parametrize(
    ("job", "switch"),
    [
        ({"script": "train.py", "source": ".", "observe": False}, "observe"),
        ({"script": "train_kd.py", "hyperparameters": {"system_monitor": False}}, "hyperparameters.system_monitor"),
    ],
)
def test_a_run_that_was_not_to_be_measured_says_which_setting_that_was(job, switch, capsys):
    run = recorded("train-20261122-100000-aaaa", state="Failed", job={"name": "train", **job})
    assert f"holds no measurements: {switch} is false" in reported(run.name, capsys)


def test_a_run_whose_supervisor_was_killed_is_failed_too():
    name = ran("train-20261122-100000-aaaa", "Failed", steps=False)
    launcher.attach(name).folder.outcome.unlink()
    assert launcher.diagnose(name).headline == f"Failed, no step measured; launcher show {name} has the reason"


def test_without_a_step_there_is_no_verdict_of_no_bottleneck():
    found = Diagnosis(plant(phases=None, gpu=96))
    assert found.headline.startswith("no step was measured: GPUs busy ")


def test_a_run_with_steps_that_failed_says_so_beneath_its_headline():
    shown = str(launcher.diagnose(ran("train-20261122-100000-aaaa", "Failed"))).splitlines()
    assert "No bottleneck found in what was measured" in shown[0] and shown[1].startswith("  Failed, 1 host, ")


def test_a_comparison_says_which_run_has_no_steps():
    failed, done = ran("a-20261122-100000-aaaa", "Failed", steps=False), ran("b-20261122-100001-aaaa", "Completed")
    [said] = launcher.diagnose(failed, done).sentences()
    assert said == f"no speed-up: {failed} has no measured step (Failed); compare runs whose steps were measured"
    assert str(launcher.diagnose(failed, done)).startswith(said)
    measured = Diagnosis(plant(phases=None, gpu=96, not_measured={"steps": "no timeline"}))
    [said] = Comparison(measured, measured).sentences()
    assert "has no measured step (no timeline)" in said


@pytest.mark.parametrize(
    ("state", "steps", "passed_over"),
    [
        ("Failed", False, True),
        ("Failed", True, True),
        ("Stopped", False, True),
        ("Stopped", True, False),
        ("Completed", False, False),
    ],
)
def test_a_jobs_name_means_its_latest_completed_run_if_the_latest_failed(state, steps, passed_over, capsys):
    completed = ran("train-20261122-100000-aaaa", "Completed")
    latest = ran("train-20261122-100001-aaaa", state, steps=steps)
    assert main(["diagnose", "train"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{completed if passed_over else latest}: ")
    noted = f"train: {completed}, its latest completed run; {latest} is {state}: launcher show {latest}\n"
    assert printed.err == (noted if passed_over else "")
    both = launcher.diagnose("train", latest)
    assert both.before.measurements.source == (completed if passed_over else latest)
    assert both.after.measurements.source == latest, "a run's own name is that run"


def test_a_job_without_a_completed_run_is_diagnosed_by_its_latest():
    ran("train-20261122-100000-aaaa", "Stopped")
    latest = ran("train-20261122-100001-aaaa", "Failed", steps=False)
    assert launcher.diagnose("train").measurements.source == latest
