"""`launcher diagnose` as it is typed, on files as runs and SageMaker leave them, and on a run of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import launcher
from launcher.insight import report_text
from launcher.insight.evidence import Evidence
from launcher.insight.rules.table import judge
from launcher.prepare import prepare
from tests.conftest import ROOT
from tests.insight.planted import plant, write
from tests.insight.test_rules import GPU, PLANTED


@pytest.fixture
def kts(tmp_path):
    """16 workers on 2 cores."""
    return write(plant(**PLANTED["too_many_workers", "harsh"]), tmp_path / "before")


def test_16_workers_on_2_cores_are_too_many_and_more_are_never_advised(kts, typed_here):
    done = typed_here("diagnose", kts)
    assert done.returncode == 0, done.stderr
    assert "Too many workers: 16 a process on 2 cores" in done.stdout.splitlines()[0]
    assert "hyperparameters.num_workers=2 (now 16)" in done.stdout


def test_the_report_for_machines_holds_the_same_verdict(kts, typed_here):
    reported = json.loads(typed_here("diagnose", kts, "--json").stdout)
    assert reported["findings"][0]["kind"] == "too_many_workers"
    assert reported["findings"][0]["fixes"][0] | {"why": ""} == {
        **{"setting": "hyperparameters.num_workers", "value": 2, "now": 16, "why": "", "at": None, "change": ""},
        "command": None,
    }
    assert reported["phases"]["data_wait"]["share"] == pytest.approx(reported["findings"][0]["share"], rel=0.05)


def test_a_page_is_written_and_told_beside_the_report(kts, tmp_path, typed_here):
    done = typed_here("diagnose", kts, "--html", tmp_path / "page.html", "--json")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "page.html" in done.stderr and json.loads(done.stdout)


def test_two_sources_are_laid_side_by_side(kts, tmp_path, typed_here):
    after = write(
        plant(phases=PLANTED["too_many_workers", "harsh"]["phases"], cores=2, busy=1.7, settings={"num_workers": 2}),
        tmp_path / "after",
    )
    done = typed_here("diagnose", kts, after)
    assert "reduction ratio" in done.stdout and "num_workers" in done.stdout and "obtained" in done.stdout
    reported = json.loads(typed_here("diagnose", kts, after, "--json").stdout)
    assert {"before", "after", "results", "speedup"} <= set(reported)


def test_sagemakers_files_alone_give_a_verdict_and_say_what_they_do_not_hold(tmp_path, typed_here):
    system = write(plant(phases=None, busy=7.9, gpu=50), tmp_path) / "profiler-output"
    done = typed_here("diagnose", system)
    assert "All cores are busy while the GPUs wait" in done.stdout
    assert "not measured: " in done.stdout and "checkpoints" in done.stdout.split("not measured: ", 1)[1]


def test_where_nothing_was_measured_a_mistake_is_reported(tmp_path, typed_here):
    done = typed_here("diagnose", tmp_path)
    assert done.returncode == 2 and "holds no measurements" in done.stderr and "Traceback" not in done.stderr


def test_a_page_that_cannot_be_written_is_a_mistake(kts, tmp_path, typed_here):
    done = typed_here("diagnose", kts, "--html", tmp_path / "no/page.html")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_page_of_a_folder_whose_name_is_no_utf8_is_written_and_a_page_that_cannot_be_made_leaves_the_old(
    kts, tmp_path, monkeypatch
):
    named = shutil.copytree(kts, tmp_path / os.fsdecode(b"caf\xe9"))
    words = [sys.executable, "-m", "launcher", "diagnose", str(named), "--html", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "caf\\udce9" in (tmp_path / "page.html").read_text()
    old = (tmp_path / "page.html").read_bytes()
    monkeypatch.setattr(
        "launcher.record.records.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        launcher.diagnose(kts).save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == old and [path.name for path in tmp_path.glob(".*")] == []


def test_a_page_is_written_through_a_link_and_into_a_pipe(kts, tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    launcher.diagnose(kts).save_html(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").stat().st_size > 10_000
    os.mkfifo(tmp_path / "pipe")  # and never a device of this machine, which root may replace
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    try:
        launcher.diagnose(kts).save_html(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo() and len(reader.communicate(timeout=60)[0]) > 10_000
    finally:
        reader.kill()


def test_the_launcher_imports_numpy_only_to_diagnose():
    code = "import sys, launcher; launcher.Run.diagnose, launcher.diagnose; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_run_of_this_machine_is_diagnosed_in_every_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("digits", "data/digits")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    few = ["hyperparameters.epochs=12", "hyperparameters.images_per_class=40", "hyperparameters.log_every=2"]
    run = launcher.run(launcher.plan(launcher.load("configs/quickstart_teacher.yaml", few)))
    assert run.wait(120) == "Completed"
    diagnosis = run.diagnose()
    evidence = diagnosis.evidence
    assert {"data_wait", "student_forward", "backward", "optimizer"} <= set(evidence.phases)
    assert isinstance(evidence.workers, int), "also where num_workers is auto"
    assert 0.7 < sum(evidence.phases.values()) < 1.05
    assert evidence.busy is not None and evidence.why_no_steps and diagnosis.headline in str(diagnosis)
    assert diagnosis.measurements.source == diagnosis.measurements.replay.run == run.name
    assert "<h2>" in diagnosis._repr_html_() and diagnosis.save_html(tmp_path / "page.html").stat().st_size > 10_000
    assert str(launcher.diagnose(run.name)) == str(diagnosis)


def test_a_healthy_run_that_is_read_from_files_is_not_accused(tmp_path, typed_here):
    done = typed_here("diagnose", write(plant(phases=GPU, gpu=96), tmp_path), "--json")
    reported = json.loads(done.stdout)
    assert reported["findings"] == [] and reported["headline"].startswith("No bottleneck found in what was measured")


def test_the_exchange_of_gradients_is_no_arithmetic_and_a_part_of_backward():
    run = Evidence(
        plant(phases={"forward": 0.3, "backward": 0.5, "grad_sync": 0.08, "data_wait": 0.02}, ranks=2, noise=0.0)
    )
    reported = report_text.text(run, judge(run))
    assert "88 % of each step is the models' own arithmetic" in reported.replace("\n", " ")
    assert "grad_sync (part of backward)" in reported
