"""The Compose file, which Compose and engine are found, and what is said before anything starts. No engine is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import launcher
from launcher.backends import compose, docker, docker_engine, local_mode
from launcher.config.issues import UserError
from launcher.config.job import Input
from launcher.record import records
from tests.conftest import ROOT

FOLDER = Path("/runs/it's $1/test-run")


def planned(job, name="test-run"):
    """A plan with a name that a text can be compared with."""
    return replace(launcher.plan(job, on="docker"), name=name)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A PATH with a `docker` and, where given, a `docker-compose` that answer as told: `machine({"info": …}, compose=…)`."""

    def make(answers: dict[str, tuple[str, str, int]], standalone: str | None = None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        cases = ""
        for number, (words, (said, complained, status)) in enumerate(answers.items()):
            (tmp_path / f"out{number}").write_text(said)
            (tmp_path / f"err{number}").write_text(complained)
            cases += f'"{words}"*) cat {tmp_path}/out{number}; cat {tmp_path}/err{number} >&2; exit {status};;\n'
        (folder / "docker").write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) echo "unknown: $*" >&2; exit 1;;\nesac\n')
        (folder / "docker").chmod(0o755)
        if standalone is not None:
            (folder / "docker-compose").write_text(f"#!/bin/sh\necho {standalone}\n")
            (folder / "docker-compose").chmod(0o755)
        for tool in ("cat", "sh"):
            if not (folder / tool).exists():
                (folder / tool).symlink_to(f"/bin/{tool}")
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("DOCKER_HOST", raising=False)

    return make


INFO = json.dumps(
    {"ServerVersion": "27.0", "DockerRootDir": "/", "SecurityOptions": ["name=seccomp"], "Runtimes": {"runc": {}}}
)
HERE = {"context inspect": ("unix:///var/run/docker.sock\n", "", 0)}
WORKING = {
    "info": (INFO, "", 0),
    **HERE,
    "compose version": ("2.35.1\n", "", 0),
    "image inspect": ('[{"Id": "sha256:1"}]', "", 0),
}


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(docker.local_hosts, "gpus", lambda: ())


# -- the Compose file -------------------------------------------------------------------------------------------------


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
    )
    labels = {"vision-launcher.run": "test-run", "vision-launcher.folder": "/runs/it's $$1/test-run"}
    bind = {"bind": {"propagation": "rprivate"}}
    assert json.loads(compose.text(planned(job), FOLDER, "team/image:1", "1000:1000", 2048)) == {
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
                    "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "GOMP_SPINCOUNT": "1000",
                    "PRICE": "5 $$",
                    "HF_TOKEN": None,
                },
                "volumes": [
                    {"type": "bind", "source": "/runs/it's $$1/test-run/hosts/algo-1/opt/ml", "target": "/opt/ml", **bind},
                    {"type": "bind", "source": str(data).replace("$", "$$"), "target": "/opt/ml/input/data/train", "read_only": True, **bind},
                    {"type": "bind", "source": f"{data}/x.bin".replace("$", "$$"), "target": "/opt/ml/input/data/weights/x.bin", "read_only": True, **bind},
                ],
                "networks": ["hosts"],
                "shm_size": "2048m",
                "labels": labels,
                "logging": {"driver": "none"},
            }
        },
        "networks": {"hosts": {"name": "test-run", "labels": labels, "internal": False}},
    }  # fmt: skip


def test_two_hosts_share_a_network_and_nothing_else(script_job, no_gpus):
    job = script_job("print(1)", distribution="torchrun", compute={"instance_count": 2}, network={"isolation": True})
    made = compose.compose(planned(job), FOLDER, "an-image", "0:0", 1024)
    assert made["networks"]["hosts"]["internal"] is True
    first, second = made["services"]["algo-1"], made["services"]["algo-2"]
    assert {key for key in first if first[key] != second[key]} == {"container_name", "hostname", "volumes"}
    assert [volume["source"] for volume in second["volumes"]] == [f"{FOLDER}/hosts/algo-2/opt/ml".replace("$", "$$")]
    assert "HOME" not in first["environment"], "root has one"
    cores = len(os.sched_getaffinity(0))
    assert first["environment"]["OMP_NUM_THREADS"] == str(max(1, cores // 2))


def test_two_runs_of_one_job_share_no_name(script_job, no_gpus):
    job = script_job("print(1)")
    texts = [launcher.plan(job, on="docker") for _ in range(2)]
    one, two = (compose.compose(plan, FOLDER / plan.name, "i", "0:0", 64) for plan in texts)
    assert one["networks"]["hosts"]["name"] != two["networks"]["hosts"]["name"]
    assert one["services"]["algo-1"]["container_name"] != two["services"]["algo-1"]["container_name"]


def test_gpus_are_shared_out_and_the_kits_own_cpu_image_gets_none(script_job, monkeypatch):
    monkeypatch.setattr(docker.local_hosts, "gpus", lambda: ("0", "1", "2", "3"))
    values = {"distribution": "torchrun", "compute": {"instance_count": 2}}
    job = script_job("print(1)", image={"uri": "team/gpu:1"}, **values)
    plan = planned(job)
    assert docker.Docker().world_size(job) == 4 and "CUDA_VISIBLE_DEVICES" not in plan.hosts[0].environment
    made = compose.compose(plan, FOLDER, "team/gpu:1", "0:0", 64, docker.gpus(job))
    given = [service["deploy"]["resources"]["reservations"]["devices"] for service in made["services"].values()]
    assert given == [
        [{"driver": "nvidia", "device_ids": ["0", "1"], "capabilities": ["gpu"]}],
        [{"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]}],
    ]
    assert docker.gpus(script_job("print(1)", **values)) == ()


# -- the plan ---------------------------------------------------------------------------------------------------------


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
    told = any(issue.key == "image.uri" for issue in plan.issues)
    assert told == (image is not None and "uri" in image and taken == docker.IMAGE)


def test_the_plan_shows_every_difference_with_its_reason(script_job):
    for backend in ("docker", "process"):
        plan = launcher.plan(script_job("print(1)"), on=backend)
        differences = launcher.backends.get(backend).DIFFERENCES
        assert differences and all(f"    {name}: {why}" in str(plan) for name, why in differences.items())
        assert json.loads(plan.to_json())["differences"] == differences


def test_data_that_lies_on_sagemakers_side_needs_a_folder_and_the_plan_says_so(script_job):
    job = script_job(
        "print(1)",
        inputs={"train": {"s3": "s3://bucket/train"}, "more": {"fsx": "fs-0123456789abcdef0", "path": "/fsx/x"}},
    )
    found = {issue.key: issue for issue in launcher.plan(job, on="docker").errors}
    assert set(found) == {"inputs.train", "inputs.more"} and "folder" in found["inputs.train"].valid


def test_shared_memory_is_as_the_job_says_or_a_share_of_this_machines(script_job):
    assert docker.shm_mb(script_job("print(1)", compute={"shm_gb": 1.5})) == 1536
    alone = docker.shm_mb(script_job("print(1)"))
    many = docker.shm_mb(script_job("print(1)", distribution="torchrun", compute={"instance_count": 4}))
    assert alone > 64 and abs(alone - 4 * many) < 8


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
    ],
)
def test_the_sdks_local_mode_takes_every_job_and_sends_what_the_plan_shows(script_job, tmp_path, monkeypatch, values):
    (tmp_path / "da#ta?").mkdir()
    (tmp_path / "da#ta?/x").touch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.socket.connect", _no_network)
    job = script_job(
        "print(1)",
        inputs={"train": {"folder": str(tmp_path / "da#ta?"), "sharded": True, "mode": "FastFile"}},
        **values,
    )
    plan = launcher.plan(job, on="docker")
    assert not plan.errors
    started = []
    local_mode.fit(plan, plan.source, lambda: started.append(plan.name))
    assert started == [plan.name]


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configs_hyperparameters_reach_the_container_as_the_plan_shows_them(tmp_path, monkeypatch, config, smoke):
    (tmp_path / "data").touch()
    job = launcher.load(config, smoke=smoke)
    job = job.model_copy(update={"inputs": {name: Input(folder=str(tmp_path)) for name in job.inputs}})
    plan = launcher.plan(job, on="docker")
    assert not plan.errors
    seen = []
    monkeypatch.setattr(local_mode.Containers, "train", lambda _, inputs, output, given, *others: seen.append(given))
    local_mode.fit(plan, plan.source, lambda: None)
    [sent] = seen
    corrected = {"sagemaker_submit_directory": '"/opt/ml/code"', "sagemaker_program": f'"{job.script}"'}
    assert sent | corrected == plan.hyperparameters
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
    from launcher.backends import local_mode
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
    local_mode.fit(plan, plan.source, lambda: None)
    assert plan.hyperparameters["sagemaker_program"] == '"deep/script.py"'


def _no_network(*_: object) -> None:
    raise AssertionError("local mode asked the network")


# -- what is said before anything starts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "standalone", "command", "version"),
    [
        (("2.35.1\n", "", 0), None, ("docker", "compose"), "2.35.1"),
        (("v2.20.3\n", "", 0), "1.29.2", ("docker", "compose"), "2.20.3"),
        (("5.0.1\n", "", 0), None, ("docker", "compose"), "5.0.1"),
        (("2.27.0+ds1-0ubuntu1~22.04.2\n", "", 0), None, ("docker", "compose"), "2.27.0+ds1-0ubuntu1~22.04.2"),
        (("", "docker: 'compose' is not a docker command.\n", 1), "1.29.2", ("docker-compose",), "1.29.2"),
        (("Usage: docker [OPTIONS] COMMAND\n", "", 0), "v2.12.0", ("docker-compose",), "2.12.0"),
    ],
)
def test_every_compose_is_found(machine, plugin, standalone, command, version):
    machine({**WORKING, "compose version": plugin}, standalone)
    engine, issues = docker_engine.look()
    assert not issues and (engine.compose, engine.compose_version) == (command, version)


NO_COMPOSE = ("", "docker: 'compose' is not a docker command.\n", 1)
DOWN = (
    "{}",
    "ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n",
    1,
)
DOWN_BUT_0 = (
    json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock."]}),
    "",
    0,
)
DENIED = ("", "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get \"http://%2Fvar%2Frun%2Fdocker.sock/v1.24/info\": dial unix /var/run/docker.sock: connect: permission denied\n", 1)  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "found", "fix"),
    [
        ({"info": DOWN}, "does not answer", "systemctl start docker"),
        ({"info": DOWN_BUT_0}, "does not answer", "systemctl start docker"),
        ({"info": DENIED}, "may not be opened", "usermod -aG docker"),
        ({"compose version": NO_COMPOSE}, "no Docker Compose", "install"),
        (
            {"image inspect": ("[]", "Error: No such image\n", 1)},
            f"{docker.IMAGE} is not on this machine",
            "make image",
        ),
        ({"context inspect": ("ssh://me@elsewhere\n", "", 0)}, "another machine", "docker context use default"),
    ],
)
def test_each_lack_is_one_message_with_its_cure_and_nothing_starts(machine, script_job, store, answers, found, fix):
    machine({**WORKING, **answers})
    plan = launcher.plan(script_job("print(1)"), on="docker")
    assert not plan.errors
    with pytest.raises(UserError) as caught:
        launcher.run(plan)
    [issue] = caught.value.issues
    assert found in issue.found and fix in issue.fix
    assert not store.exists()


def test_an_old_compose_is_told(machine):
    machine({**WORKING, "compose version": NO_COMPOSE}, "1.25.0")
    engine, [issue] = docker_engine.look()
    assert engine is None and "1.25.0" in issue.found and "1.29" in issue.valid


def test_no_docker_at_all_is_in_the_plan_already(script_job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    [issue] = launcher.plan(script_job("print(1)"), on="docker").errors
    assert "no docker command" in issue.found and "install" in issue.fix


def test_a_full_disk_is_told(machine, script_job, monkeypatch):
    machine(WORKING)
    monkeypatch.setattr(docker_engine, "LEAST_FREE_GB", 10**9)
    found = launcher.check(launcher.plan(script_job("print(1)"), on="docker")).errors
    assert {issue.valid for issue in found} == {"at least 1000000000 GB"} and "prune" in found[0].fix


def test_a_plan_asks_the_engine_nothing(script_job, monkeypatch, tmp_path):
    """Planning stays what it is: what needs the engine is `check`'s."""
    monkeypatch.setattr(docker_engine, "ask", _no_network)
    assert not launcher.plan(script_job("print(1)"), on="docker").errors


def test_what_compose_says_becomes_a_failure_with_its_fix():
    said = 'Creating network\nERROR: for algo-1  Cannot create container: invalid mount config for type "bind": bind source path does not exist: /x'
    assert "does not see this machine's folders" in docker.explain(said)
    assert "network prune" in docker.explain(
        "Error: could not find an available, non-overlapping IPv4 address pool among the defaults"
    )
    assert docker.explain("something else") == "Compose could not make the containers: something else"


def test_a_run_that_cannot_start_is_recorded_as_failed(machine, script_job, store):
    machine(WORKING)
    plan = launcher.check(launcher.plan(script_job("print(1)"), on="docker"))
    machine({**WORKING, "info": DOWN})
    with pytest.raises(UserError):
        launcher.run(replace(plan, checked=True))
    [folder] = records.all_runs()
    assert folder.state() == "Failed" and "not started" in folder.read(folder.outcome)["failure"]
