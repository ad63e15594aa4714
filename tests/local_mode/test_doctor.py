"""`launcher doctor`: what it finds, what it does not ask, and its exit codes."""

from __future__ import annotations

import json

import pytest

import launcher
from launcher.backends import local_hosts
from launcher.commands import doctor, main
from tests.local_mode.conftest import DOWN, WORKING


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def connect(*_: object) -> None:
        raise AssertionError("doctor used the network")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", *doctor.AWS_ROLE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def needs(backend: str) -> dict[str, doctor.Need]:
    return {need.subject: need for need in doctor.look() if need.backend == backend}


def test_a_machine_with_everything_is_ready(machine, monkeypatch, capsys):
    machine({**WORKING, "image inspect": ('[{"Id": "sha256:1", "Size": 2147483648}]', "", 0)})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    assert main.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert (
        "docker: ready" in printed and "process: ready" in printed and "aws: ready" in printed and "2.1 GB" in printed
    )
    assert "hunter2" not in printed


def test_what_is_missing_is_reported_with_its_fix_and_what_hangs_on_it_is_not_checked(machine, capsys):
    machine({**WORKING, "info": DOWN})
    assert main.main(["doctor", "--json"]) == 0, "the process backend is ready all the same"
    found = json.loads(capsys.readouterr().out)
    assert not found["docker"]["ready"] and found["process"]["ready"] and not found["aws"]["ready"]
    docker = {need["subject"]: need for need in found["docker"]["needs"]}
    assert "systemctl start docker" in docker["engine"]["fix"] and docker["image"]["state"] == "not checked"
    assert needs("aws")["credentials"].state == "missing" and "aws configure" in needs("aws")["credentials"].fix


def test_a_program_that_distributed_jobs_start_with_is_looked_for_in_doctor_and_plan(monkeypatch, tmp_path, script_job):
    def reported() -> list[str]:
        planned = launcher.plan(script_job("x = 1", distribution="torchrun"))
        return [str(issue) for issue in planned.errors if issue.key == "distribution"]

    assert needs("process")["torchrun"].state == "ok" and reported() == []
    monkeypatch.setattr(local_hosts, "inherited", lambda outer: {"PATH": str(tmp_path)})
    assert needs("process")["torchrun"].state == "missing" and "install torch" in needs("process")["torchrun"].fix
    assert ["no torchrun beside" in issue for issue in reported()] == [True]
    assert not launcher.plan(script_job("x = 1")).errors


def test_credentials_that_only_the_network_could_give_are_not_checked(monkeypatch):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.2/x")
    assert needs("aws")["credentials"].state == "not checked"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert needs("aws")["credentials"].state == "not checked"


def test_a_machine_that_is_ready_for_nothing_gives_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.process, "NEEDED", {"nothing_like_it": "nothing-like-it"})
    assert main.main(["doctor"]) == 1
    assert "no docker command" in capsys.readouterr().out
