"""Local mode's tests. Those with a real engine run where LAUNCHER_TEST_DOCKER=1 stands; without an engine they then fail.

LAUNCHER_TEST_DOCKER=1 pytest tests/local_mode        LAUNCHER_TEST_IMAGE=… takes another image than this kit's
"""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

import launcher
from launcher.backends import docker, docker_engine
from launcher.backends.docker_containers import RUN_LABEL

IMAGE = os.environ.get("LAUNCHER_TEST_IMAGE", docker.IMAGE)


@pytest.fixture(scope="session")
def engine() -> docker_engine.Engine:
    """The engine of this machine. A machine without one, or without the image, fails these tests: they are never skipped."""
    found, issues = docker_engine.look()
    assert found is not None, "\n".join(str(issue) for issue in issues)
    assert docker_engine.find_image(IMAGE), f"{IMAGE} is not on this machine: {docker.BUILD_IMAGE}"
    return found


@pytest.fixture
def docker_job(engine, script_job):
    """Makes a job of a script's text for the image under test."""
    return lambda text, **values: script_job(text, image={"uri": IMAGE}, **values)


def left(run: launcher.Run | str) -> list[str]:
    """What the engine still has of a run: containers and networks."""
    label = f"label={RUN_LABEL}={run if isinstance(run, str) else run.name}"
    commands = (
        ["ps", "--all", "--filter", label, "--format", "{{.Names}}"],
        ["network", "ls", "--filter", label, "--quiet"],
    )
    return [
        line
        for command in commands
        for line in subprocess.run(["docker", *command], capture_output=True, text=True, check=True).stdout.split()
    ]


def wait_for_state(run: launcher.Run, state: str, seconds: float = 90) -> None:
    """Until a run is over, in this state; the failure shows what it left."""
    ended = run.wait(seconds)
    logs = "\n".join(f"{host} | {line}" for host, line in run.logs())[-3000:]
    supervisor = run.folder.supervisor_log.read_text()[-3000:] if run.folder.supervisor_log.exists() else ""
    assert ended == state, f"{ended}: {run.outcome()}\n{logs}\n{supervisor}"


def assert_nothing_left(run: launcher.Run, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while left(run):
        assert time.monotonic() < end, left(run)
        time.sleep(0.1)


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


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A PATH with a `docker` that gives these answers, and with a `docker-compose` of this version: `machine({"info": …}, "1.29.2")`."""

    def make(answers: dict[str, tuple[str, str, int]], standalone: str | None = None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        cases = ""
        for index, (words, (output, errors, status)) in enumerate(answers.items()):
            (tmp_path / f"out{index}").write_text(output)
            (tmp_path / f"err{index}").write_text(errors)
            cases += f'"{words}"*) cat {tmp_path}/out{index}; cat {tmp_path}/err{index} >&2; exit {status};;\n'
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


def no_network(*_: object) -> None:
    raise AssertionError("local mode used the network")
