"""`launcher study preprocessing --on aws` with hosts that preprocess, against the emulator: unlike hosts, each with its own price."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.commands import main
from tests.aws.conftest import BUCKET, REGION, ROLE
from tests.photo_folders import draw_photos

pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture
def config(tmp_path, emulator) -> Path:
    emulator.set_price("ml.c6i.4xlarge", 0.9, REGION)
    draw_photos(tmp_path, range(10), range(10, 12))
    job = {
        "name": "far",
        "script": "train_classifier.py",
        "role": ROLE,
        "region": REGION,
        "output": f"s3://{BUCKET}/runs",
        "image": {"framework_version": "2.8.0", "python": "py312"},
        "compute": {"instance_type": "ml.g5.xlarge", "max_hours": 1},
        "inputs": {name: {"folder": str(tmp_path / name)} for name in ("train", "validation")},
        "hyperparameters": {
            "model": "mobilenetv3_small_050",
            "image_size": 32,
            "global_batch_size": 4,
            "max_steps": 8,
            "log_every": 1,
        },
        "study": {"loads": [0], "pipelines": ["remote"], "repeats": 1},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return file


def test_the_price_of_trials_on_unlike_hosts_is_reported_and_refused_before_the_first(config, capsys):
    words = ["study", "preprocessing", str(config), "--pipelines", "cpu,remote", "--on", "aws", "--max-cost", "5"]
    assert main.main(words) == 2
    reported = capsys.readouterr()
    assert (
        "1 trial with 2 instance groups:\n"
        "  gpus trains: 1 host of ml.g5.xlarge (algo-1); at most $1.46, at $1.41 an hour\n"
        "  cpus preprocesses: 1 host of ml.c6i.4xlarge (algo-2); at most $0.93, at $0.90 an hour\n"
        "3 trials: at most $5.30 in all; the most expensive at most $2.39"
    ) in reported.out
    assert "at most $5.30 in all" in reported.err and launcher.runs() == []


@contextlib.contextmanager
def at_most(emulator, hosts: int, instance_type: str):
    """So many hosts of a type are what the account may have."""
    emulator.set_quota(f"{instance_type} for training job usage", hosts, REGION)
    yield
    emulator.set_quota(f"{instance_type} for training job usage", 20, REGION)


def test_hosts_that_the_account_may_not_have_are_found_before_the_first_trial(config, emulator, capsys):
    words = ["study", "preprocessing", str(config), "--pipelines", "cpu,remote", "--on", "aws", "--max-cost", "50"]
    with at_most(emulator, 0, "ml.c6i.4xlarge"):
        assert main.main(words) == 2
    reported = capsys.readouterr()
    assert "quota" in reported.err and "ml.c6i.4xlarge" in reported.err and launcher.runs() == []


def test_the_largest_size_of_a_scaling_study_is_checked_before_the_smallest_is_paid_for(config, emulator, capsys):
    words = [
        "study",
        "scaling",
        str(config),
        "distribution=torchrun",
        "--hosts",
        "1,2",
        "--on",
        "aws",
        "--max-cost",
        "50",
    ]
    with at_most(emulator, 1, "ml.g5.xlarge"):
        assert main.main(words) == 2
    reported = capsys.readouterr()
    assert "quota" in reported.err and "ml.g5.xlarge" in reported.err and launcher.runs() == []


def test_what_is_doubtful_of_its_plans_is_said_once_before_the_first_trial(config, capsys):
    words = ["study", "preprocessing", str(config), "--pipelines", "cpu,remote", "--on", "aws", "--max-cost", "5"]
    assert main.main([*words, "compute.instance_type=ml.g5.12xlarge"]) == 2
    reported = capsys.readouterr()
    assert reported.out.count("one process uses one of its 4 GPUs") == 1 and launcher.runs() == []


def test_a_price_that_the_list_lacks_is_named(config, capsys):
    words = ["study", "preprocessing", str(config), "--pipelines", "cpu,remote", "--on", "aws", "--max-cost", "5"]
    words += ["study.serving_groups=[{name: cpus, instance_type: ml.c6i.8xlarge, instance_count: 1}]"]
    assert main.main(words) == 2
    reported = capsys.readouterr()
    assert "cpus preprocesses: 1 host of ml.c6i.8xlarge (algo-2); price not known" in reported.out
    assert "1 of 3 trials, each: price not known for ml.c6i.8xlarge" in reported.out
    assert "price not known for ml.c6i.8xlarge" in reported.err and launcher.runs() == []


@pytest.mark.slow
def test_remote_runs_on_hosts_of_the_emulator_and_its_images_have_a_price(config, tmp_path):
    found = launcher.study.preprocessing(config, on="aws", table=tmp_path / "trials.csv", log=lambda line: None)
    assert found.failed == [] and [cell.pipeline for cell in found.cells] == ["remote"]
    text = str(found)
    assert "1 ml.g5.xlarge, 1 ml.c6i.4xlarge" in text and " 2.31 " in text
    assert "so it cannot win by them and is not judged" in found.verdict
    [trial] = [run for run in launcher.runs() if run.name == found.table[-1]["run"]]
    assert (trial.backend, len(trial.hosts)) == ("aws", 2)
