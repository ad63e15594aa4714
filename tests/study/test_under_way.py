"""A trial on hosts elsewhere outlives a study that is killed: the same command takes it, or stops it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.config.issues import UserError, mistake
from launcher.planner.source_package import SourceFile
from launcher.study import engine, under_way
from launcher.study.conditions import Code
from launcher.study.question import Trial
from launcher.study.under_way import RunningTrial

CONDITIONS = {"code": "1", "settings": "2", "machine": "3"}
JOB: Any = None


def trial(hosts: int) -> Trial:
    return Trial({"hosts": hosts, "repeat": 1}, JOB, f"{hosts} hosts", hosts)


@dataclass
class Elsewhere:
    """A run on SageMaker, as a study sees it."""

    name: str = "far"
    state: str = "InProgress"
    on_this_machine: bool = False
    stopped: list[str] = field(default_factory=list)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def outcome(self) -> dict[str, Any]:
        return {"state": self.state}


@pytest.fixture
def run(monkeypatch) -> Elsewhere:
    """The only run of the store."""
    made = Elsewhere()

    def find(name: str) -> str:
        if name != made.name:
            raise mistake("run", name, "launcher runs")
        return name

    monkeypatch.setattr(under_way.records, "find", find)
    monkeypatch.setattr(under_way, "Run", lambda folder: made)
    return made


@pytest.fixture
def kept(tmp_path, run) -> RunningTrial:
    """A study was killed while its trial on two hosts ran."""
    RunningTrial(tmp_path / "trials.csv", CONDITIONS).write(trial(2), run)
    return RunningTrial(tmp_path / "trials.csv", CONDITIONS)


@pytest.mark.parametrize("state", ["InProgress", "Completed"])
def test_it_is_taken_for_its_trial(kept, run, state):
    said: list[str] = []
    run.state = state
    missing = [trial(1), trial(2)]
    assert kept.left(missing, said.append) == (missing[1], run)
    assert run.stopped == [] and said == ["far, which was left running, goes on as 2 hosts, repeat 1"] * (
        state == "InProgress"
    )


@pytest.mark.parametrize("state", ["Failed", "Stopped", "Stopping"])
def test_one_that_came_to_nothing_runs_again(kept, run, state, monkeypatch):
    run.state = state
    waited: list[Any] = []
    monkeypatch.setattr(under_way, "run_to_completion", lambda begin, **_: waited.append(begin()))
    assert kept.left([trial(2)], print) is None
    again = ["its study was interrupted"]  # the first request may not have reached SageMaker
    assert run.stopped == again * (state == "Stopping")
    assert waited == [run] * (state == "Stopping"), "its hosts may be all that the quota allows"


@pytest.mark.parametrize("changed", ["conditions", "trials"])
def test_one_that_is_no_trial_any_more_is_stopped(kept, run, changed):
    said: list[str] = []
    now = RunningTrial(kept.table, {**CONDITIONS, "code": "4"}) if changed == "conditions" else kept
    assert now.left([trial(2) if changed == "conditions" else trial(4)], said.append) is None
    assert run.stopped == ["its study was interrupted"] and "stopping far" in said[0]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"run": "removed", "key": {}, "conditions": {}}'])
def test_where_nothing_is_known_nothing_is_left(tmp_path, run, text):
    made = RunningTrial(tmp_path / "trials.csv", CONDITIONS)
    said: list[str] = []
    if text is not None:
        made.file.write_text(text)
    assert made.left([trial(2)], said.append) is None
    assert ["removed, which was left running, is not in" in one for one in said] == [True] * ("removed" in (text or ""))


def test_hosts_of_this_machine_end_with_the_study(tmp_path, run):
    run.on_this_machine = True
    made = RunningTrial(tmp_path / "trials.csv", CONDITIONS)
    made.write(trial(2), run)
    assert [*Path(tmp_path).iterdir()] == []


def test_a_trial_that_is_over_leaves_no_file(kept):
    kept.over()
    kept.over()
    assert not kept.file.exists() and kept.left([trial(2)], print) is None


def test_it_is_followed_before_any_other_trial_starts_and_noted_until_its_row_is_there(kept, run, monkeypatch):
    """The file holds one: another trial would take its place, and a second kill would leave this one unknown."""
    followed, trials = [], [trial(1), trial(2)]

    def run_to_completion(begin, *, started, **_):
        begun = begin()
        followed.append(begun)
        started(begun)
        begun.state = "Completed"
        return begun

    class Table:
        file = kept.table

        def add(self, key, measured, done) -> None:
            assert kept.file.exists(), "a kill before this row loses nothing"

    monkeypatch.setattr(engine, "run_to_completion", run_to_completion)
    monkeypatch.setattr(engine, "_planned", lambda job, on: Elsewhere("new"))
    monkeypatch.setattr(engine, "start", lambda planned: planned)
    question = SimpleNamespace(on="aws", measure=lambda done: {}, progress=lambda measured: "")
    begun: list[Any] = []
    failed = engine._run(trials, question, Code([]), Table(), kept, (trials[1], run), print, begun)
    assert failed == [] and [one.name for one in begun] == [one.name for one in followed] == ["far", "new"]
    assert not kept.file.exists()


@pytest.mark.parametrize(
    ("outcome", "reported"),
    [
        (
            {"state": "Stopped", "stop_reason": "compute.max_hours was reached"},
            "Stopped: compute.max_hours was reached",
        ),
        ({"state": "Failed", "failure": "no  memory"}, "Failed: no memory"),
        (
            {"state": "Completed", "not_saved": ["output.tar.gz: the disk is full"]},
            "its results are not here: output.tar.gz: the disk is full",
        ),
    ],
    ids=["its time", "an error", "a full disk"],
)
def test_a_trial_that_shows_nothing_says_why(kept, run, monkeypatch, outcome, reported):
    monkeypatch.setattr(engine, "run_to_completion", lambda begin, **_: begin())
    monkeypatch.setattr(engine, "_planned", lambda job, on: None)
    monkeypatch.setattr(engine, "start", lambda planned: run)
    run.state, run.outcome, run.result = outcome["state"], lambda: outcome, dict
    question = SimpleNamespace(on="aws", measure=lambda done: done.result()["settings"])
    [failed] = engine._run([trial(1)], question, Code([]), SimpleNamespace(file=kept.table), kept, None, print, [])
    assert failed == f"1 hosts, repeat 1: {reported}; launcher logs far"
    assert not kept.file.exists(), "it is over"


def test_a_trial_of_code_that_was_changed_meanwhile_does_not_start(kept, run, tmp_path, monkeypatch):
    """One that was left running has the code of the start, and is followed."""
    script, trials = tmp_path / "train.py", [trial(1), trial(2)]
    script.write_text("depth = 12")
    code = Code([SourceFile("train.py", script, 10)])
    script.write_text("depth = 24")
    run.state, run.result = "Completed", dict
    monkeypatch.setattr(engine, "run_to_completion", lambda begin, **_: begin())
    monkeypatch.setattr(engine, "start", lambda planned: planned)
    question = SimpleNamespace(on="aws", measure=lambda done: {}, progress=lambda measured: "")
    added: list[Any] = []
    table = SimpleNamespace(file=kept.table, add=lambda key, measured, done: added.append(done))
    with pytest.raises(UserError, match="source: was changed while trials run"):
        engine._run(trials, question, code, table, kept, (trials[1], run), print, [])
    assert added == [run]


@pytest.mark.parametrize(("state", "answers"), [("InProgress", True), ("InProgress", False), ("Completed", True)])
def test_one_is_stopped_if_its_study_is_refused_before_it_is_followed(
    script_job, run, tmp_path, monkeypatch, state, answers
):
    def left(self: RunningTrial, trials: list[Trial], log: object) -> tuple[Trial, Elsewhere]:
        return trials[0], run

    def refuse(*_: object) -> None:
        raise mistake("--max-cost", "at most $9", "allow more")

    def silent(reason: str) -> None:
        raise mistake("aws", "no answer", "try again")

    job, said = script_job("x = 1"), list[str]()
    run.state = state
    monkeypatch.setattr(RunningTrial, "left", left)
    monkeypatch.setattr(engine, "report_price", refuse)
    if not answers:
        monkeypatch.setattr(run, "stop", silent)
    question: Any = SimpleNamespace(base=job, on="process", notes=[], keys=("hosts", "repeat"), measured=())
    question.settings, question.trials = lambda: "", lambda: [trial(1)]
    with pytest.raises(UserError, match="--max-cost"):
        engine.run(question, tmp_path / "trials.csv", 1.0, said.append)
    goes_on = state == "InProgress"
    assert run.stopped == ["its study was interrupted"] * (goes_on and answers)
    assert ("stopping far, which was left running" in said) is goes_on and ("no answer" in said[-1]) is not answers
