"""Runs that go on from the checkpoints of an earlier one, with real processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.config.entrypoints import entrypoints_folder
from launcher.runner.recorded_plan import plan_again
from launcher.study.conditions import settings_of
from tests.conftest import SLEEPER, wait_for_ready
from tests.launcher.test_store import recorded

COUNTS = """
    import json, os, pathlib, sys, time
    base, host, hosts = os.environ["SAGEMAKER_BASE_DIR"], os.environ["SM_CURRENT_HOST"], json.loads(os.environ["SM_HOSTS"])
    place = pathlib.Path(base, "checkpoints/deep/count")
    count = int(place.read_text()) if place.exists() else 0
    print(f"begins at {count}", flush=True)
    place.parent.mkdir(exist_ok=True)
    with open(place, "r+" if place.exists() else "w") as file:  # in place: a link would change the earlier run's too
        file.write(str(count + 1))
    counted = [pathlib.Path(base.replace(f"/{host}/", f"/{each}/"), "output/data/counted") for each in hosts]
    counted[hosts.index(host)].touch()
    end = time.monotonic() + 60
    while count == 0 and not all(mark.exists() for mark in counted) and time.monotonic() < end:
        time.sleep(0.05)  # a host that fails ends the others, which are to have counted too
    sys.exit(1 if count == 0 else 0)
"""
TWO_HOSTS = {"compute": {"instance_count": 2}}


def over(plan: launcher.Plan) -> launcher.Run:
    run = launcher.run(plan)
    run.wait(120)
    return run


def begins(run: launcher.Run) -> dict[str, str]:
    """Where each host's count began."""
    return {host: line.split()[-1] for host, line in run.logs() if line.startswith("begins at")}


def left(run: launcher.Run, host: str = "algo-1") -> str:
    return (run.folder.host(host) / "checkpoints/deep/count").read_text()


def test_a_failed_run_goes_on_in_a_new_one_which_goes_on_in_a_third(script_job):
    job = script_job(COUNTS)
    first = over(launcher.plan(job))
    Path(job.source, "script.py").write_text("print('somebody changed it')\n")
    plan = launcher.resume("test")
    assert plan.resumes == plan.replay_of == first.name and f"resumes     {first.name}" in str(plan)
    second = over(plan)
    third = over(launcher.resume(second.name))
    anew = over(launcher.replay(second.name))
    assert [run.state for run in (first, second, third)] == ["Failed", "Completed", "Completed"]
    assert [begins(run)["algo-1"] for run in (first, second, third)] == ["0", "1", "2"]
    assert [left(run) for run in (first, second, third)] == ["1", "2", "3"], "the earlier ones stay as they were"
    assert second.folder.read(second.folder.plan)["resumes"] == first.name
    assert launcher.diff(first, second) == [] and begins(anew) == {"algo-1": "0"}, "replay takes no checkpoints along"


def test_each_host_goes_on_from_its_own_and_a_new_one_begins_with_none(script_job):
    """By the command."""
    first = over(launcher.plan(script_job(COUNTS, **TWO_HOSTS)))
    (first.folder.host("algo-2") / "checkpoints/deep/count").write_text("7")
    command = [sys.executable, "-m", "launcher", "resume"]
    typed = [*command, first.name, "environment.FLAG=x", "--hosts", "3", "--logs"]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=120)
    resumed = launcher.attach("test")
    assert begins(resumed) == {"algo-1": "1", "algo-2": "7", "algo-3": "0"} and "begins at 7" in done.stdout
    assert resumed.folder.read(resumed.folder.plan)["job"]["environment"] == {"FLAG": "x"}
    assert (done.returncode, resumed.state) == (1, "Failed"), "algo-3 fails, as every host does at first"
    done = subprocess.run([*command, "nothing"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no such run" in done.stderr


def test_a_run_without_a_checkpoint_is_not_resumed(script_job):
    run = over(launcher.plan(script_job("print(1)")))
    with pytest.raises(
        launcher.UserError, match=f"left no checkpoint\n.*launcher replay {run.name} starts from the beginning"
    ):
        launcher.resume("test")


def test_a_run_that_goes_on_is_not_resumed(script_job):
    run = launcher.run(launcher.plan(script_job(SLEEPER)))
    wait_for_ready(run, 1)
    with pytest.raises(launcher.UserError, match=f"{run.name} is InProgress\n.*launcher stop {run.name}"):
        launcher.resume(run.name)
    run.stop()
    assert run.wait(60) == "Stopped"


def test_a_study_section_of_the_record_is_no_part_of_the_job_again(script_job):
    run = over(launcher.plan(script_job("print(1)")))
    run.folder.job.write_text(run.folder.job.read_text() + "study: {a_key_of_an_earlier_version: []}\n")
    assert launcher.replay(run.name).job.study is None
    assert launcher.attach(run.name).state == "Completed"


def test_a_replay_of_the_kits_script_is_planned_as_such_with_the_recorded_code(script_job):
    """With what its settings need in AWS's images, which of a stranger's script nobody knows."""
    values = {
        "name": "kit",
        "script": "train_classifier.py",
        "hyperparameters": {"model": "resnet18", "export_onnx": True},
    }
    run = recorded("kit-20260101-000000-abcd")
    run.job.write_text(json.dumps(values))
    shutil.copytree(entrypoints_folder(), run.code)
    again = plan_again(run, ["image.framework_version=2.8.0", "image.python=py312"], "aws")
    assert again.job.source is None and again.source == run.code
    [listed] = [file for file in again.files if file.path == "requirements.txt"]
    assert b"onnx" in listed.read()


def test_checkpoints_are_looked_for_where_the_job_keeps_them(script_job):
    values = {"checkpoints": {"s3": "s3://amzn-s3-demo-bucket/kept", "path": "/opt/ml/kept"}}
    run = recorded("kept-20260101-000000-abcd")
    for place, found in (("/opt/ml/kept", True), ("/opt/ml/../../kept", False), (None, False)):
        values["checkpoints"]["path"] = place
        run.job.write_text(json.dumps({"name": "kept", "script": "train.py", **values}))
        (run.host("algo-1") / "kept").mkdir(parents=True, exist_ok=True)
        (run.host("algo-1") / "kept/step-1").touch()
        assert run.left_checkpoints() == found


def test_a_record_keeps_whole_paths_of_its_inputs(script_job, tmp_path, monkeypatch):
    """Another folder has data of the same name, which a replay there would take."""
    for place in ("here", "there"):
        (tmp_path / place / "data").mkdir(parents=True)
        (tmp_path / place / "data/a.txt").write_text(place)
    monkeypatch.chdir(tmp_path / "here")
    job = script_job("print(1)", inputs={"train": {"folder": "data"}, "list": {"file": "data/a.txt"}})
    kept = launcher.plan(job).kept_job()["inputs"]
    assert kept["train"]["folder"] == f"{tmp_path}/here/data" and kept["list"]["file"] == f"{tmp_path}/here/data/a.txt"
    settings = settings_of(job, ())
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Completed"
    monkeypatch.chdir(tmp_path / "there")
    assert launcher.replay(run.name).channels == launcher.attach(run.name).folder.read(run.folder.plan)["channels"]
    assert settings_of(job, ()) != settings, "trials of the other folder are no trials of this one"


@pytest.mark.parametrize(
    "kept", ["s3://bucket/it", {"s3": "s3://bucket/it", "path": "/opt/ml/kept"}], ids=["s3", "path"]
)
def test_a_replay_on_sagemaker_has_a_prefix_of_its_own_in_the_place_of_its_run(kept):
    run = recorded("it-20260101-000000-abcd", backend="aws")
    run.job.write_text(json.dumps({"name": "it", "script": "train.py", "source": "code", "checkpoints": kept}))
    run.code.mkdir()
    (run.code / "train.py").touch()
    made = launcher.replay(run.name).job.checkpoints
    assert re.fullmatch(r"s3://bucket/replay-[0-9a-f]{8}/it", made.s3)
    assert made.path == (kept["path"] if isinstance(kept, dict) else None)
    elsewhere = launcher.replay(
        run.name, ["checkpoints.s3=s3://bucket/else" if made.path else "checkpoints=s3://bucket/else"]
    )
    assert (elsewhere.job.checkpoints.s3, elsewhere.job.checkpoints.path) == ("s3://bucket/else", made.path)
