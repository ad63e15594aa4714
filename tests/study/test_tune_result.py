"""What a tuning shows and writes: commands, the new config, and no secret."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import launcher
from launcher.commands.main import main
from launcher.config import yaml_edit
from launcher.insight.findings import Finding
from launcher.record.records import RunFolder
from launcher.runner.run import Run
from launcher.show import html
from launcher.study import tune_page
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import Proposal, Search, Step, Trial
from launcher.study.tune_subject import CommandSubject, JobSubject, Subject


def tuned(
    subject: Subject, changes: dict[str, object], config: Path | None = None, given: Sequence[str] = ()
) -> Tuning:
    """A tuning that kept some changes, without any run."""
    search = Search(subject, frozenset(), None, lambda first: None, print)
    search.best = [Trial(changes, Run(RunFolder(Path("none"))))]
    text = "" if config is None else config.read_text()
    return Tuning(subject, Path("trials.csv"), search, config, text, given=given)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (1000.0, "of the whole job, measured"),
        (None, "of its steps (without the start: the job's length is not known), measured"),
    ],
)
def test_a_speed_up_says_what_of_the_job_it_is_of(images, said):
    found = tuned(CommandSubject(["python"], "it"), {})
    found.search.images = lambda first: images
    found.search.first = found.search.best
    found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
    assert f"speed-up 1.00 {said}" in str(found)


@pytest.mark.parametrize("decided", [False, True])
def test_a_budget_that_left_a_change_undecided_says_how_to_continue(decided):
    found = tuned(CommandSubject(["python"], "it"), {})
    found.search.first = found.search.best
    found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
    found.search.steps = [Step(Proposal({"num_workers": 2}, None, ""), [], [], why="spent", decided=decided)]
    found.search.ended = "1 minute is spent (--minutes)"
    said = "num_workers=2: not decided; the same command with more --minutes continues"
    assert (said in found.sentences()) is not decided


def test_a_written_config_without_a_kept_change_is_called_the_unchanged_job(place, tmp_path, monkeypatch, capsys):
    kept: dict[str, object] = {}
    config = place / "config.yaml"

    def tune(*_, **__) -> Tuning:
        found = tuned(JobSubject(launcher.load(config), "process", 60), kept, config)
        found.search.first = found.search.best
        found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
        return found

    monkeypatch.setattr(launcher, "tune", tune)
    written = tmp_path / "tuned.yaml"
    assert main(["tune", str(config), "--write", str(written)]) == 0
    assert f"config  {written}, the unchanged job: no change was kept\n" in "".join(capsys.readouterr())
    kept["num_workers"] = 3
    assert main(["tune", str(config), "--write", str(written)]) == 0
    assert f"config  {written}\n" in "".join(capsys.readouterr())


@pytest.mark.parametrize("cut_off", [False, True])
def test_an_error_that_ended_the_search_loses_no_result_and_is_the_exit_code(place, tmp_path, monkeypatch, cut_off):
    config = place / "config.yaml"
    found = tuned(JobSubject(launcher.load(config), "process", 60), {"num_workers": 3}, config)
    found.search.first, found.search.cut_off = found.search.best, cut_off
    found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
    monkeypatch.setattr(launcher, "tune", lambda *_, **__: found)
    assert main(["tune", str(config), "--write", str(tmp_path / "tuned.yaml")]) == int(cut_off)
    assert "num_workers: 3" in (tmp_path / "tuned.yaml").read_text()


def test_nothing_that_is_shown_holds_a_secret(place, tmp_path):
    [shown] = tuned(CommandSubject(["python", "my train.py", "--token", "hunter2"], "it"), {"pin_memory": True}).how()
    command = """LAUNCHER_SETTINGS='{"pin_memory": true}' launcher watch -- python 'my train.py' --token '***'"""
    assert shown == (command, False), "not to paste"
    config = tmp_path / "config.yaml"
    config.write_text(
        (place / "config.yaml")
        .read_text()
        .replace("hyperparameters:", "environment: {MY_TOKEN: hunter2}\nhyperparameters:")
    )
    job = JobSubject(launcher.load(config), "process", 60)
    found = tuned(job, {"OMP_NUM_THREADS": 2, "num_workers": 3}, config)
    assert "+environment: ***" in found.diff() and "+  num_workers: 3" in found.diff(), found.diff()
    assert "hunter2" not in "".join(text for text, _ in found.how())
    assert "{MY_TOKEN: hunter2" in found.write(tmp_path / "new.yaml").read_text()


def test_the_command_with_the_changes_is_a_line_of_its_own_to_paste():
    found = tuned(CommandSubject(["python", "my train.py"], "it"), {"OMP_NUM_THREADS": "2", "num_workers": 3})
    found.search.first = found.search.best
    found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
    command = """LAUNCHER_SETTINGS='{"num_workers": 3}' OMP_NUM_THREADS=2 launcher watch -- python 'my train.py'"""
    assert command in str(found).splitlines()
    assert f"<code>{escape(command)}</code>" in found._repr_html_()


def test_a_config_that_cannot_be_edited_loses_no_result(place, tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_edit, "with_values", lambda text, values: f"{text}]: [")
    found = tuned(
        JobSubject(launcher.load(place / "config.yaml"), "process", 60), {"num_workers": 3}, place / "config.yaml"
    )
    assert found.new_config() is None and found.diff() == ""
    assert found.how() == [(f"launcher run {place / 'config.yaml'} hyperparameters.num_workers=3", True)]
    found.subject.on = "docker"
    assert found.how() == [(f"launcher run {place / 'config.yaml'} --on docker hyperparameters.num_workers=3", True)]
    with pytest.raises(launcher.UserError, match=r"hides where a key belongs[^$]*hyperparameters.num_workers=3"):
        found.write(tmp_path / "new.yaml")


@pytest.mark.parametrize("now", ["removed", "edited", "written", "as it was"])
def test_the_new_config_is_made_of_the_text_that_was_tuned(place, tmp_path, now):
    config = tmp_path / "config.yaml"
    config.write_text(before := (place / "config.yaml").read_text())
    found = tuned(JobSubject(launcher.load(config), "process", 60), {"num_workers": 3}, config)
    found.search.first = found.search.best
    found.search.best[0].diagnosis = SimpleNamespace(findings=(), evidence=None, headline="nothing")
    if now == "removed":
        config.unlink()
    elif now == "edited":
        config.write_text(before.replace("epochs: 16", "epochs: 32"))
    elif now == "written":
        found.write(config)
    assert "-  num_workers: 0" in found.diff() and "+  num_workers: 3" in found.diff() and "epochs" not in found.diff()
    assert found.write(tmp_path / "new.yaml").read_text() == before.replace("num_workers: 0", "num_workers: 3")
    said = {"removed": "cannot be read any more", "edited": "was changed meanwhile"}.get(now)
    assert [line.partition(": ")[0] for line in found.sentences() if "from before the first trial" in line] == (
        [f"{config} {said}"] if said else []
    )


def test_the_calls_own_values_are_in_the_new_config_and_in_the_command(place, tmp_path, monkeypatch):
    file, given = place / "config.yaml", ["hyperparameters.epochs=2", "hyperparameters.model_options.depth=1"]
    given.append("environment.MY_TOKEN=hunter2")
    found = tuned(JobSubject(launcher.load(file, given), "process", 60), {"num_workers": 3}, file, given)
    new = yaml.safe_load(found.write(tmp_path / "new.yaml").read_text())["hyperparameters"]
    assert (new["epochs"], new["model_options"]["depth"], new["num_workers"]) == (2, 1, 3)
    assert "hunter2" not in (tmp_path / "new.yaml").read_text()
    monkeypatch.setattr(Tuning, "new_config", lambda self: None)
    [(shown, to_paste)] = found.how()
    assert not to_paste, "a secret is left out"
    words = shlex.split(shown)
    assert words[:3] == ["launcher", "run", str(file)]
    assert words[3:] == [*given[:2], "environment.MY_TOKEN=***", "hyperparameters.num_workers=3"]


def test_losses_that_are_no_numbers_are_not_drawn():
    def page(before: dict[int, float], after: dict[int, float]) -> str:
        """Of a change that may alter losses."""
        trials = [Trial({}, Run(RunFolder(Path("none")))) for _ in range(2)]
        trials[0].losses, trials[1].losses = before, after
        finding = Finding(kind="x", title="x", share=0.5, evidence=(), cause="", fixes=())
        step = Step(Proposal({"matmul_precision": "high"}, finding, ""), trials[:1], trials[1:], why="no faster")
        return tune_page.fragment("it", [], [], [step], html.inline)

    finite = {1: 0.5, 2: 0.4}
    for broken in (math.inf, math.nan):
        drawn = page(finite, {1: 0.5, 2: broken})
        assert drawn.count("<circle") == 3 and "nan" not in drawn
        assert "<svg" not in page({1: broken, 2: 0.4}, {1: broken}), "a single loss is no curve"
        assert "<svg" not in page({1: broken}, {1: broken})
