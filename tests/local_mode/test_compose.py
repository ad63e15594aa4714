"""The Compose file of a plan. No engine is needed."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import launcher
from launcher.backends import compose, docker, docker_engine, host_folders, local_hosts, supervision
from launcher.record.records import RunFolder
from tests.launcher.test_students import SCRIPT, TWO, ran

FOLDER = Path("/runs/it's $1/test-run")
LIMITS = compose.Limits(memory_mb=4096, shm_mb=2048, processes=512)


def planned(job, name="test-run"):
    """A plan with a name that a text can be compared with."""
    return replace(launcher.plan(job, on="docker"), name=name)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(docker.local_hosts, "gpus", lambda: ())


def test_one_host_as_compose_text(script_job, tmp_path, monkeypatch, no_gpus):
    data = tmp_path / "a $data"
    data.mkdir()
    (data / "x.bin").write_text("x")
    job = script_job(
        "print(1)",
        image={"uri": "team/image:1"},
        region="eu-west-1",
        inputs={"train": {"folder": str(data)}, "weights": {"file": str(data / "x.bin")}},
        environment={"PRICE": "5 $", "HF_TOKEN": "hunter2"},
        secrets={"DECLARED": {"secretsmanager": "team/key"}},
    )
    labels = {"vision-launcher.run": "test-run", "vision-launcher.folder": "/runs/it's $$1/test-run"}
    bind = {"bind": {"propagation": "rprivate"}}
    assert json.loads(compose.text(planned(job), FOLDER, "team/image:1", "1000:1000", LIMITS)) == {
        "services": {
            "algo-1": {
                "image": "team/image:1",
                "container_name": "test-run-algo-1",
                "hostname": "algo-1",
                "command": ["train"],
                "user": "1000:1000",
                "environment": {
                    "TRAINING_JOB_NAME": "test-run",
                    "AWS_REGION": "eu-west-1",
                    "HOME": "/tmp",
                    "USER": "sagemaker",
                    "LOGNAME": "sagemaker",
                    **local_hosts.NO_CREDENTIALS,
                    "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "GOMP_SPINCOUNT": "1000",
                    "PRICE": "5 $$",
                    "HF_TOKEN": None,
                    "DECLARED": None,
                },
                "volumes": [
                    {"type": "bind", "source": "/runs/it's $$1/test-run/hosts/algo-1/opt/ml", "target": "/opt/ml", **bind},
                    {"type": "bind", "source": str(data).replace("$", "$$"), "target": "/opt/ml/input/data/train", "read_only": True, **bind},
                    {"type": "bind", "source": f"{data}/x.bin".replace("$", "$$"), "target": "/opt/ml/input/data/weights/x.bin", "read_only": True, **bind},
                ],
                "networks": ["hosts"],
                "shm_size": "2048m",
                "mem_limit": "4096m",
                "pids_limit": 512,
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges:true"],
                "labels": labels,
                "logging": {"driver": "none"},
            }
        },
        "networks": {"hosts": {"name": "test-run", "labels": labels, "internal": False}},
    }  # fmt: skip


def test_two_hosts_share_a_network_and_nothing_else(script_job, no_gpus):
    job = script_job("print(1)", distribution="torchrun", compute={"instance_count": 2}, network={"isolation": True})
    made = compose.compose(planned(job), FOLDER, "an-image", "0:0", LIMITS)
    assert made["networks"]["hosts"]["internal"] is True
    first, second = made["services"]["algo-1"], made["services"]["algo-2"]
    assert {key for key in first if first[key] != second[key]} == {"container_name", "hostname", "volumes"}
    assert [volume["source"] for volume in second["volumes"]] == [f"{FOLDER}/hosts/algo-2/opt/ml".replace("$", "$$")]
    assert "HOME" not in first["environment"], "root has one"
    cores = len(os.sched_getaffinity(0))
    assert first["environment"]["OMP_NUM_THREADS"] == str(max(1, cores // 2))


def test_groups_get_their_own_channels_and_gpus_and_the_containers_name_them(script_job, tmp_path, monkeypatch):
    monkeypatch.setattr(docker.local_hosts, "gpus", lambda: ("0", "1"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.bin").touch()
    group = {"cpus": "ml.c5.xlarge", "gpus": "ml.g5.xlarge"}
    job = script_job(
        "print(1)",
        image={"uri": "team/gpu:1"},
        distribution="torchrun",
        compute={
            "instance_groups": [
                {"name": name, "instance_type": kind, "instance_count": 1} for name, kind in group.items()
            ],
            "training_groups": ["gpus"],
        },
        inputs={
            "train": {"folder": str(data), "instance_groups": ["cpus", "gpus"]},
            "weights": {"folder": str(data), "instance_groups": ["gpus"]},
        },
    )
    plan = planned(job)
    assert plan.errors == () and docker.Docker().world_size(job) == 2
    made = compose.compose(plan, FOLDER, "team/gpu:1", "0:0", LIMITS, docker.gpus(job))["services"]
    targets = {name: [volume["target"] for volume in service["volumes"][1:]] for name, service in made.items()}
    assert targets == {
        "algo-2": ["/opt/ml/input/data/train", "/opt/ml/input/data/weights"],
        "algo-1": ["/opt/ml/input/data/train"],
    }
    assert "deploy" not in made["algo-1"]
    [devices] = made["algo-2"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["0", "1"]
    commands = {host.name: " ".join(host.command) for host in plan.hosts}
    assert commands == {"algo-2": "torchrun --nnodes 1 --nproc_per_node 2 script.py", "algo-1": "python -- script.py"}
    resources = {
        host.name: json.loads(host_folders.config_files(plan, host, "eth0")["resourceconfig.json"])
        for host in plan.hosts
    }
    assert {name: one["current_group_name"] for name, one in resources.items()} == {"algo-1": "cpus", "algo-2": "gpus"}
    assert resources["algo-1"]["hosts"] == ["algo-1", "algo-2"]
    assert resources["algo-1"]["instance_groups"] == [
        {"instance_group_name": "cpus", "instance_type": "local", "hosts": ["algo-1"]},
        {"instance_group_name": "gpus", "instance_type": "local", "hosts": ["algo-2"]},
    ]
    assert plan.hyperparameters["sagemaker_distribution_instance_groups"] == '["gpus"]'


def test_two_runs_of_one_job_share_no_name(script_job, no_gpus):
    job = script_job("print(1)")
    texts = [launcher.plan(job, on="docker") for _ in range(2)]
    one, two = (compose.compose(plan, FOLDER / plan.name, "i", "0:0", LIMITS) for plan in texts)
    assert one["networks"]["hosts"]["name"] != two["networks"]["hosts"]["name"]
    assert one["services"]["algo-1"]["container_name"] != two["services"]["algo-1"]["container_name"]


def test_gpus_are_shared_out_and_the_kits_own_cpu_image_gets_none(script_job, monkeypatch):
    monkeypatch.setattr(docker.local_hosts, "gpus", lambda: ("0", "1", "2", "3"))
    values = {"distribution": "torchrun", "compute": {"instance_count": 2}}
    job = script_job("print(1)", image={"uri": "team/gpu:1"}, **values)
    plan = planned(job)
    assert docker.Docker().world_size(job) == 4 and "CUDA_VISIBLE_DEVICES" not in plan.hosts[0].environment
    made = compose.compose(plan, FOLDER, "team/gpu:1", "0:0", LIMITS, docker.gpus(job))
    given = [service["deploy"]["resources"]["reservations"]["devices"] for service in made["services"].values()]
    assert given == [
        [{"driver": "nvidia", "device_ids": ["0", "1"], "capabilities": ["gpu"]}],
        [{"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]}],
    ]
    assert docker.gpus(script_job("print(1)", **values)) == ()


def test_a_student_of_an_earlier_run_is_a_channel_of_its_own_folder(script_job, tmp_path, monkeypatch, no_gpus):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train_kd.py").write_text(textwrap.dedent(SCRIPT))
    many = ran(script_job(SCRIPT, name="many", script="train_kd.py", hyperparameters={"students": TWO}))
    job = script_job("print(1)", inputs={"teacher": {"run": "many", "student": "wide"}})
    plan = launcher.plan(job, on="docker")
    [(place, target)] = compose.channel_mounts(plan, plan.hosts[0])
    assert (place, target) == (many.folder.host("algo-1") / "model/wide", "/opt/ml/input/data/teacher")
    engine = docker_engine.Engine("1", ("docker", "compose"), "2", tmp_path, rootless=False, nvidia=False)
    monkeypatch.setattr(docker_engine, "look", lambda: (engine, []))
    monkeypatch.setattr(docker_engine, "find_image", lambda image: {"Id": "x"})
    monkeypatch.setattr(docker, "sweep", lambda: None)
    monkeypatch.setattr(supervision, "start_supervisor", lambda *given: None)
    folder = RunFolder(tmp_path / "runs" / plan.name)
    folder.path.mkdir(parents=True)
    docker.Docker().start(plan, folder, 0, None)
    point = folder.host("algo-1") / "input/data/teacher"
    assert point.is_dir() and not any(point.iterdir()), "the engine mounts the student's folder there"
