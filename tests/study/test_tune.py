"""`launcher tune` for real: slow jobs made faster, a job at its limit left alone, a kill, Ctrl-C, and what is refused before any run."""

from __future__ import annotations

import csv
import json
import math
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

import launcher
from launcher.commands import main
from launcher.config import yaml_edit
from launcher.prepare import photos
from launcher.record.records import RunFolder, write_json
from launcher.runner.run import Run
from launcher.study import tune_course, tune_subject
from launcher.study.tune_course import Course
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import Search, Trial
from launcher.study.tune_subject import CommandSubject, JobSubject, Subject
from tests.conftest import as_in_a_terminal, wait_until

SLOW_READS = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return {samples}

        def __getitem__(self, index):
            time.sleep({seconds})
            return torch.full((8,), float(index)) + {noise}, index % 2

    def main():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)
        for epoch in range(2):
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.02)
                print(f"loss: {{loss.item():.8f}}", flush=True)

    main()
"""
"""Reads that take their time, whatever else the machine does."""


def slow_reads(samples: int, seconds: float, noise: str = "0") -> str:
    """The text of SLOW_READS.

    Args:
        noise: an expression that is added to each sample.
    """
    return SLOW_READS.format(samples=samples, seconds=seconds, noise=noise)


@pytest.fixture
def script(tmp_path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(slow_reads(samples=320, seconds=0.02)))
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with photographs and a config of a job that does little beside writing checkpoints."""
    folder = tmp_path_factory.mktemp("tune")
    for split, numbers in (("train", range(40)), ("validation", range(40, 42))):
        for label in photos.CLASSES:
            (folder / split / label).mkdir(parents=True)
            for number in numbers:
                photos.draw(label, number).save(folder / split / label / f"{number}.jpg", quality=95)
    job = {
        "name": "tiny",
        "script": "train_classifier.py",
        "inputs": {name: {"folder": str(folder / name)} for name in ("train", "validation")},
        "checkpoints": "s3://amzn-s3-demo-bucket/tiny",
        "hyperparameters": {
            "model": "vit_tiny_patch16_224",
            "model_options": {"img_size": 16, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 2},
            "image_size": 16,
            "global_batch_size": 4,
            "num_workers": 0,
            "epochs": 4,
            "evaluate_every": 100,
            "log_every": 2,
            "checkpoint_every": 1,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open())) if file.exists() else []


def course(each: float, start: float = 10.0, images: int = 100) -> Course:
    counted = np.arange(20.0, images + 1, 10)
    return Course(counted, start + (counted - 20) * each)


def test_trials_are_compared_over_the_images_that_all_of_them_did():
    slow, fast = course(0.2, images=60), course(0.1)
    stalled = Course(fast.images, fast.seconds + np.where(fast.images > 80, 100.0, 0.0))
    assert slow.each(60) == pytest.approx(0.2) and fast.each(60) == pytest.approx(0.1)
    assert stalled.each(60) == pytest.approx(0.1), "a pause behind the common part counts for neither"
    assert stalled.each(100) > 1
    before, after = (tune_course.costs([one], 60, None) for one in (slow, fast))
    assert before.median / after.median == pytest.approx(2)
    compiled = course(0.1, start=100.0)
    assert tune_course.costs([compiled], 60, 1020).median == pytest.approx(100 + 1000 * 0.1), "it pays its start"
    assert tune_course.costs([slow], 60, 220).median < tune_course.costs([compiled], 60, 220).median
    assert tune_course.costs([slow], 60, 10_020).median > tune_course.costs([compiled], 60, 10_020).median


def test_losses_are_the_same_bit_for_bit_or_within_what_repeats_differ_by():
    exact = {1: 0.5, 2: 0.25, 3: 0.125}
    same = tune_course.compare([exact, exact], [{**exact, 4: 9.0}])
    assert same.same and same.text == "the same losses in 3 logged steps, bit for bit"
    other = tune_course.compare([exact, exact], [{**exact, 2: 0.25 + 1e-12}])
    assert not other.same and "first at step 2" in other.text
    noisy = [exact, {1: 0.5, 2: 0.2501, 3: 0.126}]
    assert tune_course.compare(noisy, [{1: 0.5, 2: 0.2502, 3: 0.1265}]).same
    assert not tune_course.compare(noisy, [{1: 0.5, 2: 0.2502, 3: 0.2}]).same
    assert not tune_course.compare(noisy, [{1: 0.5001, 2: 0.25, 3: 0.125}]).same, "no repeat differs at the first step"
    broken = tune_course.compare(noisy, [{1: 0.5, 2: math.nan, 3: 0.125}])
    assert not broken.same and "first at step 2: nan instead of 0.25" in broken.text
    assert "not compared" in tune_course.compare([{}], [exact]).text


@pytest.mark.parametrize("state, count", [("Completed", 3), ("Stopped", 2)])
def test_what_a_stopped_script_printed_last_is_no_loss(tmp_path, state, count):
    folder = RunFolder(tmp_path / "run")
    folder.log("algo-1").parent.mkdir(parents=True)
    folder.log("algo-1").write_text("loss: 0.5\nloss: 0.25\nloss: 0.12\n")
    plan = {"name": "run", "planned": "2026-01-01T00:00:00+00:00", "backend": "watch", "job": {"name": "run"}}
    write_json(folder.plan, {**plan, "hosts": [{"name": "algo-1"}]})
    write_json(folder.outcome, {"state": state})
    assert len(tune_course.losses(Run(folder))) == count


def tuned(
    subject: Subject, changes: dict[str, object], config: Path | None = None, given: Sequence[str] = ()
) -> Tuning:
    """A tuning that kept some changes, without any run."""
    search = Search(subject, frozenset(), None, lambda first: None, print)
    search.best = [Trial(changes, Run(RunFolder(Path("none"))))]
    return Tuning(subject, Path("trials.csv"), search, config, given=given)


def test_nothing_that_is_shown_holds_a_secret(place, tmp_path):
    [shown] = tuned(CommandSubject(["python", "my train.py", "--token", "hunter2"], "it"), {"pin_memory": True}).how()
    assert shown.endswith("launcher watch -- python 'my train.py' --token '***'")
    config = tmp_path / "config.yaml"
    config.write_text(
        (place / "config.yaml")
        .read_text()
        .replace("hyperparameters:", "environment: {MY_TOKEN: hunter2}\nhyperparameters:")
    )
    job = JobSubject(launcher.load(config), "process", 60)
    found = tuned(job, {"OMP_NUM_THREADS": 2, "num_workers": 3}, config)
    assert "+environment: ***" in found.diff() and "+  num_workers: 3" in found.diff(), found.diff()
    assert "hunter2" not in "".join(found.how())
    assert "{MY_TOKEN: hunter2" in found.write(tmp_path / "new.yaml").read_text()


def test_a_config_that_cannot_be_edited_loses_no_result(place, tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_edit, "with_values", lambda text, values: f"{text}]: [")
    found = tuned(
        JobSubject(launcher.load(place / "config.yaml"), "process", 60), {"num_workers": 3}, place / "config.yaml"
    )
    assert found.new_config() is None and found.diff() == ""
    assert found.how() == [f"launcher run {place / 'config.yaml'} hyperparameters.num_workers=3"]
    with pytest.raises(launcher.UserError, match=r"hides a key's place[^$]*hyperparameters.num_workers=3"):
        found.write(tmp_path / "new.yaml")


def test_the_calls_own_values_are_in_the_new_config_and_in_the_command(place, tmp_path, monkeypatch):
    file, given = place / "config.yaml", ["hyperparameters.epochs=2", "hyperparameters.model_options.depth=1"]
    given.append("environment.MY_TOKEN=hunter2")
    found = tuned(JobSubject(launcher.load(file, given), "process", 60), {"num_workers": 3}, file, given)
    new = yaml.safe_load(found.write(tmp_path / "new.yaml").read_text())["hyperparameters"]
    assert (new["epochs"], new["model_options"]["depth"], new["num_workers"]) == (2, 1, 3)
    assert "hunter2" not in (tmp_path / "new.yaml").read_text()
    monkeypatch.setattr(Tuning, "new_config", lambda self: None)
    [shown] = found.how()
    words = shlex.split(shown)
    assert words[:3] == ["launcher", "run", str(file)]
    assert words[3:] == [*given[:2], "environment.MY_TOKEN=***", "hyperparameters.num_workers=3"]


def test_settings_of_the_users_own_stay(monkeypatch):
    monkeypatch.setenv("LAUNCHER_SETTINGS", '{"num_workers": 2, "pin_memory": true}')
    subject = CommandSubject(["python"], "it")
    assert json.loads(subject.variables({"num_workers": 4})["LAUNCHER_SETTINGS"]) == {
        "num_workers": 4,
        "pin_memory": True,
    }
    assert subject.variables({}) == {}
    monkeypatch.setenv("LAUNCHER_SETTINGS", '{"num_workers": 1}')
    assert CommandSubject(["python"], "it").conditions() != subject.conditions()


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
    told = refused(config, "--allow", "precison,num_workers")
    assert "did you mean precision?" in told and "num_workers: " not in told
    assert "--minutes: 0" in refused(config, "--minutes", "0") and "--trials: 0" in refused(config, "--trials", "0")
    assert "no such file" in refused("no-such.yaml")
    told = refused(config, 'environment.LAUNCHER_SETTINGS="[1]"')
    assert "environment.LAUNCHER_SETTINGS: [1]: no JSON object" in told
    told = refused("--max-cost", "3", "--", sys.executable)
    assert "--max-cost" in told and "what a command costs is not known" in told
    monkeypatch.setenv("LAUNCHER_SETTINGS", "{")
    assert "LAUNCHER_SETTINGS: {: no JSON object" in refused("--", sys.executable)
    told = refused(config, "hyperparameters.epochs=0", "observe=false")
    assert "hyperparameters.epochs" in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_that_waits_for_its_reads_gets_more_workers_and_the_same_losses(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--trials", "9", "--minutes", "6", "--html", "why.html", "--", sys.executable, "train.py"]
    assert main.main(words) == 0
    told = capsys.readouterr()
    table = next((tmp_path / "store/studies").glob("train-tune-process.csv"))
    assert len(rows(table)) <= 9 and {row["failure"] for row in rows(table)} == {""}
    assert "num_workers=2: kept, speed-up " in told.out and "bit for bit" in told.out
    assert "the limit that is left: " in told.out
    assert "in the script: DataLoader(num_workers=1) at train.py:" in told.out
    assert "as measured: LAUNCHER_SETTINGS=" in told.out
    page = (tmp_path / "why.html").read_text()
    assert "num_workers=2: kept" in page and "expected" in page and "Storage is too slow" in page
    speed = float(told.out.split("speed-up ")[-1].split()[0]) if "speed-up" in told.out else 0
    assert speed > 1.3


@pytest.mark.timeout(600)
def test_a_command_at_its_limit_is_left_as_it_is(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = slow_reads(samples=640, seconds=0).replace("range(2)", "range(1)")
    script.write_text(textwrap.dedent(text))
    found = launcher.tune([sys.executable, "train.py"], trials=5, table=tmp_path / "trials.csv", say=lambda line: None)
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
    found = launcher.tune([sys.executable, "train.py"], trials=4, table=tmp_path / "trials.csv", say=lambda line: None)
    assert found.changes == {} and found.speedup == 1.0
    step = found.steps[0]
    assert str(step.proposal) == "num_workers=2" and step.gain > 1.2, "it was faster"
    assert "other losses, first at step" in step.why and "it should change no numbers" in step.why
    assert "--allow num_workers keeps it" in step.why
    again = launcher.tune(
        [sys.executable, "train.py"],
        allow=["num_workers"],
        trials=4,
        table=tmp_path / "trials.csv",
        say=lambda line: None,
    )
    assert again.changes == {"num_workers": 2} and again.speedup > 1.2, "of the same trials"
    assert "num_workers=2: other losses, first at step" in str(again)
    assert "Training loss" in again._repr_html_()


@pytest.mark.slow
def test_a_change_that_does_not_reach_the_script_is_said_to_be_not_set(script, tmp_path, monkeypatch):
    """A worker_init_fn keeps the number of workers."""
    monkeypatch.chdir(tmp_path)
    script.write_text(script.read_text().replace("num_workers=1", "num_workers=1, worker_init_fn=int"))
    found = launcher.tune([sys.executable, "train.py"], trials=2, table=tmp_path / "trials.csv", say=lambda line: None)
    step = found.steps[0]
    assert not step.kept and step.why.startswith("it was not set: num_workers was 1 instead of 2")
    assert len(found.trials()) == 2 and step.gain is None


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on_and_repeats_no_trial(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "trials.csv"
    command = [sys.executable, "-m", "launcher", "tune", "--trials", "4", "--table", str(table)]
    command += ["--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        told = [killed.stdout.readline() for _ in range(2)]
        assert len(rows(table)) == 1, told
        killed.kill()
    before = rows(table)
    found = launcher.tune([sys.executable, "train.py"], trials=4, table=table, say=lambda line: None)
    after = rows(table)
    assert after[:1] == before and len(after) <= 4 and found.search.ended
    runs = len(launcher.runs())
    again = launcher.tune([sys.executable, "train.py"], trials=4, table=table, say=lambda line: None)
    assert len(launcher.runs()) == runs and str(again) == str(found), "nothing runs again"
    script.write_text(script.read_text() + "# changed\n")
    with pytest.raises(launcher.UserError, match="trials of different code"):
        launcher.tune([sys.executable, "train.py"], trials=4, table=table, say=lambda line: None)


def test_ctrl_c_stops_the_trial_and_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "launcher", "tune", "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal) as stopped:
        wait_until(launcher.runs, 60, "a trial has begun")
        wait_until(lambda: any("begun" in line for _, line in launcher.runs()[0].logs()), 60, "the command runs")
        stopped.send_signal(signal.SIGINT)
        told = stopped.stdout.read().splitlines()
    assert told[-1] == "stopping the running trial; the same command goes on from here"
    assert stopped.returncode == 130
    [run] = launcher.runs()
    assert run.state == "Stopped"


STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("pid", "w").write(str(os.getpid()))
    time.sleep(300)
"""


@pytest.mark.parametrize("how", ["bash -c 'PYTHON train.py; exit 0'", "PYTHON train.py"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_that_is_stopped_leaves_no_process(tmp_path, monkeypatch, how, fails):
    """A wrapper's child, or the command itself, ignores SIGTERM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_subject, "TO_END", 5.0)
    (tmp_path / "train.py").write_text(textwrap.dedent(STUBBORN))

    def until(run: Run) -> str:
        if not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            return ""
        if fails:
            raise OSError("disk full")
        return "enough"

    subject = CommandSubject(shlex.split(how.replace("PYTHON", sys.executable)), "stubborn-tune")
    if fails:
        with pytest.raises(OSError, match="disk full"):
            subject.run({}, until, print)
    else:
        assert subject.run({}, until, print).state == "Stopped"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "it is gone")


@pytest.mark.slow
def test_what_may_change_more_than_speed_is_asked_for_and_then_tried(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = place / "config.yaml"
    asked = launcher.tune(config, trials=1, table=tmp_path / "asked.csv", say=lambda line: None)
    assert asked.changes == {} and asked.diff() == "" and not asked.failed
    assert any(
        line.startswith("not tried: checkpoint_every=") and "--allow checkpoint_every" in line
        for line in asked.sentences()
    ), str(asked)
    new = tmp_path / "new.yaml"
    words = ["tune", str(config), "--allow", "checkpoint_every", "--trials", "5", "--write", str(new)]
    assert main.main(words) == 0
    told = capsys.readouterr().out
    assert "kept, speed-up" in told and "-  checkpoint_every: 1" in told and "+  checkpoint_every: " in told, told
    tuned = yaml.safe_load(new.read_text())
    assert tuned["hyperparameters"].pop("checkpoint_every") > 1
    before = yaml.safe_load(config.read_text())
    before["hyperparameters"].pop("checkpoint_every")
    assert tuned == before


def test_a_job_that_failed_as_it_is_runs_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = textwrap.dedent(slow_reads(samples=320, seconds=0))
    (tmp_path / "train.py").write_text(f"import pathlib\nassert pathlib.Path('data').exists()\n{text}")

    def tune() -> Tuning:
        table = tmp_path / "trials.csv"
        return launcher.tune([sys.executable, "train.py"], trials=1, table=table, say=lambda line: None)

    assert tune().failed
    (tmp_path / "data").touch()
    assert not tune().failed and not tune().failed
    assert len(launcher.runs()) == 2 and len(rows(tmp_path / "trials.csv")) == 1


@pytest.mark.slow
def test_a_job_that_fails_as_it_is_is_told(place, tmp_path, capsys):
    words = ["tune", str(place / "config.yaml"), "hyperparameters.model_options={no_such_option: 1}"]
    assert main.main(words) == 1
    assert "the job as it is failed" in capsys.readouterr().out and len(launcher.runs()) == 1
