"""The built images run training jobs as SageMaker's do: the real toolkit, its files, its exit codes, and our SIGTERM."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

import launcher
from launcher.aws import catalog, requirements
from launcher.planner.source_package import SourceFile
from launcher.prepare import prepare
from tests.conftest import SLEEPER, wait_until
from tests.docker.conftest import ROOT, docker, docker_build

ONE_STEP = """
    import argparse, json, os, pathlib, timm, torch, torchvision
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    rate = parser.parse_args().rate
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1]])
    seen = {
        "rate": rate,
        "channel": pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "note").read_text(),
        "kept": torchvision.ops.nms(boxes, torch.tensor([0.1, 0.2]), 0.5).tolist(),
        "sm": sorted(name for name in os.environ if name.startswith("SM_")),
    }
    pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "a blank"
    folder.mkdir()
    (folder / "note").write_text("hello")
    return folder


def test_a_one_step_job_succeeds(image, run_container, script_job, data):
    job = script_job(ONE_STEP, inputs={"train": {"folder": str(data)}}, hyperparameters={"rate": 0.5})
    container = run_container(image, job)
    assert container.wait() == 0, container.log()
    assert (container.opt_ml / "output/success").exists()
    seen = json.loads((container.opt_ml / "model/seen.json").read_text())
    assert (seen["rate"], seen["channel"], seen["kept"]) == (0.5, "hello", [1])
    assert {"SM_HPS", "SM_CHANNEL_TRAIN", "SM_OUTPUT_DATA_DIR", "SM_CURRENT_HOST"} <= set(seen["sm"])


def test_a_failing_script_leaves_its_exit_code_and_its_error(image, run_container, script_job):
    container = run_container(image, script_job("import sys; print('before'); sys.exit(42)"))
    assert container.wait() == 1
    failure = (container.opt_ml / "output/failure").read_text()
    assert failure.startswith("ExecuteUserScriptError:\nExitCode 42\n")
    assert "before" in container.log()
    assert not (container.opt_ml / "output/success").exists()


@pytest.mark.parametrize("distribution", ["none", "torchrun"])
def test_docker_stop_reaches_the_script_which_ends_in_order(image, distribution, run_container, script_job):
    processes = 1 if distribution == "none" else 2
    job = script_job(SLEEPER, distribution=distribution, compute={"processes_per_host": processes})
    container = run_container(image, job)
    for rank in range(processes):
        container.wait_for(f"output/data/ready-{rank}")
    began = time.monotonic()
    assert container.stop(60) == 0, container.log()
    assert time.monotonic() - began < 30
    assert {file.name for file in (container.opt_ml / "output/data").glob("told-*")} == {
        f"told-{r}" for r in range(processes)
    }
    assert (container.opt_ml / "output/success").exists()


def test_a_sigterm_before_the_script_has_started_is_not_lost(image, run_container, script_job):
    """It comes as soon as PID 1 listens; the script then gets it at its start, and ends in order or by it, but long before SIGKILL."""
    for _ in range(5):
        container = run_container(image, script_job(SLEEPER))
        wait_until(container.first_process_takes_sigterm, 30)
        if not (container.opt_ml / "output/data/ready-0").exists():
            break  # else the machine looked too late
    else:
        pytest.fail("the script had started each time")
    assert container.stop(60) in (0, 1), container.log()


def test_in_an_image_of_aws_the_script_would_not_hear_of_it(aws_like_image, run_container, script_job):
    """Why start.py is there: if this fails, the stand-in no longer stands for AWS's images."""
    container = run_container(aws_like_image, script_job(SLEEPER))
    container.wait_for("output/data/ready-0")
    assert container.stop(3) == 137
    assert not (container.opt_ml / "output/data/told-0").exists()


def test_any_user_can_run_it(image, run_container, script_job):
    script = """
        import getpass, os, pathlib, tempfile
        assert os.getuid() == 12345 and getpass.getuser()
        pathlib.Path.home().joinpath("cache").touch()
        tempfile.mkdtemp()
        pathlib.Path(os.environ["SM_MODEL_DIR"], "model").touch()
    """
    container = run_container(image, script_job(script), "--user", "12345")
    assert container.wait() == 0, container.log()
    assert (container.opt_ml / "output/success").stat().st_uid == 12345


def test_without_mounts_the_folders_take_files_from_any_user(local_image):
    places = ("code", "model", "output", "output/data", "input", "input/config", "input/data", "checkpoints")
    command = " && ".join(f"touch /opt/ml/{place}/file" for place in places)
    docker("run", "--rm", "--network=none", "--user=12345:54321", local_image, "sh", "-c", command)


def test_any_user_can_install_what_a_requirements_txt_names(local_image, tmp_path):
    """And nothing is fetched for what is there, also not for what was taken out because only a GPU uses it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    (tmp_path / "package/mine.py").write_text("")
    (tmp_path / "requirements.txt").write_text("timm>=1\ntorch\ntriton\n/tmp/package\n")
    command = "cp -r /given/* /tmp && python -m pip install --no-index --no-build-isolation -r /tmp/requirements.txt && python -c 'import mine, timm'"
    options = ["--network=none", "--user=12345", f"--volume={tmp_path}:/given:ro"]
    tmp_path.chmod(0o755)
    docker("run", "--rm", *options, local_image, "sh", "-c", command)


def test_an_entry_script_of_this_kit_trains_on_two_processes(image, run_container, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("digits", tmp_path / "data/digits")
    overrides = ["hyperparameters.max_steps=2", "distribution=torchrun", "compute.processes_per_host=2"]
    job = launcher.load(ROOT / "configs/quickstart_teacher.yaml", overrides)
    container = run_container(image, job, f"--user={os.getuid()}:{os.getgid()}", "--env=OMP_NUM_THREADS=1")
    assert container.wait() == 0, container.log()
    assert (container.opt_ml / "model/model.safetensors").stat().st_size > 1_000_000


def test_the_local_image_is_whole_and_has_no_compiler(local_image):
    docker("run", "--rm", "--network=none", local_image, "pip", "check")
    found = docker(
        "run", "--rm", "--network=none", local_image, "sh", "-c", "command -v gcc cc g++ c++ make", check=False
    )
    assert found.stdout == ""


def test_the_local_image_has_the_pinned_versions(local_image):
    listed = json.loads(docker("run", "--rm", "--network=none", local_image, "pip", "list", "--format=json").stdout)
    held = {re.sub("[._]", "-", package["name"].lower()): package["version"] for package in listed}
    pins = (ROOT / ".ci/constraints.txt").read_text()
    pinned = dict(line.split("==") for line in pins.split() if "==" in line)
    differing = {
        name: held[name] for name in held.keys() & pinned.keys() if held[name].partition("+")[0] != pinned[name]
    }
    assert differing == {}
    assert {
        "torch",
        "torchvision",
        "timm",
        "safetensors",
        "simplejpeg",
        "opencv-python-headless",
        "pillow",
        "psutil",
        "numpy",
        "sagemaker-training",
    } <= held.keys()
    assert held.keys() - pinned.keys() <= {"wheel"}, "which Python's own images have"


def test_an_image_that_is_up_to_date_is_not_built_again(local_image, training_image):
    before = docker("image", "inspect", "--format", "{{.Id}}", training_image).stdout
    assert "is up to date" in docker_build("training", TRAINING_BASE=local_image, TRAINING_IMAGE=training_image)
    assert docker("image", "inspect", "--format", "{{.Id}}", training_image).stdout == before


def test_the_training_image_is_of_aws_and_still_patched():
    text = (ROOT / "docker/Dockerfile.training").read_text()
    [base] = [line.removeprefix("ARG BASE=") for line in text.splitlines() if line.startswith("ARG BASE=")]
    facts = catalog.image_facts(base)
    assert facts is not None and facts.for_sagemaker and facts.device == "gpu"
    assert catalog.end_of_patch(facts.framework_version) > catalog._catalog()["images"]["checked"]


def test_a_job_with_an_image_of_its_own_takes_no_requirements_txt_along(script_job):
    job = script_job(
        "import timm", image={"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/vision-launcher-training:1"}
    )
    files = [SourceFile("script.py", None, 11, b"import timm")]
    assert requirements.complete(job, files) == files
