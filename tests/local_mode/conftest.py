"""Local mode's tests. Those with a real engine run where LAUNCHER_TEST_DOCKER=1 stands; without an engine they then fail.

LAUNCHER_TEST_DOCKER=1 pytest tests/local_mode        LAUNCHER_TEST_IMAGE=… takes another image than this kit's
"""

from __future__ import annotations

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
