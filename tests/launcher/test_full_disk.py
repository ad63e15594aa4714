"""Runs on a disk that is full: a real one of 20 MB."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import launcher
from launcher.backends.supervisor import on_a_full_disk
from launcher.record import disk
from launcher.record.records import RunFolder
from tests.conftest import SLEEPER, assert_nothing_left, wait_for_ready
from tests.launcher.test_commands import typed
from tests.launcher.test_store import recorded

FILLS = """
    import os, pathlib
    folder = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints")
    steps = len(list(folder.iterdir()))
    for step in range(steps + 1, 100 if steps == 0 else steps + 3):
        with open(folder / ".writing", "wb", buffering=0) as file:
            for _ in range(256):
                file.write(bytes(4096))
        os.replace(folder / ".writing", folder / f"step-{step:02d}")
        print(f"saved step {step}", flush=True)
"""


@pytest.fixture
def small_disk(store):
    """The run store on a file system of its own, of 20 MB."""
    store.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", store], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"only root may mount a file system: {mounted.stderr.strip()}")
    yield store
    subprocess.run(["umount", "--lazy", store], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to its last byte, with a file there."""
    file = folder / "filler"
    with open(file, "wb", buffering=0) as stream, pytest.raises(OSError, match="No space left on device"):
        while True:
            stream.write(bytes(4096))
    return file


def test_a_run_that_fills_its_disk_says_so_and_what_was_saved(script_job, small_disk, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(launcher.plan(script_job(FILLS)).job.model_dump_json(exclude_none=True))
    done = typed("run", str(config))
    [run] = launcher.runs()
    outcome = run.outcome()
    assert (done.returncode, run.state) == (1, "Failed")
    assert outcome["failure"].startswith(f"no space left on tmpfs, at {run.folder.path}")
    assert outcome["cause"] == "the disk is full (tmpfs)" and "LAUNCHER_RUNS" in outcome["fix"]
    steps = re.findall(r"^saved step (\d+)$", run.folder.log("algo-1").read_text(), re.MULTILINE)
    checkpoint, log = outcome["saved"]
    latest = max(place.name for place in run.folder.checkpoints("algo-1").glob("step-*"))
    assert checkpoint == f"the latest checkpoint, hosts/algo-1/opt/ml/checkpoints/{latest}"
    assert log.startswith("the log up to then, logs/algo-1.log (") and steps
    for text in (
        f"no space left on tmpfs, at {run.folder.path}",
        "  fix:   free some space there",
        f"  saved: {checkpoint}",
    ):
        assert text in done.stdout
    assert "is Failed and can be resumed" not in done.stderr and not run.folder.reserve.exists()
    assert_nothing_left(run)


def test_a_disk_that_has_room_again_when_the_run_has_failed_is_named_as_its_cause(script_job, small_disk):
    text = """
    import os, pathlib
    (pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"]) / "checkpoints/step-1").touch()
    place = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "large")
    try:
        place.write_bytes(bytes(30 * 2**20))
    finally:
        place.unlink()
    """
    run = launcher.run(launcher.plan(script_job(text)))
    assert run.wait(60) == "Failed"
    outcome = run.outcome()
    assert "No space left on device" in outcome["failure"] and outcome["cause"] == "the disk is full"
    assert "LAUNCHER_RUNS" in outcome["fix"] and outcome["saved"][0].endswith("checkpoints/step-1")


@pytest.mark.parametrize("order", [1, -1])
def test_of_checkpoints_of_one_tick_of_the_clock_the_last_by_name_is_the_latest(monkeypatch, order):
    folder = recorded("full-20260101-000000-abcd")
    places = [folder.checkpoints("algo-1") / f"step-{step}" for step in (9, 10)]
    for place in places:
        place.mkdir(parents=True)
        os.utime(place, ns=(1, 1))
    monkeypatch.setattr(RunFolder, "complete_checkpoints", lambda *_: places[::order])
    assert on_a_full_disk("", folder, "")["saved"][0].endswith("/step-10")


def test_a_model_that_cannot_be_packed_is_not_saved_and_its_run_completed(script_job, small_disk):
    text = (
        "import os, pathlib\npathlib.Path(os.environ['SM_MODEL_DIR'], 'weights').write_bytes(os.urandom(11 * 2**20))\n"
    )
    run = launcher.run(launcher.plan(script_job(text)))
    assert run.wait(60) == "Completed"
    assert run.outcome()["not_saved"] == [f"model.tar.gz: no space left on tmpfs, at {run.folder.path}"]
    assert not list(run.folder.path.glob(".model*")) and "failure" not in run.outcome()


def test_nothing_starts_on_a_full_disk_and_nothing_is_left_there(script_job, small_disk):
    plan = launcher.plan(script_job("print(1)"))
    filler = fill(small_disk)
    with pytest.raises(
        launcher.UserError, match=f"not started: no space left on tmpfs, at {small_disk}\n.*LAUNCHER_RUNS"
    ):
        launcher.run(plan)
    filler.unlink()
    assert launcher.runs() == [] and shutil.disk_usage(small_disk).used < 64 * 1024
    assert launcher.run(plan).wait(60) == "Completed"


def test_hosts_that_do_not_fit_are_a_warning_of_the_plan_and_their_run_has_not_started(script_job, small_disk):
    job = script_job("print(1)", compute={"instance_count": 8}, distribution="torchrun")
    before = launcher.plan(job)
    room = int(sum(file.size for file in before.files) * 1.5) + 2**20
    with open(small_disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - room)
    plan = launcher.plan(job)
    [warning] = [issue for issue in plan.issues if issue.key == "LAUNCHER_RUNS"]
    assert warning.level == "warning" and f"MiB are free on tmpfs, at {small_disk}" in warning.found
    assert "LAUNCHER_RUNS" not in str(before)
    with pytest.raises(launcher.UserError, match=f"{plan.name} has not started: no space left on tmpfs"):
        launcher.run(plan)
    [run] = launcher.runs()
    assert (run.name, run.state) == (plan.name, "Failed")
    assert run.outcome()["failure"].startswith("not started")


def test_a_run_is_stopped_in_order_on_a_full_disk(script_job, small_disk):
    run = launcher.run(launcher.plan(script_job(SLEEPER)))
    wait_for_ready(run, 1)
    fill(small_disk)
    run.stop()
    assert run.wait(60) == "Stopped"
    assert (run.folder.host("algo-1") / "output/data/told-0").exists(), "it got SIGTERM"
    assert run.outcome()["not_saved"] == [
        f"possibly the hosts' last lines and files: no space left on tmpfs, at {run.folder.path}"
    ]


def test_a_disk_with_room_is_not_called_full(tmp_path):
    assert disk.full(tmp_path) == "" and disk.full(tmp_path, OSError(5, "Input/output error")) == ""
    assert disk.full(tmp_path, OSError(28, "No space left on device")).endswith(f", at {tmp_path}")
