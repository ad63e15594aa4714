"""What is checked before a run in containers starts: docker, engine, Compose, image, disk. No engine is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

import launcher
from launcher.backends import docker, docker_engine
from launcher.config.issues import UserError
from launcher.record import records
from tests.local_mode.conftest import DENIED, DOWN, DOWN_BUT_0, NO_COMPOSE, WORKING, no_network


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


@pytest.mark.parametrize(
    ("answers", "found", "fix"),
    [
        ({"info": DOWN}, "does not answer", "systemctl start docker"),
        ({"info": DOWN_BUT_0}, "does not answer", "systemctl start docker"),
        ({"info": DENIED}, "may not open", "usermod -aG docker"),
        ({"compose version": NO_COMPOSE}, "no Docker Compose", "install"),
        (
            {"image inspect": ("[]", "Error: No such image\n", 1)},
            f"{docker.IMAGE} is not on this machine",
            "make image",
        ),
        ({"context inspect": ("ssh://me@elsewhere\n", "", 0)}, "another machine", "docker context use default"),
    ],
)
def test_each_lack_is_one_message_with_its_fix_and_nothing_starts(machine, script_job, store, answers, found, fix):
    machine({**WORKING, **answers})
    plan = launcher.plan(script_job("print(1)"), on="docker")
    assert not plan.errors
    with pytest.raises(UserError) as caught:
        launcher.run(plan)
    [issue] = caught.value.issues
    assert found in issue.found and fix in issue.fix
    assert not store.exists()


def test_an_old_compose_is_reported(machine):
    machine({**WORKING, "compose version": NO_COMPOSE}, "1.25.0")
    engine, [issue] = docker_engine.look()
    assert engine is None and "1.25.0" in issue.found and "1.29" in issue.valid


def test_no_docker_at_all_is_in_the_plan_already(script_job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    [issue] = launcher.plan(script_job("print(1)"), on="docker").errors
    assert "no docker command" in issue.found and "install" in issue.fix


def test_a_full_disk_is_reported(machine, script_job, monkeypatch):
    machine(WORKING)
    monkeypatch.setattr(docker_engine, "MIN_FREE_GB", 10**9)
    found = launcher.check(launcher.plan(script_job("print(1)"), on="docker")).errors
    assert {issue.valid for issue in found} == {"at least 1000000000 GB"} and "prune" in found[0].fix


def test_a_plan_asks_the_engine_nothing(script_job, monkeypatch, tmp_path):
    """Planning stays what it is: what needs the engine is `check`'s."""
    monkeypatch.setattr(docker_engine, "ask", no_network)
    assert not launcher.plan(script_job("print(1)"), on="docker").errors


def test_what_compose_says_becomes_a_failure_with_its_fix():
    output = 'Creating network\nERROR: for algo-1  Cannot create container: invalid mount config for type "bind": bind source path does not exist: /x'
    assert "does not see this machine's folders" in docker.explain(output)
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
