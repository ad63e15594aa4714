"""`launcher rm` and `launcher prune`: what they remove, what they ask, and what they leave."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

import launcher
from launcher.commands import main
from launcher.record.records import RunFolder
from launcher.study.trial_table import held
from tests.conftest import ROOT, SLEEPER, wait_for_ready, wait_until
from tests.launcher.test_store import recorded


def days_ago(days: float, job: str = "job", **values) -> RunFolder:
    when = datetime.now(timezone.utc) - timedelta(days=days)
    return recorded(f"{job}-{when:%Y%m%d-%H%M%S}-aaaa", planned=when.isoformat(), **values)


def left() -> set[str]:
    return {run.name for run in launcher.runs()}


def test_runs_are_removed_whole_but_not_what_their_links_lead_to(tmp_path, capsys):
    run, other = days_ago(1), days_ago(2, "other")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/image").write_bytes(bytes(5000))
    (run.path / "channel").symlink_to(tmp_path / "data")
    (run.path / "weights").write_bytes(bytes(2_000_000))
    assert main.main(["rm", run.name, "--yes"]) == 0
    assert "removed 1 run, 2.0 MB" in capsys.readouterr().out
    assert left() == {other.name} and not run.path.exists() and (tmp_path / "data/image").exists()


def test_without_a_terminal_nothing_is_removed_unless_yes_says_so(capsys):
    run = days_ago(40)
    for words in (["rm", run.name], ["prune", "--older-than", "30d"]):
        assert main.main(words) == 2
        assert "add --yes to remove 1 run" in capsys.readouterr().err and run.path.exists()


def asked(run: RunFolder) -> tuple[subprocess.Popen, int]:
    """`launcher rm RUN` in a terminal, where it has asked; and the terminal's other end."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "launcher", "rm", run.name]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=ROOT)
    os.close(child)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(parent, 65536)
    return process, parent


@pytest.mark.parametrize("answer, stays", [(b"y\n", False), (b"\n", True), (b"n\n", True), (b"\x04", True)])
def test_a_terminal_is_asked(answer, stays):
    run = days_ago(1)
    process, parent = asked(run)
    os.write(parent, answer)
    assert process.wait(60) == 0 and run.path.exists() == stays
    os.close(parent)


def test_a_run_that_comes_into_use_before_the_answer_stays():
    run = days_ago(1)
    process, parent = asked(run)
    resumed = days_ago(0, state="", resumes=run.name)
    with open(resumed.lock, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(parent, b"y\n")
        assert process.wait(60) == 2 and run.path.exists()
    os.close(parent)


def test_a_jobs_name_removes_nothing(capsys):
    run = days_ago(1)
    assert main.main(["rm", "job", "--yes"]) == 2
    assert f"launcher rm {run.name}" in capsys.readouterr().err and run.path.exists()


def test_a_run_under_way_and_what_it_reads_stay(script_job, capsys):
    earlier = days_ago(40, "teacher")
    earlier.model.write_bytes(b"x")
    run = launcher.run(launcher.plan(script_job(SLEEPER, inputs={"teacher": {"run": "teacher"}})))
    try:
        wait_for_ready(run, 1)
        assert main.main(["rm", run.name, earlier.name, "--yes"]) == 2
        err = capsys.readouterr().err
        assert f"{run.name} is under way" in err and f"{run.name}, which is under way, uses {earlier.name}" in err
        began = run.name.rsplit("-", 1)[0][-15:]
        wait_until(
            lambda: f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}" > began, 10, "the second after the run's start"
        )
        assert main.main(["prune", "--older-than", "0h", "--state", "Completed", "--yes"]) == 0
        assert "2 in use" in capsys.readouterr().out and left() == {earlier.name, run.name}
    finally:
        run.stop()
        run.wait(60)
    assert main.main(["rm", run.name, earlier.name, "--yes"]) == 0 and left() == set()


@pytest.mark.parametrize("given", [{"file": "model.tar.gz"}, {"folder": "hosts/algo-1"}], ids=["file", "folder"])
def test_a_run_whose_files_a_run_under_way_reads_stays_too(script_job, capsys, given):
    """By their place, as a label bank among a run's checkpoints; the channel is a link."""
    earlier = days_ago(40, "teacher")
    earlier.model.write_bytes(b"x")
    (earlier.path / "hosts/algo-1").mkdir(parents=True, exist_ok=True)
    (earlier.path / "hosts/algo-1/a.bin").write_bytes(b"x")
    [(kind, place)] = given.items()
    run = launcher.run(launcher.plan(script_job(SLEEPER, inputs={"cache": {kind: str(earlier.path / place)}})))
    try:
        wait_for_ready(run, 1)
        assert main.main(["rm", earlier.name, "--yes"]) == 2
        assert f"{run.name}, which is under way, uses {earlier.name}" in capsys.readouterr().err
    finally:
        run.stop()
        run.wait(60)


@pytest.mark.parametrize("of", ["disk", "store"])
def test_what_is_read_in_a_store_behind_a_link_is_known_by_either_path(store, tmp_path, capsys, of):
    """The store itself, which an input may be too, is no run."""
    (tmp_path / "disk").mkdir()
    store.symlink_to(tmp_path / "disk")
    earlier = days_ago(40, "teacher")
    inputs = {"all": {"folder": str(store)}, "cache": {"folder": str(tmp_path / of / earlier.name / "hosts")}}
    run = recorded("reads-20260101-000000-aaaa", state="", job={"name": "reads", "inputs": inputs})
    run.remote.write_text(json.dumps({"TrainingJobStatus": "InProgress"}))
    assert main.main(["rm", earlier.name, "--yes"]) == 2
    assert f"{run.name}, which is under way, uses {earlier.name}" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["store/studies", "a'; echo", "ünï-码"])
def test_trials_stay_while_their_table_is_in_use_and_then_it_is_named(tmp_path, capsys, place):
    """A later `launcher tune` reads their runs; the table lies where `--table` said."""
    trial, other = days_ago(40, state="Stopped"), days_ago(41, "other")
    table = tmp_path / place / "job-tune-process.csv"
    with held(table):
        table.write_text(f'changes,repeat,run\n"{{""num_workers"": 4}}",1,{trial.name}\n{{}},1,\n')
        assert main.main(["rm", trial.name, "--yes"]) == 2
        assert f"{trial.name} is a trial in {table}, which a study or a tuning is using" in capsys.readouterr().err
        assert main.main(["prune", "--older-than", "30d", "--yes"]) == 0
        out = capsys.readouterr().out
        assert "these stay: 1 in use" in out and "trial in" not in out and left() == {trial.name}
    named = f"1 of these runs is a trial in {table}: launcher tune reads its trials' runs again"
    for words in (["rm", trial.name], ["prune", "--older-than", "30d"]):
        assert main.main(words) == 2 and named in capsys.readouterr().out and left() == {trial.name}
    assert main.main(["prune", "--older-than", "30d", "--yes"]) == 0
    assert named in capsys.readouterr().out and left() == set() and not other.path.exists()


def test_a_table_of_the_store_is_named_once_by_whatever_path_it_was_used(store, tmp_path, capsys):
    run, link = days_ago(40), tmp_path / "link"
    link.symlink_to(store)
    for place in (store, link):
        with held(place / "studies/table.csv"):
            (place / "studies/table.csv").write_text(f"run\n{run.name}\n")
    assert main.main(["rm", run.name, "--yes"]) == 0
    out = capsys.readouterr().out
    assert out.count("is a trial in") == 1 and f"trial in {store}/studies/table.csv" in out


@pytest.mark.parametrize("content", [b"", b"\0\xff\n\0", b"a,b\n1,2,3\n", b"run\n" + b"x" * 200_000, None])
def test_a_file_that_is_no_table_keeps_no_run(store, capsys, content):
    run = days_ago(40)
    (store / "studies").mkdir()
    if content is None:
        (store / "studies/of-trials.csv").mkdir()
        (store / "studies/gone.csv").symlink_to("nowhere")
        (store / "studies/.elsewhere-0123456789abcdef").write_text("/nowhere/table.csv")
    else:
        (store / "studies/of-trials.csv").write_bytes(content)
    assert main.main(["rm", run.name, "--yes"]) == 0
    assert "trial in" not in capsys.readouterr().out and left() == set()


def test_a_run_that_sagemaker_has_not_ended_stays(capsys):
    run = days_ago(40, state="", backend="aws")
    run.remote.write_text(json.dumps({"TrainingJobStatus": "InProgress"}))
    assert main.main(["rm", run.name, "--yes"]) == 2
    assert f"{run.name} is under way" in capsys.readouterr().err and run.path.exists()


def test_old_runs_go_and_failed_or_damaged_ones_stay_unless_asked_for(capsys):
    old, young = days_ago(31), days_ago(29)
    stopped, failed, damaged = (days_ago(31, state, state=state) for state in ("Stopped", "Failed", "Completed"))
    adopted = recorded("of-another-program", planned="2020-01-01T00:00:00+00:00")
    damaged.outcome.write_text("{")
    foreign = old.path.parent / "notes"
    foreign.mkdir()
    assert main.main(["prune", "--older-than", "30d", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "of the runs that are older, these stay: 1 damaged, 1 Failed" in out and "removed 3 runs" in out
    assert left() == {young.name, failed.name, damaged.name} and foreign.is_dir() and not adopted.path.exists()
    assert main.main(["prune", "--older-than", "30d", "--state", "Failed", "--yes"]) == 0
    assert left() == {young.name, damaged.name} and not stopped.path.exists()
    assert main.main(["prune", "--older-than", "30d", "--yes"]) == 0 and "no run to remove" in capsys.readouterr().out
    assert main.main(["rm", damaged.name, "--yes"]) == 0 and left() == {young.name}


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1.5d", "30 days", "1y", ""])
def test_an_age_that_is_none_is_refused(age, capsys):
    assert main.main(["prune", f"--older-than={age}", "--yes"]) == 2
    assert "write --older-than 30d" in capsys.readouterr().err


def test_every_name_that_is_no_run_is_reported_at_once(capsys):
    recorded("job-20261122-100000-aaaa")
    assert main.main(["rm", "foo", "job", "bar", "--yes"]) == 2
    err = capsys.readouterr().err
    assert "3 mistakes" in err and "foo: no such run" in err and "bar: no such run" in err
    assert "job is a job; its latest run is job-20261122-100000-aaaa" in err


@pytest.mark.parametrize("age", ["60000w", "90000w", "99999w"])
def test_an_age_of_more_than_a_thousand_years_chooses_nothing(age, capsys):
    run = days_ago(10)
    assert main.main(["prune", "--older-than", age, "--yes"]) == 0
    assert "no run to remove" in capsys.readouterr().out and run.path.exists()
