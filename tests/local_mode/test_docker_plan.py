"""A plan for containers, beside what the local mode of SageMaker's SDK makes of the same job. No engine is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.backends import compose, docker, docker_containers, docker_engine
from launcher.config.sections import Input
from tests.conftest import ROOT, write_batch
from tests.local_mode import sdk
from tests.local_mode.conftest import no_network


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        (None, docker.IMAGE),
        ({"framework_version": "2.0.0", "python": "py310"}, docker.IMAGE),
        ({"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310"}, docker.IMAGE),
        ({"uri": "localhost:5000/team:1"}, "localhost:5000/team:1"),
    ],
)
def test_the_image_is_the_jobs_own_where_it_can_be_here(script_job, image, taken):
    job = script_job("print(1)", **({"image": image} if image else {}))
    assert docker.image(job) == taken
    plan = launcher.plan(job, on="docker")
    assert taken in str(plan)
    reported = any(issue.key == "image.uri" for issue in plan.issues)
    assert reported == (image is not None and "uri" in image and taken == docker.IMAGE)


def test_the_plan_shows_every_difference_with_its_reason(script_job):
    for backend in ("docker", "process"):
        plan = launcher.plan(script_job("print(1)"), on=backend)
        differences = launcher.backends.get(backend).DIFFERENCES
        reported = plan.text("differences")
        assert differences and all(f"    {name}: {why}" in reported for name, why in differences.items())
        assert json.loads(plan.to_json())["differences"] == differences


def test_data_that_lies_on_sagemakers_side_needs_a_folder_and_the_plan_says_so(script_job):
    job = script_job(
        "print(1)",
        inputs={"train": {"s3": "s3://bucket/train"}, "more": {"fsx": "fs-0123456789abcdef0", "path": "/fsx/x"}},
    )
    found = {issue.key: issue for issue in launcher.plan(job, on="docker").errors}
    assert set(found) == {"inputs.train", "inputs.more"} and "folder" in found["inputs.train"].valid


def test_memory_is_as_the_job_says_or_a_share_of_this_machines(script_job):
    given = docker.limits(script_job("print(1)", compute={"shm_gb": 1.5, "memory_gb": 3}))
    assert (given.shm_mb, given.memory_mb) == (1536, 3072)
    alone = docker.limits(script_job("print(1)"))
    many = docker.limits(script_job("print(1)", distribution="torchrun", compute={"instance_count": 4}))
    machine = psutil.virtual_memory().total // 2**20
    assert alone.memory_mb == pytest.approx(0.9 * machine, abs=1) and alone.shm_mb == pytest.approx(machine / 2, abs=1)
    assert (many.memory_mb, many.shm_mb) == (alone.memory_mb // 4, alone.shm_mb // 4)


def test_the_plan_shows_the_limits_and_where_they_come_from(script_job):
    job = script_job("print(1)", compute={"memory_gb": 3})
    shown = str(launcher.plan(job, on="docker"))
    assert "at most 3.0 GB a host (compute.memory_gb)" in shown and "half of this machine's memory" in shown


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"distribution": "torchrun", "compute": {"instance_count": 2, "processes_per_host": 2}},
        {
            "distribution": "smddp",
            "custom_mpi_options": "-x A=1",
            "role": "arn:aws:iam::123456789012:role/a",
            "region": "eu-west-1",
            "compute": {
                "instance_type": "ml.p4d.24xlarge",
                "spot": True,
                "max_wait_hours": 30,
                "keep_alive_minutes": 5,
            },
            "checkpoints": {"s3": "s3://bucket/c", "path": "/opt/ml/other"},
            "output": "s3://bucket/o",
            "profiling": {"system_interval_ms": 500},
            "network": {
                "subnets": ["subnet-1"],
                "security_groups": ["sg-1"],
                "isolation": True,
                "encrypt_traffic": True,
            },
            "hyperparameters": {"a": 1, "b": "it's", "c": [1, {"x": None}], "d": None, "e": True, "f": 0.1},
            "tags": {"a": "b"},
        },
        *(
            {
                "distribution": distribution,
                "compute": {
                    "instance_groups": [
                        {"name": "cpus", "instance_type": "ml.c5.xlarge", "instance_count": 2},
                        {"name": "gpus", "instance_type": "ml.g5.xlarge", "instance_count": 1},
                    ],
                    "training_groups": ["gpus"],
                },
            }
            for distribution in ("smddp", "torchrun", "none")
        ),
    ],
)
def test_the_sdks_local_mode_takes_every_job_and_sends_what_the_plan_shows(script_job, tmp_path, monkeypatch, values):
    (tmp_path / "da#ta?").mkdir()
    (tmp_path / "da#ta?/x").touch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.socket.connect", no_network)
    job = script_job(
        "print(1)",
        inputs={"train": {"folder": str(tmp_path / "da#ta?"), "sharded": True, "mode": "FastFile"}},
        **values,
    )
    plan = launcher.plan(job, on="docker")
    assert not plan.errors
    handed_over = sdk.hand_over(plan)
    assert hyperparameters(plan, handed_over) == plan.hyperparameters
    assert handed_over.channels == tuple(sorted(plan.channels)) == ("train",)
    assert handed_over.environment == job.environment
    assert handed_over.job_name == plan.name


@pytest.mark.parametrize(("hosts", "instance_type"), [(1, '"local_gpu"'), (2, '"local"')])
def test_the_sdks_local_mode_names_a_machines_gpus_as_the_plan_does(script_job, monkeypatch, hosts, instance_type):
    monkeypatch.setattr("launcher.backends.local_hosts.gpus", lambda: ("0", "1"))
    monkeypatch.setattr("launcher.backends.local_hosts.gpu_count", lambda: 2)
    compute = {"instance_count": hosts}
    job = script_job("print(1)", distribution="torchrun", compute=compute, image={"uri": "localhost:5000/team:1"})
    plan = launcher.plan(job, on="docker")
    assert plan.hyperparameters["sagemaker_instance_type"] == instance_type
    assert hyperparameters(plan, sdk.hand_over(plan)) == plan.hyperparameters


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configs_hyperparameters_reach_the_container_as_the_plan_shows_them(tmp_path, config, smoke):
    job = launcher.load(config, smoke=smoke)
    write_batch(tmp_path, job.hyperparameters["global_batch_size"])
    job = job.model_copy(update={"inputs": {name: Input(folder=str(tmp_path)) for name in job.inputs}})
    plan = launcher.plan(job, on="docker")
    assert not plan.errors
    assert hyperparameters(plan, sdk.hand_over(plan)) == plan.hyperparameters
    assert job.hyperparameters == {name: json.loads(plan.hyperparameters[name]) for name in job.hyperparameters}


def test_nothing_is_asked_at_ec2s_address_without_credentials(tmp_path):
    """The SDK makes sessions of its own, when it is imported and in every estimator: a fresh process shows both."""
    code = """
    import socket
    def connect(_, address):
        raise SystemExit(f"asked {address}")
    socket.socket.connect = connect
    import boto3, launcher
    job = launcher.load("configs/kt_food_tag.yaml")
    estimator, inputs = launcher.plan(job, on="aws").estimator(boto3.Session("a", "b", region_name=job.region))
    assert boto3.DEFAULT_SESSION is None and "AWS_EC2_METADATA_DISABLED" not in __import__("os").environ
    from tests.local_mode import sdk
    print(type(estimator).__name__)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["PyTorch"]), done.stderr


def test_a_script_below_the_source_folder_is_found_too(tmp_path):
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/deep/script.py").write_text("print(1)")
    job = launcher.from_values({"name": "test", "script": "deep/script.py", "source": str(tmp_path / "src")})
    plan = launcher.plan(job, on="docker")
    assert plan.hyperparameters["sagemaker_program"] == '"deep/script.py"'
    assert hyperparameters(plan, sdk.hand_over(plan)) == plan.hyperparameters


def test_without_the_sdk_a_plan_for_containers_has_no_issue_and_needs_no_boto3(script_job):
    job = script_job("print(1)", distribution="torchrun", compute={"instance_count": 2})
    code = f"""
    import sys
    sys.modules |= dict.fromkeys(("sagemaker", "boto3", "botocore", "moto"))  # importing one of them fails
    import launcher
    from launcher.backends import docker_supervisor
    plan = launcher.plan(launcher.from_values({job.model_dump(exclude_defaults=True, mode="json")!r}), on="docker")
    assert not plan.errors, plan
    print(plan.hyperparameters["sagemaker_torch_distributed_enabled"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "true\n"), done.stderr


def hyperparameters(plan: launcher.Plan, handed_over: sdk.HandedOver) -> dict[str, str]:
    """Those that the SDK's containers get. It hands over the local folder and the script's bare name, and its own class corrects the first."""
    assert handed_over.hyperparameters is not None
    own = {"sagemaker_submit_directory": compose.CODE, "sagemaker_program": plan.job.script}
    return handed_over.hyperparameters | {name: json.dumps(value) for name, value in own.items()}


@pytest.mark.parametrize(("status", "code"), [(0, 0), (2, 2), (137, -9), (192, -64), (193, 193), (255, 255)])
def test_a_containers_status_is_a_signal_up_to_the_last_one(monkeypatch, tmp_path, status, code):
    state = {"Running": False, "Error": "", "OOMKilled": False, "Status": "exited", "ExitCode": status}
    answer = subprocess.CompletedProcess("docker", 0, json.dumps(state), "")
    monkeypatch.setattr(docker_containers.subprocess, "run", lambda *_, **__: answer)
    container = docker_containers.Container.__new__(docker_containers.Container)
    container.name, container.trouble = "run-algo-1", ""
    assert container._end() == code


@pytest.mark.parametrize(("uid", "swept"), [(os.getuid(), ["ours"]), (54321, [])])
def test_containers_of_other_people_are_left_alone(monkeypatch, tmp_path, uid, swept):
    removed: list[str] = []
    (tmp_path / "ours").mkdir()
    runs = {"ours": tmp_path / "ours", "gone": tmp_path / "gone", "closed": Closed(tmp_path / "closed")}
    monkeypatch.setattr(docker_containers, "runs", lambda: runs)
    monkeypatch.setattr(docker_containers, "remove", removed.append)
    monkeypatch.setattr(docker.os, "getuid", lambda: uid)
    docker.sweep()
    assert removed == swept


class Closed(type(Path())):
    """A folder below one that may not be searched."""

    def __fspath__(self) -> str:
        raise PermissionError(13, "Permission denied")


def test_trials_of_another_image_are_of_another_machine(script_job, monkeypatch):
    """`make image` gives its name to another one."""
    named, job = {"Id": "sha256:0123456789abcdef"}, script_job("print(1)")
    monkeypatch.setattr(docker_engine, "look", lambda: (object(), []))
    monkeypatch.setattr(docker_engine, "find_image", lambda image: named if image == docker.IMAGE else None)
    before = docker.Docker().machine(job)
    assert before.endswith(f"{docker.IMAGE} sha256:0123456789ab")
    named["Id"] = "sha256:1123456789abcdef"
    assert docker.Docker().machine(job) != before
    monkeypatch.setattr(docker_engine, "look", lambda: (None, []))
    assert docker.Docker().machine(job).endswith("not on this machine")
