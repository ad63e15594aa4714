"""A scaling study for real: tiny runs of one and two hosts, killed in between and gone on with, and what is refused before any."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.backends import local_hosts
from launcher.commands import main
from launcher.planner.own_checkpoints import own_prefix
from launcher.planner.source_package import COMMIT_FILE, SourceFile, code_checksum
from launcher.study import engine, scaling_question
from launcher.study.scaling_question import ScalingQuestion
from tests.conftest import ROOT, copy_few, thin_out

HYUNDAI = ROOT / "configs/hyundai_segmentation.yaml"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Also where there is one; and the study counts two cores, also where there are more."""
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 0)
    monkeypatch.setattr(scaling_question, "core_count", lambda: 2)


@pytest.fixture(scope="module")
def place(prepared, tmp_path_factory) -> Path:
    """A folder with a few shapes, where hyundai_segmentation's smoke section looks for them."""
    folder = tmp_path_factory.mktemp("scaling")
    copy_few(prepared("shapes"), folder / "data/shapes", 40)
    thin_out(folder / "data/shapes/validation", 2)
    return folder


TINY = [
    "hyperparameters.image_size=[32, 32]",
    "hyperparameters.decoder_channels=8",
    "hyperparameters.global_batch_size=4",
]
TINY += [
    "environment.OMP_NUM_THREADS='1'",
    "study.steps=5",
    "study.repeats=1",
    "study.hosts=[1, 2]",
    "study.mode=strong",
    "study.batches=[]",
]


def test_no_trial_goes_on_from_another_ones_checkpoint_or_from_the_trainings(monkeypatch):
    planned: list[launcher.Plan] = []
    monkeypatch.setattr(engine, "run_to_completion", lambda begin, **_: begin())
    monkeypatch.setattr(engine, "start", planned.append)
    values = {"name": "it", "script": "train_classifier.py", "hyperparameters": {"model": "resnet18"}}
    for job in (values, {**values, "checkpoints": "s3://bucket/it/"}, {**values, "checkpoints": "s3://bucket/it/"}):
        engine._run_to_completion(engine._planned(launcher.from_values(job), "process"), lambda run: None, print)
    none, first, second = (one.job.checkpoints for one in planned)
    assert none is None and first.s3 != second.s3
    assert re.fullmatch(r"s3://bucket/study-[0-9a-f]{8}/it", first.s3), "below it, all would be copied to hosts of it/"


@pytest.mark.parametrize(
    ("prefix", "own"),
    [
        ("s3://bucket", "s3://bucket/tune-X"),
        ("s3://bucket/it", "s3://bucket/tune-X/it"),
        ("s3://bucket/a/b/", "s3://bucket/a/tune-X/b"),
        ("s3://bucket/a/study-01234567/b", "s3://bucket/a/tune-X/b"),
    ],
)
def test_an_own_prefix_lies_beside_the_jobs(prefix, own):
    assert re.sub(r"-[0-9a-f]{8}", "-X", own_prefix(prefix, "tune")) == own


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_where_it_was_and_tells_everything(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    table = tmp_path / "trials.csv"
    command = [
        sys.executable,
        "-m",
        "launcher",
        "study",
        "scaling",
        str(HYUNDAI),
        *TINY,
        "--smoke",
        "--table",
        str(table),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        reported: list[str] = []
        while not reported or (reported[-1] and not reported[-1].startswith("1/2 ")):
            reported.append(killed.stdout.readline())
        killed.kill()
    assert reported[-1].startswith("1/2  1 host, global batch 4, repeat 1: ") and " ms a step" in reported[-1], reported
    assert reported[-3].startswith("warning: distribution: smddp exists on SageMaker only"), reported
    before = list(csv.DictReader(table.open()))
    assert len(before) == 1
    said: list[str] = []
    found = launcher.study.scaling(HYUNDAI, TINY, smoke=True, table=table, log=said.append)
    assert f"2 trials, 1 of them in {table}" in said and said[-1].startswith("1/1  2 hosts, global batch 4")
    assert found.failed == [] and found.table[0] == before[0] and len(found.table) == 2
    one, two = found.table
    assert (one["world_size"], two["world_size"], one["exposed_seconds"]) == ("1", "2", "0.0")
    assert float(two["exposed_seconds"]) > 0 and two["finished"] > one["finished"]
    # what is exposed is of the first ten steps: on busy cores they may wait longer than a later backward pass takes, of which 0 is left
    assert float(one["backward_seconds"]) > 0 and two["backward_seconds"] != "", "it is known of two hosts too"
    assert float(two["images_per_second"]) == pytest.approx(4 / float(two["step_seconds"]))
    assert (
        one["threads"] == two["threads"] and one["training_images"] == "40" and one["parameters"] == two["parameters"]
    )
    assert "strong, global batch 4" in str(found)
    again: list[str] = []
    assert launcher.study.scaling(HYUNDAI, TINY, smoke=True, table=table, log=again.append).table == found.table
    assert again[-1] == f"2 trials, 2 of them in {table}"
    with pytest.raises(launcher.UserError, match=r"hyperparameters.image_size \[32, 32\], now \[64, 64\]"):
        launcher.study.scaling(HYUNDAI, TINY[1:], smoke=True, table=table, log=again.append)
    with pytest.raises(launcher.UserError, match="threads '1', now '2'"):
        launcher.study.scaling(
            HYUNDAI, [*TINY, "environment.OMP_NUM_THREADS='2'"], smoke=True, table=table, log=again.append
        )


def test_a_commit_of_something_else_leaves_the_code_what_it_is(tmp_path):
    (tmp_path / "train.py").write_text("pass")
    code = SourceFile("train.py", tmp_path / "train.py", 4)
    noted = [SourceFile(COMMIT_FILE, None, 1, commit) for commit in (b"a", b"b")]
    assert code_checksum([code, noted[0]]) == code_checksum([code, noted[1]]) == code_checksum([code])
    before = code_checksum([code])
    (tmp_path / "train.py").write_text("fail")
    assert code_checksum([code]) != before


def test_what_cannot_be_compared_is_refused_before_anything_runs(place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    def refused(*words: str) -> str:
        assert main.main(["study", "scaling", str(HYUNDAI), "--smoke", *words]) == 2
        assert launcher.runs() == []
        return capsys.readouterr().err

    reported = refused("--hosts", "1,2,3", "--mode", "both")
    assert "study.hosts: 3: the global batch of 16 is not divisible by their processes" in reported
    assert "global_batch_size: 18, or use --mode weak" in reported
    reported = refused("--hosts", "0,2", "--mode", "strnog", "--repeats", "0", "--batches", "none")
    for expected in ("study.hosts.0: 0", "did you mean strong?", "study.repeats: 0", "study.batches.0: 'none'"):
        assert expected in reported, reported
    assert "distribution: none: with several hosts" in refused("distribution=none")
    assert "auto: each size could choose" in refused("hyperparameters.batch_size_per_device=auto")
    assert "your own script: the study cannot set its batch" in refused("source=mine")
    assert "at most 16" in refused("--hosts", "32", "--mode", "weak")
    assert "no backend prcess" in refused("--on", "prcess")
    assert "7 is not divisible by the job's 2 processes" in refused(
        "hyperparameters.global_batch_size=7", "study.batches=[]"
    )
    assert "missing" in refused("hyperparameters.global_batch_size=null")
    reported = refused("hyperparameters.epochs=null", "study.deadline_hours=1", "study.budget_usd=5")
    for key in ("study.deadline_hours", "study.budget_usd"):
        assert f"{key}: the number of epochs is not set" in reported, reported
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 2)
    assert "4 hosts need 4 GPUs, this machine has 2" in refused("--hosts", "1,4")
    assert "GPUs" not in refused("--hosts", "1,4", "--on", "docker", "distribution=none"), (
        "this kit's image is for the CPU"
    )


def test_weak_scaling_of_given_batches_needs_no_batch_of_the_jobs_own(place, monkeypatch):
    monkeypatch.chdir(place)
    asked = ScalingQuestion.of(
        HYUNDAI,
        ["study.hosts=[1]", "study.mode=weak", "study.batches=[4]", "hyperparameters.global_batch_size=null"],
        "process",
        True,
    )
    assert [trial.key["global_batch"] for trial in asked.trials()] == [4] * asked.grid.repeats


def test_hosts_on_one_machine_get_the_same_threads_and_the_crowded_are_named(place, monkeypatch):
    monkeypatch.chdir(place)
    several = ["study.hosts=[1, 2, 4]", "hyperparameters.num_workers=auto"]
    asked = ScalingQuestion.of(HYUNDAI, several, "process", True)
    base = asked.base
    assert (base.environment["OMP_NUM_THREADS"], base.hyperparameters["num_workers"], asked.cores) == ("1", 0, 2)
    assert "4 hosts have more threads and data workers than this machine has cores" in asked.notes[-1]
    assert "num_workers is 0" in asked.notes[1] and asked.grid.batches == [4, 8, 16]
    asked = ScalingQuestion.of(HYUNDAI, ["study.hosts=[1]"], "process", True)
    assert asked.base.environment["OMP_NUM_THREADS"] == "2" and len(asked.notes) == 1
    asked = ScalingQuestion.of(HYUNDAI, ["study.hosts=[1]", "hyperparameters.num_workers=1"], "process", True)
    assert "each process has 1 thread and 1 data worker at every size" in asked.notes[0] and len(asked.notes) == 1
    asked = ScalingQuestion.of(HYUNDAI, ["study.hosts=[1, 2]", "hyperparameters.num_workers=1"], "process", True)
    assert asked.base.environment["OMP_NUM_THREADS"] == "1" and asked.notes[-1].startswith("2 hosts have more threads")
    several += ["study.mode=weak", "study.batches=[4]", "distribution=torchrun", "compute.instance_type=ml.m5.xlarge"]
    assert ScalingQuestion.of(HYUNDAI, several, "aws", True).cores is None, "each host has a machine"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:4566")
    asked = ScalingQuestion.of(HYUNDAI, several, "aws", True)
    assert (asked.base.environment["OMP_NUM_THREADS"], asked.base.hyperparameters["num_workers"], asked.cores) == (
        "1",
        0,
        2,
    )
    assert "4 hosts have more threads" in asked.notes[-1], "an emulator's hosts are this machine's"
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 4)
    asked = ScalingQuestion.of(HYUNDAI, ["study.hosts=[1, 2]"], "process", True)
    assert asked.base.compute.processes_per_host == 2 and asked.cores is None, (
        "two of four GPUs, also where a host is alone"
    )


def test_on_sagemaker_a_host_has_its_gpus_and_all_trials_a_price(place, capsys):
    words = ["compute.price_per_hour=40", "compute.max_hours=0.5", "--hosts", "1,2", "--repeats", "1", "--on", "aws"]
    assert main.main(["study", "scaling", str(HYUNDAI), *words, "--max-cost", "100"]) == 2
    reported = capsys.readouterr()
    # weak with 256 / 32 = 8 a GPU: 64 and 128 in all; strong 256 twice. 0.5 h and 2 min at $40 a host: 2 x $21.33 + 2 x $42.67
    assert "4 trials: at most $128.00 in all; the most expensive at most $42.67" in reported.out
    assert "at most $128.00 in all" in reported.err and "at most $100.00" in reported.err and launcher.runs() == []


@pytest.mark.slow
def test_a_size_that_fails_is_reported_and_not_tried_again(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = [*TINY[1:], "hyperparameters.model_options={no_such_option: 1}", "study.hosts=[1]", "study.repeats=2"]
    assert main.main(["study", "scaling", str(HYUNDAI), *words, "--smoke", "--table", str(tmp_path / "x.csv")]) == 1
    reported = capsys.readouterr().out
    assert "no trial has completed" in reported and "1 host, global batch 4, repeat 1: Failed" in reported
    assert "repeat 2: left out after an earlier failure" in reported and len(launcher.runs()) == 1
