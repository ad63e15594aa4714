"""What is tuned: its settings from outside, its code, and how its trials end."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import launcher
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Fix
from launcher.insight.script import Address, Part, Script
from launcher.planner.source_package import code_checksum
from launcher.runner.run import Run
from launcher.study import tune_subject
from launcher.study.tune_search import bottlenecks
from launcher.study.tune_subject import CommandSubject, JobSubject
from tests.conftest import wait_until
from tests.insight.planted import plant
from tests.insight.test_neighbours import USUAL, with_threads


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


def test_the_threads_of_a_command_are_a_variable_of_its_trials():
    usual = plant(phases=USUAL, gpu=50, cores=8, busy=7.0, cpu_seconds=0.4, facts={"threads": 16})
    measured = with_threads(dataclasses.replace(usual, settings={**usual.settings, "num_workers": 0}), delay=0.3)
    [finding, *_] = bottlenecks(Diagnosis(dataclasses.replace(measured, script=Script())))
    subject = CommandSubject(["python"], "it")
    [changes] = [found for fix in finding.fixes if (found := subject.changes_of(fix))]
    assert subject.variables(changes) == {"OMP_NUM_THREADS": "4"}
    assert str(finding.fixes[0]).startswith("OMP_NUM_THREADS=4 in the environment of the command, now 16 (each ")


@pytest.mark.parametrize(
    ("model", "device", "tried"),
    [
        ({"convolutions": 53, "matrices": 1}, "cuda", {"cudnn_benchmark": True}),
        ({"convolutions": 1, "matrices": 49}, "cuda", {}),
        ({"convolutions": 53, "matrices": 1}, "xpu", {}),
        ({}, "cuda", {}),
    ],
    ids=["a convolutional network", "a ViT's patches", "no cuDNN", "not recorded"],
)
def test_cudnn_times_its_algorithms_where_a_gpu_convolves(model, device, tried):
    script = Script(parts=(Part(of="model", at=Address("train.py", 71), values=model),))
    busy = plant(phases={"student_forward": 0.8, "backward": 1.5}, gpu=100, facts={"device": device})
    found = Diagnosis(dataclasses.replace(busy, settings={**busy.settings, "precision": "fp32"}, script=script))
    [finding] = [one for one in bottlenecks(found) if one.kind == "fp32_compute"]
    subject = CommandSubject(["python"], "it")
    assert subject.also(finding, found.evidence) == tried
    if tried:
        assert subject.variables(tried) == {"LAUNCHER_SETTINGS": '{"cudnn_benchmark": true}'}


def test_trials_with_other_software_or_variables_that_matter_are_not_compared(tmp_path, monkeypatch):
    def machine(program: str) -> str:
        return CommandSubject([program], "it").conditions()["machine"]

    ours = machine(sys.executable)
    assert f"{sys.executable}, torch {importlib.metadata.version('torch')}" in ours and machine(sys.executable) == ours
    script = tmp_path / "torchrun"
    script.write_text(f"#!{sys.executable}\n")
    assert f"{script}, torch {importlib.metadata.version('torch')}" in machine(str(script))
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    assert "train.sh, no torch found" in machine(str(tmp_path / "train.sh"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    other = machine(sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert "CUDA_VISIBLE_DEVICES" in other and len({ours, other, machine(sys.executable)}) == 3


def far(**hyperparameters) -> JobSubject:
    job = {"name": "far", "script": "train_classifier.py", "hyperparameters": {"model": "resnet18", **hyperparameters}}
    return JobSubject(launcher.from_values(job), "process", 60)


@pytest.mark.parametrize(("own", "tried"), [(None, {"log_every": 20}), (1, {"log_every": 20}), (20, {}), (100, {})])
def test_a_trial_logs_often_but_where_logging_itself_is_tried(own, tried):
    subject = far(**({} if own is None else {"log_every": own}))
    assert subject.changed({}).hyperparameters["log_every"] == min(own or 5, 5)
    assert subject.changes_of(Fix(setting="hyperparameters.log_every", value=20, now=5)) == tried
    assert subject.changed({"log_every": 20}).hyperparameters["log_every"] == 20


def code_of(*command: str) -> str:
    return CommandSubject(command, "it").conditions()["code"]


def test_the_code_of_a_command_is_its_script_and_the_modules_that_it_may_import(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/models").mkdir(parents=True)
    (tmp_path / "own/train.py").write_text("from models import vit")
    (tmp_path / "own/models/vit.py").write_text("depth = 12")
    script = ("torchrun", "own/train.py")
    before, of_a_module = code_of(*script), code_of("python", "-m", "own.train")
    for elsewhere in ("beside.py", "own/notes.txt", "store/a-run/code/train.py"):
        (tmp_path / elsewhere).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / elsewhere).write_text("other")
    assert code_of(*script) == before != code_of("python", "-m", "own.train") != of_a_module
    (tmp_path / "own/models/vit.py").write_text("depth = 24")
    assert code_of(*script) != before
    assert code_of("a-program", "--depth", "12") == code_of("another")


@pytest.mark.parametrize(
    "words",
    [("--config", "conf.yaml"), ("--config=conf.yaml",), ("config=settings/conf.yaml",), ("x" * 5000, "conf.yaml")],
)
def test_a_config_that_a_command_names_is_code(store, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings").mkdir()
    (tmp_path / "train.py").touch()
    configs = [tmp_path / "conf.yaml", tmp_path / "settings/conf.yaml"]
    for config in configs:
        config.write_text("depth: 12")
    before = code_of("python", "train.py", *words)
    for config in configs:
        config.write_text("depth: 24")
    assert code_of("python", "train.py", *words) != before
    subject = CommandSubject(["python", "train.py", *words], "it")
    for config in configs:
        config.write_text("depth: 36")
    with pytest.raises(launcher.UserError, match="was changed while trials run: .*conf.yaml") as refused:
        subject.code.refuse_changes(tmp_path / "trials.csv")
    assert "if trials write it, remove it and the table first" in refused.value.issues[0].fix


def test_data_that_a_command_names_is_no_code(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("python", "train.py", "--images", "images.bin", "--log", "train.log", "--out", ".")
    before = code_of(*command)
    for name in ("images.bin", "train.log"):
        (tmp_path / name).write_bytes(b"more")
    assert code_of(*command, "labels.json") == before, "a file that is not there"
    (tmp_path / "labels.json").write_bytes(bytes(2**20 + 1))
    assert code_of(*command, "labels.json") == before, "too large for a config"
    assert code_of(*command) == before


def test_an_option_behind_a_script_is_the_scripts_own(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/train.py").touch()
    command = ("python", "elsewhere/train.py", "-m", "resnet50")
    before = code_of(*command)
    (tmp_path / "unrelated.py").write_text("x = 1")
    assert code_of(*command) == before


def test_a_command_whose_observer_is_switched_off_is_refused(store, monkeypatch):
    monkeypatch.setenv("LAUNCHER_OBSERVE", "off")
    with pytest.raises(launcher.UserError, match="LAUNCHER_OBSERVE: off: nothing of this command is measured"):
        CommandSubject(["python", "train.py"], "it")


@pytest.mark.parametrize(
    "command", [("torchrun", "--module", "train"), ("python", "-m", "torch.distributed.run", "scripts/train.py")]
)
def test_modules_of_the_current_folder_are_code_for_a_module(store, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for file in ("scripts/train.py", "models.py", "train.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    before = code_of(*command)
    (tmp_path / "models.py").write_text("depth = 24")
    assert code_of(*command) != before


def test_the_code_of_a_job_is_without_its_inputs(script_job, tmp_path):
    images = tmp_path / "source/images"
    job = script_job("x = 1", inputs={"train": {"folder": str(images)}})
    images.mkdir()
    (images / "1.jpg").write_text("x")
    before = JobSubject(job, "process", 60).conditions()
    (images / "2.jpg").write_text("x")
    assert JobSubject(job, "process", 60).conditions() == before
    assert before["code"] == code_checksum(
        [file for file in launcher.plan(job).files if file.path != "sitecustomize.py"]
    )


@pytest.mark.parametrize("what", ["a job", "a command"])
def test_code_counts_as_changed_once_a_file_of_it_is_other_than_at_the_start(script_job, tmp_path, what):
    job, script, table = script_job("x = 1"), tmp_path / "source/script.py", tmp_path / "trials.csv"
    code = (JobSubject(job, "process", 60) if what == "a job" else CommandSubject(["python", str(script)], "it")).code
    (tmp_path / "source/copied.py").write_text("what a script writes beside itself")
    code.refuse_changes(table)
    script.write_text("x = 2")
    with pytest.raises(launcher.UserError, match="source: was changed while trials run") as refused:
        code.refuse_changes(table)
    assert f"rm {table}" in refused.value.issues[0].fix
    script.write_text("x = 1")
    code.refuse_changes(table)
    script.unlink()
    with pytest.raises(launcher.UserError, match="source: was changed while trials run"):
        code.refuse_changes(table)


def test_settings_that_cannot_be_read_are_shown_without_a_secret(monkeypatch):
    monkeypatch.setenv("LAUNCHER_SETTINGS", '{"num_workers": 2, "token": "hunter2"')
    with pytest.raises(launcher.UserError, match=r"LAUNCHER_SETTINGS: \*\*\*: not a JSON object"):
        CommandSubject(["python"], "it")


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

    started: list[Run] = []
    subject = CommandSubject(shlex.split(how.replace("PYTHON", sys.executable)), "stubborn-tune")
    if fails:
        with pytest.raises(OSError, match="disk full"):
            subject.run({}, until, print, started.append)
    else:
        assert subject.run({}, until, print, started.append).state == "Stopped"
    assert [run.name for run in started] == [run.name for run in launcher.runs()]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="it is gone")


def test_a_trial_without_a_record_says_which_command_to_paste(tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "a:b"))  # which `launcher watch` refuses
    subject = CommandSubject([sys.executable, "my train.py", "--token", "hunter2"], "it")
    with pytest.raises(launcher.UserError) as refused:
        subject.run({"num_workers": 2}, lambda run: "", print, lambda run: None)
    [issue] = refused.value.issues
    command, _, shown = issue.fix.partition(" shows ")
    words = ["""LAUNCHER_SETTINGS={"num_workers": 2}""", "launcher", "watch", "--", sys.executable, "my train.py"]
    assert shlex.split(command) == [*words, "--token", "***"] and shown == "what is wrong"


@pytest.mark.parametrize("seconds", [0, 100], ids=["both ended", "both run"])
def test_two_tunings_of_the_same_name_side_by_side_keep_to_their_own_runs(tmp_path, monkeypatch, seconds):
    """The other one's run is there first, in the same second or before."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    watch, others, popen = [sys.executable, "-m", "launcher", "watch", "--name", "it", "--"], [], subprocess.Popen

    def after_another(words, **options):
        if "launcher.runner.watch" not in str(words):
            return popen(words, **options)
        others.append(popen([*watch, *command]))
        wait_until(launcher.runs, what="the other run is there")
        return popen(words, **options)

    monkeypatch.setattr(subprocess, "Popen", after_another)
    started: list[Run] = []
    subject = CommandSubject(command, "it")
    run = subject.run({}, lambda run: "enough", print, started.append)
    other = next(one for one in launcher.runs() if one.name != run.name)
    read = other.folder.read(other.folder.supervisor)
    assert read["pid"] == others[0].pid
    assert {one.name for one in started} <= {run.name} and len(launcher.runs()) == 2
    if seconds:
        assert run.state == "Stopped" and other.state == "InProgress"
        others[0].terminate()
    others[0].wait()


def test_an_interrupt_counts_where_python_drops_its_exception(tmp_path, monkeypatch, dropped_interrupt):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    subject = CommandSubject([sys.executable, "-c", "import time; time.sleep(100)"], "it")
    with pytest.raises(KeyboardInterrupt):
        subject.run({}, dropped_interrupt, said.append, lambda run: None)
    assert said == ["stopping the running trial; the same command goes on from here"]
    assert [run.state for run in launcher.runs()] == ["Stopped"]


def test_two_commands_that_differ_beside_a_secret_are_two(monkeypatch, tmp_path):
    """A word that holds one is hidden whole; its trials are none of the other's."""
    monkeypatch.chdir(tmp_path)
    one, other = (
        CommandSubject(["bash", "-c", f"HF_TOKEN=hush python train.py --lr {rate}"], "it").conditions()["settings"]
        for rate in (1, 2)
    )
    assert one != other and "hush" not in one + other and "***" in one
