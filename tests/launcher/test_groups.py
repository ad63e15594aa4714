"""Instance groups: what each host of a job with several sees and does, with AWS's real toolkit, and what is refused before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.backends import local_hosts
from launcher.backends.process import Process
from launcher.planner import groups
from tests.conftest import assert_nothing_left, job_of, shared_store, write_batch

CPUS = {"name": "cpus", "instance_type": "ml.c5.xlarge", "instance_count": 2}
GPUS = {"name": "gpus", "instance_type": "ml.g5.xlarge", "instance_count": 2}
TWO_GROUPS = {"instance_groups": [CPUS, GPUS], "training_groups": ["gpus"]}
"""The group that trains comes last, so that no host's number is its rank."""

SEES = """
    import json, os, pathlib, sys
    seen = {name: os.environ.get(name) for name in os.environ if name.startswith(("SM_", "MASTER_", "TRAINING_", "WORLD"))}
    seen["arguments"], seen["rank"] = sys.argv[1:], os.environ.get("RANK")
    seen["resources"] = json.loads(pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"], "resourceconfig.json").read_text())
    if "RANK" in os.environ:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        seen["total"] = total.item()
        dist.destroy_process_group()
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "seen.json").write_text(json.dumps(seen))
"""


def seen(run: launcher.Run) -> dict[str, dict[str, Any]]:
    """Host -> what its script saw."""
    return {
        host: json.loads((run.folder.host(host) / "output/data/seen.json").read_text()) for host in sorted(run.hosts)
    }


def variable(of: dict[str, Any], name: str) -> Any:
    """A variable's JSON."""
    return json.loads(of[name])


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "image.txt").write_text("pixels")
    return folder


def test_torchrun_starts_on_the_training_group_alone_and_the_script_on_every_host(script_job, data):
    job = script_job(
        SEES,
        distribution="torchrun",
        compute=TWO_GROUPS,
        inputs={
            "everyone": {"folder": str(data), "instance_groups": ["cpus", "gpus"]},
            "bigs": {"folder": str(data), "instance_groups": ["gpus"]},
        },
        hyperparameters={"depth": 3},
    )
    plan = launcher.plan(job)
    assert [(host.name, host.group) for host in plan.hosts] == [
        ("algo-3", "gpus"),
        ("algo-4", "gpus"),
        ("algo-1", "cpus"),
        ("algo-2", "cpus"),
    ]
    run = launcher.run(plan)
    assert run.wait(120) == "Completed", run.outcome()
    hosts = seen(run)
    addresses = [f"127.0.0.{number}" for number in range(1, 5)]
    for name, host in hosts.items():
        group, index = ("cpus", int(name[-1]) - 1) if name < "algo-3" else ("gpus", int(name[-1]) - 3)
        mine = addresses[:2] if group == "cpus" else addresses[2:]
        assert variable(host, "SM_HOSTS") == addresses
        assert host["SM_CURRENT_INSTANCE_GROUP"] == host["resources"]["current_group_name"] == group
        assert variable(host, "SM_CURRENT_INSTANCE_GROUP_HOSTS") == mine
        assert variable(host, "SM_INSTANCE_GROUPS") == ["cpus", "gpus"]
        assert variable(host, "SM_DISTRIBUTION_INSTANCE_GROUPS") == ["gpus"] and host["SM_IS_HETERO"] == "true"
        entries = [
            {"instance_group_name": "cpus", "instance_type": "local", "hosts": addresses[:2]},
            {"instance_group_name": "gpus", "instance_type": "local", "hosts": addresses[2:]},
        ]
        assert host["resources"]["instance_groups"] == entries
        assert variable(host, "SM_INSTANCE_GROUPS_DICT") == {entry["instance_group_name"]: entry for entry in entries}
        assert host["MASTER_ADDR"] == addresses[2] and host["arguments"] == ["--depth", "3"]
        assert variable(host, "SM_CHANNELS") == (["everyone"] if group == "cpus" else ["bigs", "everyone"])
        training = group == "gpus"
        assert (host["rank"], host.get("WORLD_SIZE")) == ((str(index), "2") if training else (None, None))
        assert host.get("total") == (2.0 if training else None)
    [port] = {host["TRAINING_SERVERS_PORT"] for host in hosts.values()}
    assert port not in {host["MASTER_PORT"] for host in hosts.values()}
    for host in plan.hosts:
        lines = run.folder.log(host.name).read_text().splitlines()
        ran = lines[lines.index("Invoking script with the following command:") + 2]
        assert ran.replace(hosts["algo-1"]["MASTER_PORT"], "<free port>") == " ".join(host.command)
    assert_nothing_left(run)


@pytest.fixture(scope="module")
def without_a_launcher(tmp_path_factory) -> launcher.Run:
    """A run of TWO_GROUPS, without torchrun."""
    place = tmp_path_factory.mktemp("without-a-launcher")
    with shared_store(place):
        run = launcher.run(launcher.plan(job_of(place / "source", SEES, compute=TWO_GROUPS)))
        run.wait(120)
    return run


def test_without_a_launcher_every_host_starts_the_script_and_knows_which_groups_train(without_a_launcher):
    run = without_a_launcher
    assert run.state == "Completed", run.outcome()
    assert [variable(host, "SM_DISTRIBUTION_INSTANCE_GROUPS") for host in seen(run).values()] == [["gpus"]] * 4
    assert {host["MASTER_ADDR"] for host in seen(run).values()} == {"127.0.0.3"}
    assert run.hosts[0] == "algo-3", "progress and metrics come from a host that trains"


def test_one_group_is_a_cluster_of_one_type(script_job):
    run = launcher.run(launcher.plan(script_job(SEES, compute={"instance_groups": [{**GPUS, "instance_count": 1}]})))
    assert run.wait(60) == "Completed", run.outcome()
    [host] = seen(run).values()
    assert host["SM_CURRENT_INSTANCE_GROUP"] == "gpus" and host["SM_IS_HETERO"] == "false"
    assert "TRAINING_SERVERS_PORT" not in host


def test_a_host_of_a_group_that_serves_ends_the_run_where_it_fails(script_job):
    text = """
    import os, time
    if os.environ["SM_CURRENT_INSTANCE_GROUP"] == "cpus": raise ValueError("no room for images")
    time.sleep(100)
    """
    compute = {**TWO_GROUPS, "instance_groups": [{**CPUS, "instance_count": 1}, {**GPUS, "instance_count": 1}]}
    run = launcher.run(launcher.plan(script_job(text, compute=compute)))
    assert run.wait(120) == "Failed"
    assert run.outcome()["failed_host"] == "algo-1" and "no room for images" in run.outcome()["failure"]
    assert_nothing_left(run)


def test_a_replay_has_the_groups_again(without_a_launcher, monkeypatch):
    monkeypatch.setenv("LAUNCHER_RUNS", str(without_a_launcher.folder.path.parent))
    again = launcher.replay(without_a_launcher.name)
    assert again.errors == () and [host.group for host in again.hosts] == ["gpus", "gpus", "cpus", "cpus"]
    assert again.job.compute.training_groups == ["gpus"]


def test_the_hosts_that_train_share_the_gpus_and_all_share_the_cores(monkeypatch):
    monkeypatch.setattr(local_hosts, "gpus", lambda: ("0", "1", "2", "3"))
    monkeypatch.setattr(local_hosts, "core_count", lambda: 12)
    shares = [local_hosts.share(rank, 2, 2, others=2) for rank in (0, 1, None)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1", "2,3", ""]
    assert {share["OMP_NUM_THREADS"] for share in shares} == {"2"}, "of six processes"


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ({"instance_count": 2}, [("algo-1", "", 0), ("algo-2", "", 1)]),
        (
            TWO_GROUPS,
            [("algo-3", "gpus", 0), ("algo-4", "gpus", 1), ("algo-1", "cpus", None), ("algo-2", "cpus", None)],
        ),
        (
            {"instance_groups": [CPUS, GPUS]},
            [("algo-1", "cpus", 0), ("algo-2", "cpus", 1), ("algo-3", "gpus", 2), ("algo-4", "gpus", 3)],
        ),
    ],
)
def test_hosts_have_sagemakers_numbers_and_those_that_train_come_first(compute, expected):
    job = launcher.from_values({"name": "test", "script": "train.py", "compute": compute})
    assert [(place.name, place.group, place.rank) for place in groups.places(job)] == expected


def test_more_hosts_than_this_machine_takes_are_refused(script_job):
    compute = {"instance_groups": [CPUS, {**GPUS, "instance_count": 15}], "training_groups": ["gpus"]}
    [issue] = launcher.plan(script_job("print(1)", compute=compute, distribution="torchrun")).errors
    assert (issue.key, issue.found) == ("compute.instance_groups", "17 hosts on one machine")


@pytest.mark.parametrize("backend", ["process", "docker", "aws"])
def test_every_backend_finds_what_is_wrong_with_groups(script_job, tmp_path, backend):
    inputs = {"train": {"folder": str(tmp_path), "instance_groups": ["gpu"]}}
    compute = {**TWO_GROUPS, "training_groups": [], "instance_count": 3}
    plan = launcher.plan(script_job("print(1)", compute=compute, distribution="torchrun", inputs=inputs), on=backend)
    found = {issue.key: str(issue) for issue in plan.errors}
    assert "each of which has its own count" in found["compute.instance_count"]
    assert "0 groups for torchrun" in found["compute.training_groups"]
    assert "did you mean gpus?" in found["inputs.train.instance_groups"]


REMOTE = {
    "name": "test",
    "script": "train_classifier.py",
    "distribution": "torchrun",
    "compute": TWO_GROUPS,
    "hyperparameters": {"model": "resnet18", "worker_type": "remote", "global_batch_size": 64},
}


def test_a_plan_says_who_preprocesses_and_that_ray_is_missing(tmp_path, monkeypatch):
    write_batch(tmp_path)
    inputs = {name: {"folder": str(tmp_path)} for name in ("train", "validation")}
    job = launcher.from_values({**REMOTE, "inputs": inputs})
    plan = launcher.plan(job)
    assert plan.errors == ()
    assert "group       cpus preprocesses: 2 hosts of ml.c5.xlarge (algo-1, algo-2)\n" in str(plan)
    assert "group       gpus trains: 2 hosts of ml.g5.xlarge (algo-3, algo-4)\n" in str(plan)
    taught = {"student": "resnet18", "worker_type": "remote", "without_servers": "fail", "teacher_servers": {}}
    inputs["teacher"] = {"folder": str(tmp_path), "instance_groups": ["cpus"]}
    values = {**REMOTE, "script": "train_kd.py", "inputs": inputs, "hyperparameters": taught}
    assert "group       cpus preprocesses and runs the teacher: 2 hosts" in str(
        launcher.plan(launcher.from_values(values))
    )
    monkeypatch.setattr(Process, "lacks", lambda self, module: module == "ray")
    [issue] = launcher.plan(job).errors
    assert issue.key == "hyperparameters.worker_type" and "'.[remote]'" in issue.fix


@pytest.mark.parametrize("count", [1, 4])
def test_the_one_group_trains_whether_that_is_said_or_not(count):
    """Else four hosts would each train a model of their own."""
    values = {"name": "x", "script": "train_classifier.py", "hyperparameters": {"model": "resnet18"}}
    values["compute"] = {"instance_groups": [{**GPUS, "instance_count": count}]}
    reported = [
        issue.found for issue in launcher.plan(launcher.from_values(values)).errors if issue.key == "distribution"
    ]
    assert reported == ["none, with 4 hosts: each process would train its own model"] * (count == 4)
