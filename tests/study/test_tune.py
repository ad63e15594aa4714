"""`launcher tune` for real: slow jobs made faster, a job at its limit left alone, and what is refused before any run."""

from __future__ import annotations

import json
import re
import sys
import textwrap

import pytest
import yaml

import launcher
from launcher.commands import main
from tests.study.slow_reads import rows, slow_reads


def test_a_config_that_could_not_be_written_is_refused_before_the_first_trial(tmp_path, capsys):
    for file, found in (("no/where.yaml", "there is no folder"), (str(tmp_path), "is a folder")):
        assert main.main(["tune", "configs/quickstart.yaml", "--write", file]) == 2
        assert f"--write: {file}" in (said := capsys.readouterr().err) and found in said and launcher.runs() == []


def test_mistakes_are_refused_before_anything_runs(place, capsys, monkeypatch):
    def refused(*words: str) -> str:
        assert main.main(["tune", *words]) == 2
        assert launcher.runs() == []
        return capsys.readouterr().err

    config = str(place / "config.yaml")
    assert "neither a config nor a command" in refused()
    assert "config.yaml and a command" in refused(config, "--", sys.executable, "train.py")
    assert "leave out --smoke" in refused("--smoke", "--", sys.executable)
    assert "no-such-program: no such program" in refused("--", "no-such-program")
    assert "aws: a command runs on this machine" in refused("--on", "aws", "--", sys.executable)
    reported = refused(config, "--allow", "precison,num_workers")
    assert "did you mean precision?" in reported and "num_workers: " not in reported
    assert "--minutes: 0" in refused(config, "--minutes", "0") and "--trials: 0" in refused(config, "--trials", "0")
    assert "no such file" in refused("no-such.yaml")
    own = place / "run it"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o700)
    for first, quoted in (("sh", "sh"), (str(own), f"'{own}'")):
        reported = refused(first, "train.py")
        assert f"{first}: a program, not a config" in reported
        assert f"fix:   put the command after --: launcher tune -- {quoted} train.py\n" in reported
    reported = refused(config, 'environment.LAUNCHER_SETTINGS="[1]"')
    assert "environment.LAUNCHER_SETTINGS: [1]: not a JSON object" in reported
    reported = refused("--max-cost", "3", "--", sys.executable)
    assert "--max-cost" in reported and "what a command costs is not known" in reported
    monkeypatch.setenv("LAUNCHER_SETTINGS", "{")
    assert "LAUNCHER_SETTINGS: {: not a JSON object" in refused("--", sys.executable)
    reported = refused(config, "hyperparameters.epochs=0", "observe=false")
    assert "hyperparameters.epochs" in reported


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_that_waits_for_its_reads_gets_more_workers_and_the_same_losses(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--trials", "9", "--minutes", "6", "--html", "why.html", "--", sys.executable, "train.py"]
    assert main.main(words) == 0
    reported = capsys.readouterr()
    table = next((tmp_path / "store/studies").glob("train-tune-process.csv"))
    assert len(rows(table)) <= 9 and {row["failure"] for row in rows(table)} == {""}
    workers = [int(kept) for kept in re.findall(r"^num_workers=(\d+): kept, speed-up ", reported.out, re.MULTILINE)]
    assert workers and workers[0] >= 4 and "logged steps, to the digits printed" in reported.out
    assert "the limit that is left: " in reported.out
    assert "in the script: DataLoader(num_workers=1) at train.py:" in reported.out
    assert "\nLAUNCHER_SETTINGS='{" in reported.out
    page = (tmp_path / "why.html").read_text()
    assert f"num_workers={workers[0]}: kept" in page and "expected" in page and "Storage is too slow" in page
    speed = float(reported.out.split("speed-up ")[-1].split()[0]) if "speed-up" in reported.out else 0
    assert speed > 1.3


@pytest.mark.timeout(600)
def test_a_command_at_its_limit_is_left_as_it_is(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = slow_reads(samples=640, seconds=0).replace("range(2)", "range(1)")
    # a worker that gets no core on a busy machine is a limit of its own, which a second one mends
    text = text.replace("num_workers=1", "num_workers=0").replace("sleep(0.02)", "sleep(0.05)")
    script.write_text(textwrap.dedent(text))
    found = launcher.tune([sys.executable, "train.py"], trials=5, table=tmp_path / "trials.csv", log=lambda line: None)
    assert (found.changes, found.speedup, found.failed) == ({}, 1.0, False)
    assert found.search.ended and found.limit and found.how() == []
    assert "speed-up 1.00 of the whole job, measured in" in str(found)
    with pytest.raises(launcher.UserError, match="a command has no config"):
        found.write(tmp_path / "new.yaml")


@pytest.mark.slow
def test_a_change_that_should_keep_the_losses_and_does_not_is_rolled_back(script, tmp_path, monkeypatch):
    """Each worker has random numbers of its own."""
    monkeypatch.chdir(tmp_path)
    script.write_text(textwrap.dedent(slow_reads(samples=320, seconds=0.02, noise="torch.rand(1)")))
    found = launcher.tune([sys.executable, "train.py"], trials=4, table=tmp_path / "trials.csv", log=lambda line: None)
    assert found.changes == {} and found.speedup == 1.0
    step = found.steps[0]
    assert (step.proposal.setting, step.proposal.value > 1) == ("num_workers", True) and step.gain > 1.2, (
        "it was faster"
    )
    assert "other losses, first at step" in step.why and "it should not change any numbers" in step.why
    assert "--allow num_workers keeps it" in step.why
    again = launcher.tune(
        [sys.executable, "train.py"],
        allow=["num_workers"],
        trials=4,
        table=tmp_path / "trials.csv",
        log=lambda line: None,
    )
    assert again.changes == step.proposal.changes and again.speedup > 1.2, "of the same trials"
    assert f"{step.proposal}: other losses, first at step" in str(again)
    assert "Training loss" in again._repr_html_()


@pytest.mark.slow
def test_a_change_that_does_not_reach_the_script_is_said_to_be_not_set(script, tmp_path, monkeypatch):
    """A worker_init_fn keeps the number of workers."""
    monkeypatch.chdir(tmp_path)
    script.write_text(script.read_text().replace("num_workers=1", "num_workers=1, worker_init_fn=int"))
    found = launcher.tune([sys.executable, "train.py"], trials=2, table=tmp_path / "trials.csv", log=lambda line: None)
    step = found.steps[0]
    assert not step.kept and step.why.startswith(
        f"it was not applied: num_workers was 1 instead of {step.proposal.value}"
    )
    assert len(found.trials()) == 2 and step.gain is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_may_change_more_than_speed_is_asked_for_and_then_tried(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = place / "config.yaml"
    asked = launcher.tune(config, trials=1, table=tmp_path / "asked.csv", log=lambda line: None)
    assert asked.changes == {} and asked.diff() == "" and not asked.failed
    assert any(
        line.startswith("not tried: checkpoint_every=") and "--allow checkpoint_every" in line
        for line in asked.sentences()
    ), str(asked)
    new = tmp_path / "new.yaml"
    words = ["tune", str(config), "--allow", "checkpoint_every", "--trials", "5", "--write", str(new), "--json"]
    assert main.main(words) == 0
    written = capsys.readouterr()
    reported, described = written.err, json.loads(written.out)
    assert (
        "kept, speed-up" in reported and "-  checkpoint_every: 1" in reported and "+  checkpoint_every: " in reported
    ), reported
    tuned = yaml.safe_load(new.read_text())
    assert described["changes"] == {"checkpoint_every": tuned["hyperparameters"]["checkpoint_every"]}
    assert (
        described["speedup"] > 1
        and described["limit"]
        and described["steps"][0]["change"].startswith("checkpoint_every=")
    )
    assert described["steps"][0]["kept"] and {*described["trials"]} == {run.name for run in launcher.runs()} - {
        asked.first.name
    }
    assert tuned["hyperparameters"].pop("checkpoint_every") > 1
    before = yaml.safe_load(config.read_text())
    before["hyperparameters"].pop("checkpoint_every")
    assert tuned == before


@pytest.mark.slow
def test_a_job_that_fails_as_it_is_is_reported(place, tmp_path, capsys):
    words = ["tune", str(place / "config.yaml"), "hyperparameters.model_options={no_such_option: 1}"]
    assert main.main(words) == 1
    assert "the job as it is failed" in capsys.readouterr().out and len(launcher.runs()) == 1
