"""A study for real: tiny models trained on a few photographs, killed in between, gone on with, and its table guarded."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.backends import local_hosts
from launcher.commands import main
from launcher.study import preprocessing_question
from launcher.study.trial_table import TrialTable, held
from tests.conftest import as_in_a_terminal, wait_until
from tests.photo_folders import draw_photos

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
MODEL = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with photographs and a config."""
    folder = tmp_path_factory.mktemp("study")
    draw_photos(folder, range(20), range(20, 22))
    write_config(folder)
    return folder


def write_config(folder: Path) -> Path:
    """A job for SageMaker, and what is smaller where there is no GPU."""
    hyperparameters = {"model": MODEL, "model_options": TINY, "image_size": 32, "min_crop_area": 0.5, "num_workers": 0}
    hyperparameters |= {"global_batch_size": 4, "max_steps": 8, "log_every": 1}
    job = {
        "name": "tiny",
        "script": "train_classifier.py",
        "inputs": {name: {"s3": f"s3://amzn-s3-demo-bucket/{name}/"} for name in ("train", "validation")},
        "hyperparameters": hyperparameters,
        "study": {"loads": [0, 2], "pipelines": ["cpu_reference", "cpu"], "repeats": 1},
        "smoke": {
            "inputs": {name: {"folder": str(folder / name)} for name in ("train", "validation")},
            "hyperparameters": {"image_size": 16},
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Also where there is one."""
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 0)


def lines(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open())) if file.exists() else []


@pytest.fixture(scope="module")
def studied(place, tmp_path_factory):
    """A study that was killed after two trials, then asked for again: what it said, and the runs that there were."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LAUNCHER_RUNS", str(place / "runs"))
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.setattr(local_hosts, "gpu_count", lambda: 0)
    table = place / "trials.csv"
    command = [
        sys.executable,
        "-m",
        "launcher",
        "study",
        "preprocessing",
        str(place / "config.yaml"),
        "--table",
        str(table),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        reported = [killed.stdout.readline() for _ in range(4)]
        assert len(lines(table)) >= 2, reported
        with pytest.raises(launcher.UserError, match="another study is using"):
            launcher.study.preprocessing(place / "config.yaml", table=table, log=lambda line: None)
        killed.kill()
    before, said = lines(table), []
    runs_before = {run.name for run in launcher.runs()}
    found = launcher.study.preprocessing(place / "config.yaml", table=table, log=said.append)
    yield found, before, said, {run.name for run in launcher.runs()} - runs_before
    patch.undo()


@pytest.mark.slow
def test_after_a_kill_only_what_is_missing_runs(studied):
    found, before, said, new_runs = studied
    assert 2 <= len(before) < 5 and found.table[: len(before)] == before
    assert len(found.table) == 5 and {line["run"] for line in found.table[len(before) :]} == new_runs
    assert said[1] == f"5 trials, {len(before)} of them in {found.file}" and len(said) == 2 + 5 - len(before)
    trials = [(line["part"], line["pipeline"], line["load"]) for line in found.table]
    trained = [("training", name, load) for load in ("0", "2") for name in ("cpu_reference", "cpu")]
    assert trials == [("model", "", ""), *trained] and found.failed == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_study_that_is_stopped_stops_its_trial_and_says_how_to_go_on(place, tmp_path, monkeypatch, number):
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [
        sys.executable,
        "-m",
        "launcher",
        "study",
        "preprocessing",
        str(place / "config.yaml"),
        "--pipelines",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal) as stopped:
        wait_until(launcher.runs, 60, "a trial has begun")
        stopped.send_signal(number)
        reported = stopped.stdout.read().splitlines()
    assert reported[-1].startswith("stopping the running trial; the same command resumes the study")
    assert stopped.returncode == 130 and [run.state for run in launcher.runs()] == ["Stopped"]


@pytest.mark.slow
def test_every_trial_tells_what_the_answer_needs(studied):
    found, *_ = studied
    for line in found.table:
        assert float(line["epoch_seconds"]) == pytest.approx(40 / float(line["images_per_second"]))
        assert 0 <= float(line["data_wait_share"]) <= 1 and float(line["cpu_share_p50"]) > 0
        assert line["counted_steps"] == "3" and float(line["cores"]) > 0 and line["gpu"] == ""
        assert bool(line["input_cpu_seconds_per_image"]) == (line["part"] == "training")
    reported = str(found)
    for title in (
        "seconds an epoch",
        "what limits each cell",
        "what a core prepares",
        "which instance types feed each model",
        "verdict",
    ):
        assert f"{title}\n\n" in reported, reported
    assert "There is no GPU" in reported and len(found.cells) == 4 and all(cell.alone for cell in found.cells)
    assert found.verdict.splitlines()[0].startswith(f"{MODEL}, load 0: ")
    assert all(cell.core_rate > 0 for cell in found.cells)


@pytest.mark.parametrize("words", [["study", "scaling"], ["study", "preprocessing"], ["tune"]])
def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(words, place, capsys):
    assert main.main([*words, str(place / "config.yaml"), "--html", "no/where.html"]) == 2
    said = capsys.readouterr()
    assert "--html: no/where.html: there is no folder" in said.err and not said.out


@pytest.mark.slow
def test_a_study_that_is_complete_runs_nothing_and_answers_the_same(studied, place, capsys):
    found, *_ = studied
    page = place / "page.html"
    words = ["study", "preprocessing", str(place / "config.yaml"), "--table", str(found.file), "--html", str(page)]
    assert main.main(words) == 0
    reported = capsys.readouterr().out
    assert "<svg " in page.read_text() and reported.splitlines().pop() == f"page    {page}"
    small = f"no GPU here: the CPU pipelines are compared on smaller images, as set in the smoke section of {place / 'config.yaml'}\n"
    assert reported.startswith(f"{small}5 trials, 5 of them in {found.file}\n\n{found}\n")
    assert (
        "images of 16 pixels" in reported
        and "input alone is for images of 32 pixels; the model sees 16 here" in reported
    )
    assert reported.splitlines()[-3:-1] == [f"table   {found.file}", f"charts  {found.file.with_suffix('.svg')}"]
    assert found.file.with_suffix(".svg").read_text().startswith("<svg ")
    assert main.main(["study", "preprocessing", str(place / "config.yaml"), "--table", str(found.file), "--json"]) == 0
    written = capsys.readouterr()
    described = json.loads(written.out)
    assert written.err.startswith(small) and described["verdict"] == found.sentences() and len(described["trials"]) == 5
    assert {trial["load"] for trial in described["trials"]} == {0, 2, None} and described["failed"] == []
    assert all(trial["images_per_second"] > 0 and isinstance(trial["commit"], str) for trial in described["trials"])
    fewer = launcher.study.preprocessing(
        place / "config.yaml", ["study.loads=[2]"], table=found.file, log=lambda line: None
    )
    assert [cell.load for cell in fewer.cells] == [2, 2], "a smaller grid is a part of the table"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("code", "0123456789abcdef", "trials of different code: its files were changed, "),
        ("machine", "process: a Cray-1", "trials of a different machine: process: a Cray-1; now process: "),
        ("settings", '{"hyperparameters": {"max_steps": 9}}', "different settings: "),
    ],
)
def test_a_table_of_other_trials_is_refused_in_words(studied, place, tmp_path, column, value, expected):
    found, *_ = studied
    rows = lines(found.file)
    rows[3][column] = value
    foreign = tmp_path / "foreign.csv"
    with foreign.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    before = foreign.read_bytes()
    with pytest.raises(launcher.UserError) as refused:
        launcher.study.preprocessing(place / "config.yaml", table=foreign, log=lambda line: None)
    assert expected in str(refused.value) and "name another file with --table" in str(refused.value)
    if column == "settings":
        assert "hyperparameters.max_steps 9, now 8" in str(refused.value)
    assert foreign.read_bytes() == before


def test_a_file_that_is_no_table_is_left_as_it_is(place, tmp_path):
    file = tmp_path / "mine.csv"
    for text in ("a,b\n1,2\n", "", "\x00\xff"):
        file.write_text(text)
        with pytest.raises(launcher.UserError, match="is not a table of this study"):
            launcher.study.preprocessing(place / "config.yaml", table=file, log=lambda line: None)
        assert file.read_text() == text


def test_a_table_is_a_csv_file(tmp_path):
    """Its charts lie beside it, under its name with another ending."""
    for file, expected in ((tmp_path, "is a folder"), (tmp_path / "t.svg", "does not end in .csv")):
        with pytest.raises(launcher.UserError, match=expected), held(file):
            pass


def test_a_table_is_one_studys_at_a_time(tmp_path):
    with (
        held(tmp_path / "t.csv"),
        pytest.raises(launcher.UserError, match="another study is using"),
        held(tmp_path / "t.csv"),
    ):
        pass
    with held(tmp_path / "t.csv"):
        assert (
            TrialTable(tmp_path / "t.csv", ["a"], ["b"], dict.fromkeys(("code", "settings", "machine"), "")).rows == []
        )


def test_what_fails_is_reported_kept_out_of_the_table_and_not_repeated_at_once(place, tmp_path, capsys):
    config = str(write_config(tmp_path))
    words = ["hyperparameters.model_options={embed_dim: 25}", "study.loads=[0,1]", "study.pipelines=[cpu]"]
    words += [f"inputs.{name}.folder={place / name}" for name in ("train", "validation")]
    assert main.main(["study", "preprocessing", config, *words]) == 1
    reported = capsys.readouterr().out
    assert (
        "no trial has completed" in reported and "vit_tiny_patch16_224, the model alone, repeat 1: Failed: " in reported
    )
    assert (
        "cannot be created with" in reported
        and f"{MODEL}, cpu, load 1, repeat 1: left out after an earlier failure" in reported
    )
    assert not list(tmp_path.glob("**/studies/*.csv")) and len(launcher.runs()) == 1


def test_all_mistakes_come_at_once_with_what_is_valid(place, capsys):
    words = ["--pipelines", "cpu_refrence,cpu", "--loads=-1,4", "--models", "resnet19,resnet50", "--repeats", "0"]
    assert main.main(["study", "preprocessing", str(place / "config.yaml"), *words, "hyperparameters.epohcs=3"]) == 2
    reported = capsys.readouterr().err
    for expected in (
        *(
            "study.pipelines.0: 'cpu_refrence' (text)",
            "did you mean cpu_reference?",
            "study.loads.0: -1",
            "study.repeats: 0",
        ),
        *("study.models: timm", "has no model resnet19", "hyperparameters.epohcs", "did you mean epochs?"),
    ):
        assert expected in reported, reported
    assert "resnet50" not in reported and reported.count("resnet19") == 1


def test_another_script_has_nothing_to_compare(place, capsys):
    assert main.main(["study", "preprocessing", str(place / "config.yaml"), "script=train_kd.py"]) == 2
    assert "train_kd.py has no preprocessing pipelines to compare" in capsys.readouterr().err


def test_the_price_of_all_trials_is_reported_and_refused_before_the_first(place, capsys):
    words = [
        "compute.price_per_hour=4",
        "compute.instance_type=ml.p3.2xlarge",
        "compute.max_hours=0.5",
        "region=us-west-2",
    ]
    words += ["role=arn:aws:iam::123456789012:role/SageMakerTraining", "output=s3://amzn-s3-demo-bucket/studies"]
    words += ["image={framework_version: 2.6.0, python: py312}"]
    command = ["study", "preprocessing", str(place / "config.yaml"), *words, "--on", "aws", "--max-cost", "9.5"]
    assert main.main(command) == 2
    reported = capsys.readouterr()
    assert "5 trials: at most $10.67 in all; each at most $2.13" in reported.out
    assert "at most $10.67 in all" in reported.err and "study.repeats" in reported.err and launcher.runs() == []


def test_the_launcher_is_imported_without_its_studies():
    code = "import sys, launcher; assert not [name for name in sys.modules if name.startswith('launcher.study.')]"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'preprocesing'"):
        launcher.study.preprocesing  # noqa: B018


def test_only_this_machines_cpus_want_smaller_images(place, monkeypatch):
    config = place / "config.yaml"
    to_be_small = preprocessing_question.wants_smaller_images
    job = launcher.load(config)
    assert to_be_small(config, "process", job) and to_be_small(config, "docker", job)
    assert not to_be_small(config, "aws", job)
    monkeypatch.setattr(local_hosts, "gpu_count", lambda: 1)
    assert not to_be_small(config, "process", job)
    assert to_be_small(config, "docker", job), "this kit's image is for the CPU"
    with pytest.raises(launcher.UserError, match="inputs.train: s3, which exists on SageMaker only"):
        launcher.study.preprocessing(config, log=lambda line: None)
