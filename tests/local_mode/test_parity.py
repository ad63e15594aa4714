"""One job as processes, on the SageMaker emulator and in containers: the script sees the same, except for declared differences.

LAUNCHER_TEST_DOCKER=1 adds the containers.
"""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Mapping

import pytest

import launcher
from launcher.aws import session
from launcher.backends import docker, local_hosts
from launcher.backends.process import Process
from launcher.emulator import Emulator
from launcher.emulator import hosts as emulated
from tests.conftest import WITH_DOCKER
from tests.local_mode.conftest import IMAGE, wait_for_state
from tests.local_mode.seen import SEEN, Seen, compare

DECLARED: dict[str, Mapping[str, str]] = {"process": Process.DIFFERENCES, "aws": emulated.DIFFERENCES}
"""Backend -> what differs there from SageMaker; for aws it is the emulator that differs."""
if WITH_DOCKER:
    DECLARED["docker"] = docker.Docker.DIFFERENCES

REGION, BUCKET = "us-west-2", "amzn-s3-demo-bucket"
ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"


@pytest.fixture
def emulator(tmp_path, monkeypatch):
    """The SageMaker emulator, and this process as its client."""
    with Emulator(tmp_path / "emulator") as emulator:
        emulator.add_bucket(BUCKET, REGION)
        emulator.add_role(ROLE)
        emulator.set_quota("ml.m5.xlarge for training job usage", 2, REGION)
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        session.forget_clients()
        yield emulator
    session.forget_clients()


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_job_gives_the_same_script_the_same(emulator, script_job, request, tmp_path, monkeypatch, hosts):
    if WITH_DOCKER:
        request.getfixturevalue("engine")
        monkeypatch.setattr(docker, "IMAGE", IMAGE)
    for name in (*local_hosts.PASSED_ON, "OMP_NUM_THREADS"):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data"
    data.mkdir()
    (data / "image.txt").write_text("pixels")
    job = script_job(
        SEEN,
        inputs={"train": {"folder": str(data)}, "weights": {"file": str(data / "image.txt")}},
        environment={"MINE": "it's; $HOME"},
        hyperparameters={"a": 1, "name": "it's", "table": {"x": [1, None]}, "none": None, "rate": 0.1, "deep": True},
        distribution="torchrun" if hosts == 2 else "none",
        compute={"instance_type": "ml.m5.xlarge", "instance_count": hosts, "processes_per_host": 2 if hosts == 2 else None},
        role=ROLE, region=REGION, output=f"s3://{BUCKET}/runs", image={"framework_version": "2.8.0", "python": "py312"},
    )  # fmt: skip
    plans = {name: launcher.plan(job, on=name) for name in DECLARED}
    runs = {name: launcher.run(plan) for name, plan in plans.items()}
    for run in runs.values():
        wait_for_state(run, "Completed", 150)
    for one, other in itertools.combinations(DECLARED, 2):
        for rank in range(2 * hosts) if hosts == 2 else [0]:
            compare(*(of_run(runs[name], rank) for name in (one, other)), DECLARED[one], DECLARED[other])
    for name, run in runs.items():
        assert run.result() == {"accuracy": 0.5}
        assert run.metrics() == [{"step": 1, "loss": 2.0}]
        with tarfile.open(run.folder.model) as model:
            assert model.getnames() == ["weights"]
        lines = [line for host, line in run.logs() if host == "algo-1" and line]
        ran = lines[lines.index("Invoking script with the following command:") + 1]
        assert _same_on_all(ran) == _same_on_all(" ".join(plans[name].hosts[0].command)), "and the plan showed it"
    for number in range(hosts):
        assert len({_same_on_all(" ".join(plan.hosts[number].command)) for plan in plans.values()}) == 1


@pytest.mark.slow
def test_groups_give_the_same_script_the_same(emulator, script_job, request, tmp_path, monkeypatch):
    if WITH_DOCKER:
        request.getfixturevalue("engine")
        monkeypatch.setattr(docker, "IMAGE", IMAGE)
    for name in (*local_hosts.PASSED_ON, "OMP_NUM_THREADS"):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data"
    data.mkdir()
    (data / "image.txt").write_text("pixels")
    group = {"instance_type": "ml.m5.xlarge", "instance_count": 1}
    job = script_job(
        SEEN,
        inputs={
            "train": {"folder": str(data), "instance_groups": ["cpus", "gpus"]},
            "weights": {"folder": str(data), "instance_groups": ["gpus"]},
        },
        hyperparameters={"a": 1},
        distribution="torchrun",
        compute={
            "instance_groups": [{"name": "cpus", **group}, {"name": "gpus", **group}], "training_groups": ["gpus"],
            "processes_per_host": 1,  # without it some backends count GPUs, and others let the toolkit do it
        },
        role=ROLE, region=REGION, output=f"s3://{BUCKET}/runs", image={"framework_version": "2.8.0", "python": "py312"},
    )  # fmt: skip
    runs = {name: launcher.run(launcher.plan(job, on=name)) for name in DECLARED}
    for run in runs.values():
        wait_for_state(run, "Completed", 150)
    for one, other in itertools.combinations(DECLARED, 2):
        for number in (1, 2):
            compare(*(of_run(runs[name], 0, f"*{number}") for name in (one, other)), DECLARED[one], DECLARED[other])
    for run in runs.values():
        assert [of_run(run, 0, f"*{number}").environment.get("WORLD_SIZE") for number in (1, 2)] == [None, "1"]
        assert [[*of_run(run, 0, f"*{number}").rest["channels"]] for number in (1, 2)] == [
            ["train"],
            ["train", "weights"],
        ]


def of_run(run: launcher.Run, rank: int, host: str = "*") -> Seen:
    return Seen(run.folder.path, run.name, rank, host)


def _same_on_all(command: str) -> str:
    """A command without its Python, its port and its hosts' addresses.

    The toolkit of today writes `--` before a script that it starts without a launcher; those in AWS's older images do not.
    """
    without = re.sub(r"^\S*python[\d.]*( --)?|--master_port (<free port>|\d+)", "", command)
    return re.sub(r"127\.0\.0\.(\d)", r"algo-\1", without)
