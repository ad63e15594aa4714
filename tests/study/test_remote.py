"""The pipeline remote: its hosts, its price, what is refused before a trial, whether it pays, and a study of it for real."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.aws import prices
from launcher.backends import local_hosts
from launcher.backends.process import Process
from launcher.commands import main
from launcher.config.job import Job, StudySection
from launcher.planner import groups
from launcher.study import preprocessing_cost, preprocessing_hosts
from launcher.study.preprocessing_question import PreprocessingQuestion
from launcher.study.preprocessing_study import PreprocessingStudy
from tests.conftest import ROOT
from tests.photo_folders import draw_photos
from tests.study.made_up import preprocessing_row as row

CONFIG = ROOT / "configs/remote_preprocessing.yaml"
MODEL = "mobilenetv3_small_050"
SMALLER, LARGER, SERVING = "ml.g5.2xlarge", "ml.g5.4xlarge", "ml.c6i.4xlarge"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Also where there is one."""
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with photographs and a config without instance groups."""
    folder = tmp_path_factory.mktemp("remote")
    draw_photos(folder, range(20), range(20, 22))
    job = {
        "name": "tiny",
        "script": "train_classifier.py",
        "region": "us-west-2",
        "compute": {"instance_type": SMALLER},
        "inputs": {name: {"folder": str(folder / name)} for name in ("train", "validation")},
        "hyperparameters": {"model": MODEL, "image_size": 64, "global_batch_size": 4, "max_steps": 8, "log_every": 1},
        "study": {"loads": [2], "pipelines": ["cpu", "remote"], "repeats": 1},
        "smoke": {"hyperparameters": {"image_size": 32}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(job))
    return folder


def asked(config: Path, *overrides: str, on: str = "process") -> PreprocessingQuestion:
    return PreprocessingQuestion.of(config, overrides, on, smoke=False)


def jobs(question: PreprocessingQuestion) -> dict[str, Job]:
    """Each pipeline's job; "" is the model alone."""
    return {trial.key["pipeline"]: trial.job for trial in question.trials()}


def test_remotes_trials_have_hosts_that_preprocess_and_differ_in_nothing_else(place):
    question = asked(place / "config.yaml")
    found = jobs(question)
    assert [place.rank for place in groups.places(found["remote"])] == [0, None]
    assert [(group.instance_type, group.instance_count) for group in found["remote"].compute.instance_groups] == [
        (SMALLER, 1),
        (SERVING, 1),
    ]
    assert found[""].compute == found["cpu"].compute == question.job.compute
    assert {trial.key["serving"] for trial in question.trials()} == {"", f"1 {SERVING}"}
    remote, local = dict(found["remote"].hyperparameters), dict(found["cpu"].hyperparameters)
    assert (remote.pop("worker_type"), remote.pop("without_servers")) == ("remote", "fail")
    assert local.pop("probe_image_size") == 64, "servers make images of one size"
    assert remote == local and local["image_size"] == 32


def test_other_hosts_that_preprocess_are_other_trials(place):
    more = asked(
        place / "config.yaml", f"study.serving_groups=[{{name: a, instance_type: {SERVING}, instance_count: 3}}]"
    )
    assert [trial.key["serving"] for trial in more.trials()] == ["", "", f"3 {SERVING}"]
    assert more.settings() == asked(place / "config.yaml").settings(), "the same table"


def test_a_job_with_groups_of_its_own_is_compared_with_its_training_hosts_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    question = asked(CONFIG, "study.pipelines=[]", on="aws")
    found = jobs(question)
    assert question.grid.pipelines == ["cpu_reference", "cpu", "cpu_composed", "dali", "remote"]
    assert found["remote"].compute == launcher.load(CONFIG).compute
    for name in ("", "cpu", "dali"):
        assert (found[name].compute.instance_type, found[name].compute.instance_count) == (SMALLER, 1)
        assert not found[name].compute.instance_groups and "worker_type" not in found[name].hyperparameters
        assert all(given.instance_groups is None for given in found[name].inputs.values())
        assert launcher.plan(found[name], on="aws").errors == ()


def test_remote_is_asked_for_by_name_or_by_hosts_that_preprocess(place, monkeypatch):
    assert "remote" not in asked(place / "config.yaml", "study.pipelines=[]").grid.pipelines
    named = f"study.serving_groups=[{{name: cpus, instance_type: {SERVING}, instance_count: 2}}]"
    assert "remote" in asked(place / "config.yaml", "study.pipelines=[]", named).grid.pipelines
    assert asked(place / "config.yaml", "study.pipelines=[cpu]", named).notes[-1].startswith("study.serving_groups is")
    monkeypatch.setattr(Process, "lacks", lambda self, module: module == "ray")
    without = asked(place / "config.yaml", "study.pipelines=[]", named)
    assert "remote" not in without.grid.pipelines
    assert "remote is left out: Ray is not installed here (pip install -e '.[remote]')" in without.notes


GROUPS = "compute.instance_groups=[{name: gpus, instance_type: ml.g5.2xlarge, instance_count: 1}, {name: cpus, instance_type: "
GROUPS += "ml.c6i.4xlarge, instance_count: 1}]"
AWS = ("role=arn:aws:iam::123456789012:role/SageMakerTraining", "output=s3://amzn-s3-demo-bucket/studies")
AWS += ("image={framework_version: 2.8.0, python: py312}", "on=aws")


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["lacks=ray"], "study.pipelines", "remote needs Ray, which is not installed here"),
        (["compute.instance_type=null"], "compute.instance_type", "not set, and with the pipeline remote"),
        ([GROUPS, "compute.instance_type=null", "compute.training_groups=[gpus, cpus]", "study.pipelines=[remote]", "distribution=torchrun"], "compute.training_groups", "2 groups"),
        (
            [GROUPS, "compute.instance_type=null", "compute.training_groups=[gpus]", "study.serving_groups=[{name: a, instance_type: ml.m5.large, instance_count: 1}]"],
            "study.serving_groups",
            "given beside cpus of compute.instance_groups",
        ),
        (["inputs.train.sharded=true"], "inputs.train.sharded", "true with worker_type: remote"),
        ([*AWS, "compute.keep_alive_minutes=10"], "compute.keep_alive_minutes", "several instance groups"),
        ([*AWS, "compute.price_per_hour=4"], "compute.price_per_hour", "groups of different instance types"),
    ],
)  # fmt: skip
def test_what_remote_cannot_have_is_one_mistake_before_any_trial(place, monkeypatch, words, key, expected):
    if "lacks=ray" in words:
        monkeypatch.setattr(Process, "lacks", lambda self, module: module == "ray")
    on = "aws" if "on=aws" in words else "process"
    overrides = [word for word in words if word not in ("lacks=ray", "on=aws")]
    with pytest.raises(launcher.UserError) as refused:
        launcher.study.preprocessing(place / "config.yaml", overrides, on=on, log=lambda line: None)
    [issue] = refused.value.issues
    assert issue.key.startswith(key) and expected in str(issue) and issue.fix, issue
    assert launcher.runs() == []


# -- whether it pays --------------------------------------------------------------------------------------------------

PRICES = {SMALLER: 1.5, LARGER: 2.0, SERVING: 0.9}


@pytest.fixture
def priced(tmp_path, monkeypatch):
    """Makes AWS's price list as it was last read; no other price is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prices, "_packaged", dict)
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT_URL")]:
        monkeypatch.delenv(name)

    def read(usd: dict[str, float]) -> None:
        cache = tmp_path / "vision-launcher/prices.json"
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(
            json.dumps({"us-west-2": {name: {"usd": each, "read": "2026-11-21"} for name, each in usd.items()}})
        )

    read(PRICES)
    return read


def study(*rates: tuple[str, float], on: str = "aws", instance_type: str = SMALLER) -> PreprocessingStudy:
    """A study of load 12: images a second of (pipeline, …), "" for the model alone."""
    repeats: dict[str, int] = {}
    rows = []
    for pipeline, rate in rates:
        repeats[pipeline] = repeats.get(pipeline, 0) + 1
        cpu = {"input_cpu_seconds_per_image": 0.01} if pipeline else {}
        rows.append(row("resnet18", pipeline, 12 if pipeline else "", repeats[pipeline], 9469 / rate, cores=8.0, **cpu))
    job = launcher.load(CONFIG)
    assert job.study is not None
    pipelines = [name for name in dict.fromkeys(name for name, _ in rates) if name]
    grid = StudySection(models=["resnet18"], loads=[12], pipelines=pipelines)
    compute = {"instance_type": instance_type, "instance_groups": [], "training_groups": []}
    alone = job.model_copy(update={"compute": job.compute.model_copy(update=compute)})
    return PreprocessingStudy(alone, on, Path("trials.csv"), grid, rows, remote=job)


def judged(found: PreprocessingStudy) -> list[str]:
    """What is said of remote, below the instance types."""
    lines = found.verdict.splitlines()
    return lines[max(number for number, line in enumerate(lines) if line.startswith("instance type for ")) + 1 :]


def test_remote_pays_where_its_images_cost_less_than_those_of_the_gpu_machine_alone(priced):
    """1 g5.2xlarge and 2 c6i.4xlarge: $3.30 an hour."""
    found = study(("", 1000), ("cpu", 300), ("cpu_reference", 100), ("remote", 900))
    first, second = judged(found)
    assert first == (
        "resnet18, load 12: remote pays: $1.02 a million images at 900 images/s, $1.39 at 300 with cpu on 1 ml.g5.2xlarge alone; one run "
        "of remote and cpu, so it may be chance"
    )
    assert second == (
        "resnet18, load 12: ml.g5.4xlarge alone with cpu costs at least $0.86 a million images, so it may be cheaper than remote: 643 "
        "images/s, estimated from cpu's 300 images/s on ml.g5.2xlarge, x 15/7 vCPUs for images, at most the model's own 1000"
    )
    lines = str(found).splitlines()
    head = next(number for number, line in enumerate(lines) if line == "what the images cost")
    shown = {line.split()[2]: line for line in lines[head + 4 :][:3]}
    assert shown["remote"].split() == [
        "resnet18",
        "12",
        "remote",
        "1",
        "ml.g5.2xlarge,",
        "2",
        "ml.c6i.4xlarge",
        "900",
        "3.30",
        "981,818",
        "1.02",
    ]
    assert shown["cpu"].split() == ["resnet18", "12", "cpu", "1", "ml.g5.2xlarge", "300", "1.50", "720,000", "1.39"]


def test_remote_does_not_pay_where_dali_feeds_the_model(priced):
    found = study(("", 1000), ("dali", 950), ("cpu", 300), ("remote", 900))
    assert "remote does not pay: $1.02 a million images at 900 images/s, $0.44 at 950 with dali" in judged(found)[0]


def test_a_larger_machine_reaches_the_models_own_speed_at_most(priced):
    estimated = judged(study(("", 500), ("cpu", 300), ("remote", 490)))[1]
    assert "costs at least $1.11 a million images, more than remote" not in estimated
    assert "costs at least $1.11 a million images, so it may be cheaper than remote: 500 images/s" in estimated
    priced({**PRICES, LARGER: 4.0})
    assert (
        "costs at least $2.22 a million images, more than remote"
        in judged(study(("", 500), ("cpu", 300), ("remote", 490)))[1]
    )
    priced({SMALLER: 1.5, SERVING: 0.9})
    unpriced = judged(study(("", 500), ("cpu", 300), ("remote", 490)))[1]
    assert "ml.g5.4xlarge alone with cpu reaches at most 500 images/s, estimated from" in unpriced
    largest = judged(study(("", 500), ("cpu", 300), ("remote", 490), instance_type="ml.p3.2xlarge"))
    assert largest[0].startswith("whether remote pays is not known: price not known for ml.p3.2xlarge")
    priced({**PRICES, "ml.p3.2xlarge": 3.8})
    largest = judged(study(("", 500), ("cpu", 300), ("remote", 490), instance_type="ml.p3.2xlarge"))
    assert largest[1].endswith("the catalog has no larger ml.p3.2xlarge with as many GPUs")


def test_repeats_that_overlap_are_no_victory(priced):
    found = study(("", 1000), ("cpu", 400), ("cpu", 430), ("remote", 900), ("remote", 930))
    assert "neither pays nor costs more, as far as the repeats can tell" in judged(found)[0]
    assert "may be chance" not in judged(found)[0]
    apart = study(("", 1000), ("cpu", 300), ("cpu", 310), ("remote", 900), ("remote", 930))
    assert "remote pays: " in judged(apart)[0] and "1.00 (0.99-1.02)" in str(apart)


def test_prices_of_all_that_is_compared_are_read_where_they_are_not_known(priced, monkeypatch):
    read = []
    monkeypatch.setattr(preprocessing_cost, "check", lambda planned: read.append(preprocessing_hosts.text(planned.job)))
    found = study(("", 1000), ("cpu", 300), ("remote", 900))
    preprocessing_cost.read_prices(found.job, found.remote, "aws")
    assert read == []
    priced({})
    preprocessing_cost.read_prices(found.job, found.remote, "aws")
    assert read == [f"1 {SMALLER}", f"1 {SMALLER}, 2 {SERVING}", f"1 {LARGER}"]


def test_without_a_price_nothing_is_judged(priced):
    priced({SMALLER: 1.5})
    found = study(("", 1000), ("cpu", 300), ("remote", 900))
    [line] = judged(found)
    assert line.startswith(
        "whether remote pays is not known: price not known for ml.c6i.4xlarge: launcher plan --check"
    )
    assert "no price known" in str(found) and "1.39" in str(found)


@pytest.mark.parametrize("on", ["process", "docker", "aws"])
def test_hosts_of_one_machine_cannot_win(priced, monkeypatch, on):
    """On SageMaker they have machines of their own; on an emulator of this machine they have not."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:4566")
    found = study(("", 1000), ("cpu", 300), ("remote", 900), on=on)
    [line] = judged(found)
    assert line.startswith(
        "remote: its hosts share one machine here and bring no cores, so it cannot win by them and is not judged"
    )
    assert "only cpu was tried" in found.verdict
    epochs = next(text for text in str(found).splitlines() if text.startswith("resnet18"))
    assert epochs.split() == ["resnet18", "12", "31.56", "10.52", "-"] and "remote is not compared" in str(found)
    assert found.charts().count("remote</text>") == 1, "in the first chart alone"
    assert ("what the images cost" in str(found)) == ("this machine has no price" not in line) == (on == "aws")


# -- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_study_of_remote_runs_whole_on_hosts_of_this_machine(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    table = tmp_path / "trials.csv"
    words = ["study", "preprocessing", str(place / "config.yaml"), "--pipelines", "remote", "--table", str(table)]
    assert main.main(words) == 0
    reported = capsys.readouterr().out
    assert "1 trial with 2 instance groups:\n  gpus trains: 1 host of ml.g5.2xlarge (algo-1)\n" in reported
    assert "  cpus preprocesses: 1 host of ml.c6i.4xlarge (algo-2)\n" in reported
    assert "so it cannot win by them and is not judged, and this machine has no price" in reported
    assert "what the images cost" not in reported
    rows = list(csv.DictReader(table.open()))
    assert [(line["pipeline"], line["serving"]) for line in rows] == [("", ""), ("remote", f"1 {SERVING}")]
    remote = rows[-1]
    assert float(remote["images_per_second"]) > 0 and float(remote["input_images_per_second"]) > 0
    assert remote["world_size"] == "1" and 0 < float(remote["cpu_share_p50"]) <= 1.2, "of the training host's process"
    run = launcher.attach(remote["run"])
    assert len(run.hosts) == 2 and run.result()["settings"]["worker_type"] == "remote"
    served = run.diagnose().to_dict()["servers"]
    assert served["images"] > 0 and served["alone"] == 0
    assert main.main(words) == 0
    assert "2 trials, 2 of them in" in capsys.readouterr().out
