"""The commands of the README for jobs on SageMaker, typed against `launcher emulate`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launcher.commands import main
from launcher.prepare import photos, prepare, shapes
from tests.conftest import ROOT, SLEEPER, as_in_a_terminal, thin_out

HERE = [sys.executable, "-m", "launcher"]
STORIES = ("dali_imagenette", "kt_food_tag", "hyundai_segmentation")


def typed(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*HERE, *words], capture_output=True, text=True, timeout=250, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the configs."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture(scope="module")
def taught(place) -> None:
    """In that folder the stories' data, and the quickstart's teacher after a few steps."""
    with pytest.MonkeyPatch.context() as preparing:
        preparing.chdir(place)
        preparing.setattr(photos, "EACH", 54)
        preparing.setattr(shapes, "IMAGES", 54)
        for source in ("digits", "shapes", "photos"):
            prepare(source, f"data/{source}")
        thin_out(Path("data"), keep=40)
    environment = {**os.environ, "LAUNCHER_RUNS": str(place / "runs")}
    done = typed("run", "configs/quickstart_teacher.yaml", "--smoke", cwd=place, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def there(place, nobody, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("LAUNCHER_RUNS", str(place / "runs"))


@pytest.mark.slow
@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("story", STORIES)
def test_a_story_is_planned_priced_submitted_and_followed(story):
    config = f"configs/{story}.yaml"
    planned = typed("plan", config, "--on", "aws")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    emulator = ["emulate", config, "--price", "ml.p4d.24xlarge=32.77", "--price", "ml.p3.2xlarge=3.825", "--", *HERE]
    steps = ["hyperparameters.max_steps=2", "hyperparameters.log_every=1"]
    done = typed(*emulator, "run", config, "--smoke", "--on", "aws", "--max-cost", "100", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^at most \$\d+\.\d\d: [\d.]+ h and 2 min to stop at \$[\d.]+ an hour \(http://127.0.0.1:\d+'s price list of 20",
        done.stdout,
        re.MULTILINE,
    )
    assert "step 2/2" in done.stdout
    assert [
        stage
        for stage in ("Starting", "Downloading", "Training", "Uploading", "Completed")
        if f" {stage}: " not in done.stdout
    ] == []
    assert re.search(r": Completed after \d+ s for \$[\d.]+ - [\d.]+ % (mIoU )?on held-out images", done.stdout)
    shown = typed("show", story.replace("_", "-"))
    for piece in ("price       at most $", "billed      ", "cost        $", "runs on     aws"):
        assert piece in shown.stdout, shown.stdout
    assert " an epoch" not in shown.stdout, "two steps are none"


BROKEN = [
    ("kt_food_tag", "compute.instance_type=ml.p4.24xlarge", "compute.instance_type", "did you mean ml.p4d.24xlarge?"),
    (
        "kt_food_tag",
        "image={framework_version: '2.6.0', python: py312}",
        "distribution",
        "write distribution: torchrun",
    ),
    ("kt_food_tag", "hyperparameters.global_batch_size=1000", "hyperparameters.global_batch_size", "992 or 1024"),
    (
        "kt_food_tag",
        "profiling.system_interval_ms=123",
        "profiling.system_interval_ms",
        "write system_interval_ms: 500",
    ),
    ("hyundai_segmentation", "network={subnets: [], security_groups: []}", "inputs.train", "add network:"),
    ("hyundai_segmentation", "compute.max_wait_hours=1", "compute.max_wait_hours", "write spot: true"),
    ("hyundai_segmentation", "compute.use_spot_instance=true", "compute.use_spot_instance", "compute.spot"),
    ("hyundai_segmentation", "inputs.train.acess=ro", "inputs.train.acess", "did you mean access?"),
    ("dali_imagenette", "distribution=smddp", "distribution", "write distribution: torchrun"),
    (
        "dali_imagenette",
        "compute={instance_type: ml.p3.2xlarge, max_hours: 2, spot: true}",
        "compute.spot",
        "add checkpoints:",
    ),
    (
        "dali_imagenette",
        "profiling.rules={CPUBottlenck: {}}",
        "profiling.rules.CPUBottlenck",
        "did you mean CPUBottleneck?",
    ),
    ("dali_imagenette", "hyperparameters.epochs=two", "hyperparameters.epochs", "correct epochs"),
]


def assert_refused(reported: str, key: str, fix: str) -> None:
    """What a command reported names this mistake with what to do, and it is this mistake that refuses."""
    assert "Traceback" not in reported
    refusal = reported[re.search(r"^\d+ mistakes? in", reported, re.MULTILINE).start() :]  # behind the warnings
    mistakes = re.split(r"^  (?=\S)", refusal, flags=re.MULTILINE)[1:]
    assert any(text.startswith(f"{key}:") and fix in text for text in mistakes), refusal
    assert not any(text.startswith("online:") for text in mistakes), (
        "it is this mistake that refuses, not missing credentials"
    )


@pytest.mark.parametrize(("story", "change", "key", "fix"), BROKEN)
def test_a_broken_variant_is_refused_with_what_to_do(as_typed, capsys, story, change, key, fix):
    assert main.main(["run", f"configs/{story}.yaml", "--on", "aws", change]) == 2
    assert_refused(capsys.readouterr().err, key, fix)


def test_the_status_of_a_refused_command_is_2():
    story, change, key, fix = BROKEN[0]
    refused = typed("run", f"configs/{story}.yaml", "--on", "aws", change)
    assert refused.returncode == 2
    assert_refused(refused.stderr, key, fix)


@pytest.fixture
def emulator(place, tmp_path, monkeypatch):
    """An emulator in another process, as a user starts it in another terminal; its printed variables are taken over."""
    prices = ["--price", "ml.m5.xlarge=0.23"]
    process = subprocess.Popen(
        [*HERE, "emulate", "configs/quickstart.yaml", *prices],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    exported = process.stdout.readline()
    assert exported.startswith("export AWS_ENDPOINT_URL=http://127.0.0.1:")
    for name, value in re.findall(r"(\w+)=(\S+)", exported):
        monkeypatch.setenv(name, value)
    yield
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "script.py").write_text(
        textwrap.dedent(SLEEPER).replace("time.sleep(120)", "print('ready', flush=True)\ntime.sleep(120)")
    )
    file = tmp_path / "sleeper.yaml"
    file.write_text(
        f"name: sleeper\nscript: script.py\nsource: {tmp_path / 'source'}\nregion: us-east-1\n"
        "role: arn:aws:iam::123456789012:role/SageMakerTraining\noutput: s3://amzn-s3-demo-bucket/sleeper\n"
        'image: {framework_version: "2.8.0", python: py312}\ncompute: {instance_type: ml.m5.xlarge, max_hours: 1}\n'
    )
    return file


def lines_of(run: str, seconds: float = 120) -> str:
    """A run's log, once its script is ready."""
    end = time.monotonic() + seconds
    while "ready" not in (text := typed("logs", run).stdout):
        assert time.monotonic() < end, text
    return text


@pytest.mark.slow
def test_a_detached_job_is_listed_shown_profiled_and_stopped(emulator, config):
    done = typed("run", str(config), "--on", "aws", "--detach")
    assert done.returncode == 0, done.stderr
    [name] = re.findall(r"^run (sleeper-\S+) on aws", done.stdout, re.MULTILINE)
    lines_of("sleeper")
    listed = {item["name"]: item["state"] for item in json.loads(typed("runs", "--json").stdout)}
    assert listed[name] == "InProgress"
    assert "spent       $" in typed("show", name).stdout
    assert typed("profile", name, "--interval", "500").stdout == f"{name}: system metrics every 500 ms\n"
    assert typed("profile", name, "--off").returncode == 0
    stopped = typed("stop", name)
    assert stopped.returncode == 0 and f"{name}: Stopped after" in stopped.stdout
    assert typed("profile", name, "--off").returncode == 2


def test_a_job_goes_on_when_the_terminal_closes_and_ends_with_an_interrupt_in_ci(emulator, config):
    as_typed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": as_in_a_terminal}
    following = subprocess.Popen([*HERE, "run", str(config), "--on", "aws"], **as_typed)
    name = next(line.split()[1] for line in following.stdout if line.startswith("run sleeper-"))
    lines_of(name)
    following.send_signal(signal.SIGHUP)
    following.wait(60)
    again = subprocess.Popen([*HERE, "attach", name], **as_typed)
    assert next(line for line in again.stdout if " Training: " in line)
    again.send_signal(signal.SIGINT)
    rest = again.stdout.read()
    assert again.wait(60) == 130
    assert f"{name}: Stopped" in rest and "Ctrl-C" in rest


@pytest.mark.slow
def test_another_machine_follows_by_name_and_region(emulator, config, monkeypatch, tmp_path):
    done = typed("run", str(config), "--on", "aws", "--detach")
    [name] = re.findall(r"^run (sleeper-\S+) on aws", done.stdout, re.MULTILINE)
    lines_of(name)
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "elsewhere"))
    refused = typed("attach", name)
    assert refused.returncode == 2 and "--region" in refused.stderr
    again = subprocess.Popen(
        [*HERE, "attach", name, "--region", "us-east-1", "--logs"], stdout=subprocess.PIPE, text=True
    )
    assert next(line for line in again.stdout if line.strip() == "ready")
    assert typed("stop", name).returncode == 0
    again.stdout.read()
    assert again.wait(60) == 1
    assert "stop_reason" in json.loads(next((tmp_path / "elsewhere" / name).glob("outcome.json")).read_text())


def test_a_command_behind_the_emulator_decides_its_exit_status():
    code = "import os, sys; sys.exit(7 if os.environ['AWS_ENDPOINT_URL'].startswith('http://127.0.0.1') else 1)"
    assert typed("emulate", "--", sys.executable, "-c", code).returncode == 7
    missing = typed("emulate", "--", "no-such-command")
    assert missing.returncode == 2 and "no such command" in missing.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--price", "ml.m5.xlarge"], "NAME=VALUE"),
        (["--port=70000"], "--port: 70000"),
        (["--port=-1"], "--port: -1"),
    ],
)
def test_options_that_no_emulator_can_have_are_refused(capsys, words, reported):
    assert main.main(["emulate", *words]) == 2
    assert reported in capsys.readouterr().err
