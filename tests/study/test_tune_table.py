"""The table of a tuning: after a kill or Ctrl-C the same command goes on, and repeats no trial."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launcher
from launcher.commands.main import main
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix
from launcher.planner.source_package import SourceFile
from launcher.record.records import RunFolder, write_json
from launcher.runner.run import Run
from launcher.study import engine, tune_trials
from launcher.study.conditions import CONDITIONS, Code, difference, settings_of
from launcher.study.trial_table import TrialTable, first_code
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import BudgetExhausted, Trial
from launcher.study.tune_subject import Changes, CommandSubject, Subject, Until
from launcher.study.tune_trials import KEYS, MEASURED, Trials
from tests.conftest import as_in_a_terminal, wait_until
from tests.insight.planted import plant
from tests.study.slow_reads import rows, slow_reads


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on_and_repeats_no_trial(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "trials.csv"
    command = [sys.executable, "-m", "launcher", "tune", "--trials", "4", "--table", str(table)]
    command += ["--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        reported = [killed.stdout.readline() for _ in range(2)]
        assert len(rows(table)) == 1, reported
        killed.kill()
    before = rows(table)
    found = launcher.tune([sys.executable, "train.py"], trials=4, table=table, log=lambda line: None)
    after = rows(table)
    assert after[:1] == before and len(after) <= 4 and found.search.ended
    runs = len(launcher.runs())
    again = launcher.tune([sys.executable, "train.py"], trials=4, table=table, log=lambda line: None)
    assert len(launcher.runs()) == runs and str(again) == str(found), "nothing runs again"
    script.write_text(script.read_text() + "# changed\n")
    with pytest.raises(launcher.UserError, match="trials of different code: its files were changed"):
        launcher.tune([sys.executable, "train.py"], trials=4, table=table, log=lambda line: None)


def test_ctrl_c_stops_the_trial_and_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(100)\n")
    (tmp_path / "launcher.py").write_text("raise SystemExit('people call theirs so')\n")
    command = [str(Path(sys.executable).with_name("launcher")), "tune", "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal) as stopped:
        wait_until(launcher.runs, 60, "a trial has begun")
        wait_until(lambda: any("begun" in line for _, line in launcher.runs()[0].logs()), 60, "the command runs")
        stopped.send_signal(signal.SIGINT)
        reported = stopped.stdout.read().splitlines()
    assert reported[-1] == "stopping the running trial; the same command goes on from here"
    assert stopped.returncode == 130
    [run] = launcher.runs()
    assert run.state == "Stopped"


def test_a_failed_job_runs_again_and_python_files_that_a_trial_writes_are_no_other_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = "import pathlib, time\nassert pathlib.Path('data').exists()\n"
    begin += "pathlib.Path('checkpoint').mkdir(exist_ok=True)\n"
    begin += "pathlib.Path('checkpoint/modeling.py').write_text(str(time.time()))\n"
    (tmp_path / "layers.py").touch()
    (tmp_path / "train.py").write_text(begin + textwrap.dedent(slow_reads(samples=320, seconds=0)))

    def tune() -> Tuning:
        table = tmp_path / "trials.csv"
        return launcher.tune([sys.executable, "train.py"], trials=1, table=table, log=lambda line: None)

    assert tune().failed
    (tmp_path / "data").touch()
    assert not tune().failed and (tmp_path / "checkpoint/modeling.py").exists()
    (tmp_path / "checkpoint/modeling.py").write_text("as a later trial left it")
    assert not tune().failed and len(launcher.runs()) == 2, "the same trial"
    assert len(rows(tmp_path / "trials.csv")) == 1
    for change in (lambda: (tmp_path / "layers.py").write_text("depth = 24"), (tmp_path / "layers.py").unlink):
        change()
        with pytest.raises(launcher.UserError, match="trials of different code"):
            tune()


@pytest.mark.parametrize("failure", ["no data", ""])
def test_a_file_that_is_added_after_trials_that_all_failed_is_code(tmp_path, monkeypatch, failure):
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "trials.csv"
    (tmp_path / "train.py").touch()

    def code() -> set[str]:
        return {file.path for file in first_code(table, CommandSubject(["python", "train.py"], "it").code).files}

    assert code() == {"train.py"}
    table.write_text(f"changes,failure\n{{}},{failure}\n")
    (tmp_path / "models.py").touch()
    assert code() == ({"train.py", "models.py"} if failure else {"train.py"})


def test_a_failed_first_tuning_does_not_block_the_corrected_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = textwrap.dedent(slow_reads(samples=320, seconds=0))
    parse = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\nparser.parse_args()\n"
    )
    (tmp_path / "train.py").write_text(parse + text)
    wrong = ["--", sys.executable, "train.py", "--write", "x.yaml", "--minutes", "0"]
    assert main(["tune", *wrong]) == 1
    said, [run] = "".join(capsys.readouterr()), launcher.runs()
    assert said.count("unrecognized arguments") == 1 and f"launcher show {run.name}" in said
    assert "the command got --minutes, --write: options of launcher tune stand before --" in said
    assert main(["tune", "--trials", "1", "--", sys.executable, "train.py", "--epochs", "1"]) == 0
    assert len(rows(next((tmp_path / "store/studies").glob("train-tune-process.csv")))) == 1
    capsys.readouterr()
    assert main(["tune", *wrong]) == 2, "a trial that showed its speed is kept"
    assert "holds trials of different settings" in capsys.readouterr().err
    table = tmp_path / "trials.csv"
    assert main(["tune", "--table", str(table), *wrong]) == 1
    assert main(["tune", "--table", str(table), *wrong, "--more"]) == 2, "a named table is not replaced"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("", "", "different code: its files were changed, or are another folder's, in no git repository"),
        ("", "abc", "different code: commit unknown, now abc"),
        ("abc", "abc+", "different code: commit abc, now abc+"),
        (
            "abc+",
            "abc+",
            "different code: its files were changed, or are another folder's, with other changes since commit abc",
        ),
    ],
)
def test_different_code_is_described_by_its_commits_only_if_they_differ(before, now, said):
    assert difference("code", "1", "2", before, now) == said


class Priced(Subject):
    """Each run of it is a record with a price."""

    name, on, commit, code = "priced", "process", "", Code([])

    def __init__(self, store: Path):
        self.store, self.cost, self.interrupted = store, 0.0, False
        self.outcome = {"state": "Failed", "failure": "no data"}

    def conditions(self) -> dict[str, str]:
        return dict.fromkeys(CONDITIONS, "")

    def run(self, changes: Changes, until: Until, log: Callable[[str], None], started: Callable[[Run], None]) -> Run:
        folder = RunFolder(self.store / f"priced-20260101-00000{len(list(self.store.iterdir()))}-abcd")
        folder.path.mkdir(parents=True)
        plan = {
            "name": folder.name,
            "planned": "2026-01-01T00:00:00+00:00",
            "backend": "process",
            "job": {"name": "it"},
        }
        write_json(folder.plan, {**plan, "hosts": [{"name": "algo-1"}]})
        started(Run(folder))
        write_json(folder.outcome, {**self.outcome, "cost_usd": self.cost})
        if self.interrupted:
            raise KeyboardInterrupt
        return Run(folder)

    def changes_of(self, fix: Fix) -> Changes:
        return {}

    def also(self, finding: Finding, evidence: Evidence) -> Changes:
        return {}


def test_a_trial_of_code_that_was_changed_meanwhile_does_not_start(store, tmp_path):
    store.mkdir()
    subject, script = Priced(store), tmp_path / "train.py"
    script.write_text("depth = 12")
    subject.code = Code([SourceFile("train.py", script, 10)])
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    trials = Trials(subject, table, 20, 600, 15, None, None, print)
    trials({}, "as it is")
    script.write_text("depth = 24")
    with pytest.raises(launcher.UserError, match="source: was changed while trials run"):
        trials({"num_workers": 2}, "it")
    assert len(launcher.runs()) == 1
    script.write_text("depth = 12")
    trials({"num_workers": 2}, "it")
    assert len(launcher.runs()) == 2


@pytest.mark.parametrize(("changes", "times"), [({"num_workers": 2}, 1), ({"batch_size": 8}, 8 / 7)])
def test_an_estimated_batch_makes_no_trial_faster(store, tmp_path, changes, times):
    """A batch of 7.5 images on average is estimated as 7 in one run and as 8 in another that is as fast."""
    store.mkdir()
    subject = Priced(store)
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())

    def pair(trials: Trials) -> list[Trial]:
        found = [trials(one, "it") for one in ({}, changes)]
        for trial, batch in zip(found, (7, 8)):
            measured = plant(phases={"backward": 0.1}, noise=0.0, settings={"global_batch_size": batch})
            trial.diagnosis = Diagnosis(measured)
        return found

    ran = Trials(subject, table, 20, 600, 15, None, None, print)
    for first, other in (pair(ran), pair(Trials(subject, table, 20, 600, 15, None, None, print))):
        assert first.course.each(700) / other.course.each(700) == pytest.approx(times)
        assert tune_trials._figures(first)["step_seconds"] == pytest.approx(0.1)
        assert tune_trials._figures(other)["step_seconds"] == pytest.approx(0.1)
        assert first.steps({}) == 200 and other.batch == round(7 * times)


@pytest.mark.parametrize(("seconds", "said"), [(60, "1 minute is spent"), (90, "1.5 minutes are spent")])
def test_a_spent_budget_of_minutes_is_said_in_grammar(store, tmp_path, seconds, said):
    subject = Priced(store)
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    trials = Trials(subject, table, 20, seconds, 15, None, None, print)
    trials.used = [{"seconds": "100"}]
    assert trials.spent(1) == f"{said} (--minutes)"


def test_trials_that_were_interrupted_or_failed_count_for_what_was_paid(store, tmp_path):
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"

    def trials() -> Trials:
        """As the same command makes them again: a trial costs 50 cents at most, and all of them a dollar."""
        return Trials(subject, TrialTable(file, KEYS, MEASURED, subject.conditions()), 20, 600, 15, 1.0, 0.5, print)

    subject.cost, subject.interrupted = 0.25, True
    with pytest.raises(KeyboardInterrupt):
        trials()({}, "as it is")
    assert rows(file)[0]["state"] == "InProgress"
    subject.cost, subject.interrupted = 0.5, False
    assert trials()({}, "as it is").failed == "no data"
    assert [(row["state"], row["cost_usd"]) for row in rows(file)] == [("Failed", "0.75")]
    assert trials().spent(2) == "", "a course that begins anew with the table's trials looks ahead as it did"
    with pytest.raises(BudgetExhausted, match=r"\$0.75 of \$1.00 are spent, and a trial may cost \$0.50"):
        trials()({}, "as it is")
    assert len(launcher.runs()) == 2


@pytest.mark.parametrize(
    "state, failure, done, steps, again",
    [
        ("Stopped", "", 40, None, True),
        ("Stopped", "", 40, 80, True),
        ("Stopped", "", 80, 80, False),
        ("Stopped", "it recorded too few steps", 4, 80, True),
        ("Completed", "", 40, 80, False),
        ("Failed", "no memory is left", 4, 80, False),
    ],
)
def test_a_trial_that_its_time_stopped_runs_again_with_more_time(store, tmp_path, state, failure, done, steps, again):
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"
    changes: Changes = {"num_workers": 4} if steps else {}
    earlier = subject.run(changes, lambda run: "", print, lambda run: None)
    earlier.folder.metrics.write_text(json.dumps({"rank": 0, "step": done}) + "\n")
    key, row = {"changes": json.dumps(changes), "repeat": 1}, {"state": state, "failure": failure, "seconds": 20.0}
    table = TrialTable(file, KEYS, MEASURED, subject.conditions())
    table.add(key, {**row, "allowed_seconds": 15.0}, earlier)

    def measured(allowed: float) -> bool:
        """Whether a trial of that many seconds runs."""
        known = TrialTable(file, KEYS, MEASURED, subject.conditions())
        trials = Trials(subject, known, 20, 600, allowed, None, None, print)
        return trials(changes, "it", steps).run.name != earlier.name

    assert not measured(10.0) and not measured(15.0)
    assert measured(60.0) is again and rows(file)[0]["allowed_seconds"] == ("60.0" if again else "15.0")


def test_warm_pools_count_for_what_they_cost_at_most_until_that_is_known(store, tmp_path, monkeypatch):
    """Of the run before they are settled once the next one has taken the hosts."""
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"
    subject.cost, known = 0.25, set()
    monkeypatch.setattr(Run, "settle", lambda run: known.update(one.name for one in launcher.runs()[:-1]))
    monkeypatch.setattr(Run, "usd_after_end", property(lambda run: 0.125 if run.name in known else 4.0))

    def trials() -> Trials:
        return Trials(subject, TrialTable(file, KEYS, MEASURED, subject.conditions()), 20, 600, 15, 100.0, 0.5, print)

    assert trials()({}, "as it is").failed == "no data"
    assert [row["cost_usd"] for row in rows(file)] == ["0.25"]
    again = trials()
    again({}, "as it is")
    assert [row["cost_usd"] for row in rows(file)] == ["0.625"], "twice a quarter, and the first one's pool"
    again.max_cost = 4.625 + 0.5
    assert again.spent(1) == ""
    again.max_cost -= 0.01
    assert again.spent(1) == "$4.62 of $5.12 are spent, and a trial may cost $0.50 (--max-cost)"


@pytest.mark.parametrize(
    ("remote", "removed", "paid"),
    [
        ({}, False, 0.5),
        ({}, True, 0.5),
        ({"TrainingStartTime": "2026-11-27T10:00:00+00:00"}, False, 0.5),
        (None, False, 0),
    ],
    ids=["here", "removed", "hosts", "no hosts"],
)
def test_a_trial_from_before_its_price_was_known_counts_as_the_most_it_may_have_cost(
    store, tmp_path, remote, removed, paid
):
    store.mkdir()
    subject = Priced(store)
    run = subject.run({}, lambda run: "", print, lambda run: None)
    write_json(run.folder.outcome, {"state": "Failed", "failure": "no data"})
    if remote != {}:
        stages = {"SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": "2026-11-27T09:00:00+00:00"}]}
        write_json(run.folder.remote, {**stages, **(remote or {})})
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    row = {"state": "Failed", "failure": "no data", "allowed_seconds": 15.0, "seconds": 20.0, "cost_usd": None}
    table.add({"changes": "{}", "repeat": 1}, row, run)
    if removed:
        shutil.rmtree(run.folder.path)
    trials = Trials(subject, table, 20, 600, 15, 1.0, 0.5, print)
    assert trials._paid(table.rows[0]) == paid
    trials.ceiling = None
    assert trials._paid(table.rows[0]) == 0


def test_a_removed_run_of_a_failed_trial_does_not_stop_the_same_command(store, tmp_path):
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"
    subject.cost = 0.25
    for _ in range(2):
        trials = Trials(subject, TrialTable(file, KEYS, MEASURED, subject.conditions()), 20, 600, 15, 1.0, 0.25, print)
        assert trials({}, "as it is").failed == "no data"
        shutil.rmtree(launcher.runs()[0].folder.path)
    assert [row["cost_usd"] for row in rows(file)] == ["0.5"]


@pytest.mark.parametrize(
    ("outcome", "again"),
    [
        ({"state": "Completed"}, False),
        ({"state": "Stopped", "stop_reason": "its 15 s as a trial are over"}, False),
        ({"state": "Stopped", "stop_reason": "it made the 80 steps of the first trial"}, False),
        ({"state": "Stopped", "stop_reason": "Ctrl-C"}, True),
        ({"state": "Failed", "failure": "CapacityError"}, True),
    ],
)
def test_a_trial_whose_tuning_was_killed_counts_if_it_shows_what_it_was_to_show(store, tmp_path, outcome, again):
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"
    subject.cost, changes = 0.25, {"num_workers": 4}
    left = subject.run(changes, lambda run: "", print, lambda run: None)
    write_json(left.folder.outcome, {**outcome, "cost_usd": 0.25})
    table = TrialTable(file, KEYS, MEASURED, subject.conditions())
    key = {"changes": json.dumps(changes), "repeat": 1}
    table.add(key, {"state": "InProgress", "allowed_seconds": 15.0, "cost_usd": 0.5}, left)
    trials = Trials(subject, table, 20, 600, 15, 9.0, 0.5, print, used=[{"changes": "{}", "seconds": "20"}])
    assert (trials(changes, "it").run.name == left.name) is not again
    assert [row["cost_usd"] for row in rows(file)] == ["1.0" if again else "0.75"]


@pytest.mark.parametrize(
    ("seconds", "done", "again"), [(15.0, 40, False), (60.0, 40, True), (60.0, 80, False)], ids=str
)
def test_a_trial_whose_tuning_was_killed_runs_again_with_more_time(store, tmp_path, seconds, done, again):
    """Unless it made all steps."""
    store.mkdir()
    subject, changes = Priced(store), {"num_workers": 4}
    subject.outcome = {"state": "Stopped", "stop_reason": "its 15 s as a trial are over"}
    left = subject.run(changes, lambda run: "", print, lambda run: None)
    left.folder.metrics.write_text(json.dumps({"rank": 0, "step": done}) + "\n")
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    key = {"changes": json.dumps(changes), "repeat": 1}
    table.add(key, {"state": "InProgress", "allowed_seconds": 15.0, "cost_usd": 0.0}, left)
    used = [{"changes": "{}", "seconds": "20"}]
    trials = Trials(subject, table, 20, 600, seconds, None, None, print, used=used)
    assert (trials(changes, "it", 80).run.name != left.name) is again


def test_a_first_trial_that_is_too_short_is_a_failure_in_the_table_and_runs_again(store, tmp_path):
    store.mkdir()
    subject, file = Priced(store), tmp_path / "trials.csv"
    subject.cost = 0.25
    subject.outcome = {"state": "Stopped", "stop_reason": "its 15 s as a trial are over"}
    for paid in ("0.25", "0.5"):
        trials = Trials(subject, TrialTable(file, KEYS, MEASURED, subject.conditions()), 20, 600, 15, 9.0, 0.5, print)
        with pytest.raises(launcher.UserError) as short:
            trials({}, "as it is")
        [row] = rows(file)
        assert (row["state"], row["failure"], row["cost_usd"]) == ("Stopped", short.value.issues[0].found, paid)
    assert len(launcher.runs()) == 2


@pytest.mark.parametrize("state", ["InProgress", "Stopping"])
def test_a_trial_that_goes_on_although_its_tuning_was_killed_is_stopped_first(store, tmp_path, monkeypatch, state):
    """Also if an earlier request may not have reached SageMaker."""
    store.mkdir()
    subject, stopped = Priced(store), []
    left = subject.run({}, lambda run: "", print, lambda run: None)
    goes_on = property(lambda run: state if run.name == left.name and not stopped else "Failed")
    monkeypatch.setattr(Run, "state", goes_on)
    monkeypatch.setattr(Run, "wait", lambda run, *args, **options: "Failed")
    monkeypatch.setattr(Run, "stop", lambda run, reason: stopped.append((run.name, reason)))
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    table.add({"changes": "{}", "repeat": 1}, {"state": "InProgress", "allowed_seconds": 15.0}, left)
    tune_trials.stop_left(table.file, print)
    assert stopped == [(left.name, "its tuning was interrupted")]
    assert Trials(subject, table, 20, 600, 15, None, None, print)({}, "as it is").run.name != left.name
    assert len(stopped) == 1


def test_a_trial_that_was_left_running_is_stopped_before_its_table_is_refused(script, store, tmp_path, monkeypatch):
    store.mkdir()
    monkeypatch.chdir(tmp_path)
    left, said, stopped = Priced(store).run({}, lambda run: "", print, lambda run: None), [], []
    monkeypatch.setattr(Run, "state", "InProgress")
    monkeypatch.setattr(Run, "stop", lambda run, reason: stopped.append((run.name, reason)))
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, dict.fromkeys(CONDITIONS, "before"))
    table.add({"changes": "{}", "repeat": 1}, {"state": "InProgress", "allowed_seconds": 15.0}, left)
    table.add({"changes": "{}", "repeat": 2}, {"state": "Completed", "allowed_seconds": 15.0}, left)
    removed = SimpleNamespace(name="removed", outcome=dict)
    table.add({"changes": "{}", "repeat": 3}, {"state": "InProgress", "allowed_seconds": 15.0}, removed)
    with pytest.raises(launcher.UserError, match="holds trials of different code"):
        launcher.tune([sys.executable, "train.py"], table=table.file, log=said.append)
    assert stopped == [(left.name, "its tuning was interrupted")]
    assert said == [f"stopping {left.name}, which was left running"]


@pytest.mark.parametrize(
    "text", ["", "state\nInProgress\n", "run,state\n,InProgress\n", "state,run\nInProgress\n", "a,b\n1,2,3\n"]
)
def test_in_a_file_that_is_no_table_of_a_tuning_nothing_is_stopped(store, tmp_path, text):
    store.mkdir()
    (tmp_path / "other.csv").write_text(text)
    tune_trials.stop_left(tmp_path / "other.csv", print)
    tune_trials.stop_left(tmp_path / "missing.csv", print)


def test_what_the_last_trials_warm_pool_costs_is_said_at_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(
        Run, "remaining_costs", property(lambda run: f"4 hosts stay; to end that: launcher stop {run.name}")
    )
    said: list[str] = []
    launcher.tune([sys.executable, "train.py"], trials=1, table=tmp_path / "trials.csv", log=said.append)
    assert said[-1] == f"4 hosts stay; to end that: launcher stop {launcher.runs()[0].name}"


def on_sagemaker(*stages: str, steps: int = 0) -> Any:
    """A run there, as far as SageMaker and its log show it."""
    remote = {
        "SecondaryStatusTransitions": [{"Status": stage, "StartTime": "2026-01-01T00:00:00+00:00"} for stage in stages]
    }
    lines = [{"step": steps}] if steps else []
    return SimpleNamespace(
        backend="aws", metrics=lambda: lines, folder=SimpleNamespace(read=lambda file: remote, remote=None)
    )


@pytest.mark.parametrize(
    ("shows_steps", "run", "after"),
    [
        (True, on_sagemaker("Starting", "Training"), 900),  # the kit's own script, whose steps its log shows
        (False, on_sagemaker("Starting"), 900),
        (False, on_sagemaker("Starting", "Training"), 120 + 45),
        (False, on_sagemaker("Starting", "Training", steps=3), 45),
    ],
)
def test_a_trial_whose_steps_are_not_seen_while_it_runs_ends_by_the_time_of_its_script(
    store, tmp_path, monkeypatch, shows_steps, run, after
):
    subject = Priced(store)
    subject.shows_steps = shows_steps
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    until, now = Trials(subject, table, 20, 600, 45, None, None, print)._until(None), [1000.0]
    monkeypatch.setattr(tune_trials.time, "monotonic", lambda: now[0])
    assert until(run) == "", "its clock begins when it was sent: an upload may have taken long"
    now[0] += after
    assert until(run) == ""
    now[0] += 1
    assert until(run) == (f"no step within {after} s" if after == 900 else "its 45 s as a trial are over")


@pytest.mark.parametrize(("stages", "again"), [(("Starting",), True), (("Starting", "Training"), False)])
def test_a_trial_that_got_no_hosts_is_no_reason_against_a_change(store, tmp_path, stages, again):
    store.mkdir()
    subject, changes = Priced(store), {"num_workers": 4}
    run = subject.run(changes, lambda run: "", print, lambda run: None)
    plan = json.loads(run.folder.plan.read_text())
    write_json(run.folder.plan, {**plan, "backend": "aws"})
    write_json(run.folder.remote, on_sagemaker(*stages).folder.read(None))
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    row = {"state": "Failed", "failure": "CapacityError", "allowed_seconds": 15.0, "seconds": 20.0}
    table.add({"changes": json.dumps(changes), "repeat": 1}, row, run)
    trial = Trials(subject, table, 20, 600, 15, None, None, print)(changes, "it")
    assert (trial.run.name != run.name) is again


@pytest.mark.parametrize("section", [{"profiling": {"system_interval_ms": 100}}, {"debugger": {}}])
def test_trials_with_and_without_a_profiler_are_not_compared(section):
    job = {"name": "x", "script": "train_classifier.py", "region": "us-west-2"}
    without, profiled = (launcher.from_values(values) for values in (job, {**job, **section}))
    assert settings_of(without, ()) != settings_of(profiled, ())


@pytest.mark.parametrize(
    "more",
    [{"distribution": "smddp", "custom_mpi_options": "-x NCCL_DEBUG=INFO"}, {"network": {"encrypt_traffic": True}}],
    ids=["mpirun", "encryption"],
)
def test_what_slows_the_traffic_between_hosts_is_a_setting_of_the_table(more):
    job = {"name": "x", "script": "train_classifier.py", "distribution": more.get("distribution", "none")}
    without, other = (launcher.from_values(values) for values in (job, {**job, **more}))
    assert settings_of(without, ()) != settings_of(other, ())
    assert {"network", "custom_mpi_options"}.isdisjoint(json.loads(settings_of(without, ()))), "older tables stay valid"


def test_a_trial_without_a_step_says_why_it_was_stopped(store, tmp_path, monkeypatch):
    """Not that it recorded too few steps: more minutes would not help."""
    store.mkdir()
    subject = Priced(store)
    run = subject.run({}, lambda run: "", print, lambda run: None)
    write_json(run.folder.outcome, {"state": "Stopped", "stop_reason": "no step within 900 s"})
    monkeypatch.setattr(subject, "run", lambda *_: run)
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    trial = Trials(subject, table, 20, 600, 15, None, None, print)({}, "as it is")
    assert trial.failed == "stopped: no step within 900 s" == rows(tmp_path / "trials.csv")[0]["failure"]


@pytest.mark.parametrize(("more", "paid"), [({}, 0.0), ({"TrainingStartTime": "2026-11-27T10:00:00+00:00"}, 0.5)])
def test_a_job_that_got_no_hosts_cost_nothing(store, tmp_path, more, paid):
    store.mkdir()
    subject = Priced(store)
    run = subject.run({}, lambda run: "", print, lambda run: None)
    write_json(run.folder.outcome, {"state": "Failed", "failure": "CapacityError"})
    write_json(
        run.folder.remote,
        {"SecondaryStatusTransitions": [{"Status": "Starting", "StartTime": "2026-11-27T09:00:00+00:00"}], **more},
    )
    table = TrialTable(tmp_path / "trials.csv", KEYS, MEASURED, subject.conditions())
    assert Trials(subject, table, 20, 600, 15, 1.0, 0.5, print)._cost(run) == paid


def test_what_hosts_cost_after_the_end_is_said_after_ctrl_c_too(monkeypatch):
    said: list[str] = []
    left, taken = (
        SimpleNamespace(settle=lambda: said.append("settled"), remaining_costs=text) for text in ("2 hosts stay", "")
    )
    with pytest.raises(KeyboardInterrupt), engine.what_stays(said.append) as begun:
        begun += [taken, left]
        raise KeyboardInterrupt
    assert said == ["settled", "settled", "2 hosts stay"]


def test_a_table_whose_run_is_in_another_store_says_where_it_looked(store, tmp_path):
    store.mkdir()
    subject = Priced(store)
    with pytest.raises(launcher.UserError, match=f"names the run gone, which is not in {store}") as refused:
        Trials(
            subject, TrialTable(tmp_path / "t.csv", KEYS, MEASURED, subject.conditions()), 1, 1, 1, None, None, print
        )._recorded("gone")
    fix = refused.value.issues[0].fix
    assert "LAUNCHER_RUNS=" in fix and "remove its row" in fix and "rm " not in fix, "the other trials are paid for"
