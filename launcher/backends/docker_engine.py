"""Docker on this machine: the engine, Compose, an image, disk space. Read-only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.issues import Issue

KEY = "--on docker"

SECONDS = 20
"""Seconds a docker command may take before the engine counts as not answering."""

MIN_FREE_GB = 2
"""Disk space that a run needs: container layers, a log, a model."""

INSTALL = "sudo apt-get install docker.io docker-compose (Debian, Ubuntu), or https://docs.docker.com/engine/install/"

OLDEST_COMPOSE = (1, 29)
"""The last version of v1, and the oldest that is tested."""


@dataclass(frozen=True)
class Engine:
    """A working engine with Compose."""

    version: str
    compose: tuple[str, ...]
    """The command."""
    compose_version: str
    root: Path
    """Its folder of images and containers."""
    rootless: bool
    """Whether it runs without root, so that root in a container is the user."""
    nvidia: bool
    """Whether it has the nvidia runtime."""

    def to_dict(self) -> dict[str, Any]:
        return {"engine": self.version, "compose": list(self.compose), "compose_version": self.compose_version}


def look() -> tuple[Engine | None, list[Issue]]:
    """The engine that the docker client reaches; or None, and the issues that prevent its use."""
    if shutil.which("docker") is None:
        return None, [Issue(key=KEY, found="no docker command on this machine", fix=INSTALL)]
    issues = []
    info, trouble = _info()
    if trouble is not None:
        issues.append(trouble)
    compose = find_compose()
    if compose is None:
        issues.append(
            Issue(
                key=KEY,
                found="no Docker Compose on this machine",
                valid="docker compose (v2 or later), or docker-compose 1.29 or later",
                fix="sudo apt-get install docker-compose (Debian), docker-compose-v2 (Ubuntu), or https://docs.docker.com/compose/install/",
            )
        )
    elif compose[1] < OLDEST_COMPOSE:
        found = f"{' '.join(compose[0])} is {compose[2]}"
        issues.append(Issue(key=KEY, found=found, valid="1.29 or later", fix=INSTALL))
    if issues or info is None or compose is None:
        return None, issues
    return Engine(
        version=info.get("ServerVersion", ""),
        compose=compose[0],
        compose_version=compose[2],
        root=Path(info.get("DockerRootDir", "/")),
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or []),
        nvidia="nvidia" in (info.get("Runtimes") or {}),
    ), []


def find_compose() -> tuple[tuple[str, ...], tuple[int, ...], str] | None:
    """Compose's command, and its version as numbers and as text; None: not installed.

    SDK v2 finds the plugin only if its answer contains "v2", so it misses Compose v5
    (sagemaker/local/image.py of 2.257.7; https://github.com/aws/sagemaker-python-sdk/issues/5739).
    """
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) is None:
            continue
        answer = ask(*command, "version", "--short")
        found = re.fullmatch(r"v?(\d+)\.(\d+)\S*", answer.stdout.strip())
        if answer.returncode == 0 and found:
            return command, (int(found[1]), int(found[2])), answer.stdout.strip().removeprefix("v")
    return None


def find_image(image: str) -> dict[str, Any] | None:
    """The engine's description of an image on this machine; None: not on this machine."""
    answer = ask("docker", "image", "inspect", image)
    try:
        return json.loads(answer.stdout)[0] if answer.returncode == 0 else None
    except (ValueError, IndexError):
        return None


def check_disk(engine: Engine, store: Path) -> list[Issue]:
    """Issues of a nearly full disk, the engine's or the run store's."""
    issues = []
    for what, place in (("the engine's folder", engine.root), ("the run store", store)):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**30
        if free < MIN_FREE_GB:
            fix = "docker system df shows Docker's use, docker system prune removes unused data"
            found = f"{free:.1f} GB free for {what}, {place}"
            issues.append(Issue(key=KEY, found=found, valid=f"at least {MIN_FREE_GB} GB", fix=fix))
    return issues


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """A command's result; status 124 after the time limit."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {SECONDS} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _info() -> tuple[dict[str, Any] | None, Issue | None]:
    """The engine's own description, or why there is none."""
    answer = ask("docker", "info", "--format", "{{json .}}")
    try:
        info = json.loads(answer.stdout)
    except ValueError:
        info = {}
    errors = "\n".join([*(info.get("ServerErrors") or []), answer.stderr]).strip()
    if answer.returncode == 0 and info.get("ServerVersion") and not info.get("ServerErrors"):
        return info, _elsewhere()
    if "permission denied" in errors.lower():
        found = "you may not open the engine's socket"
        fix = "sudo usermod -aG docker $USER, then log in again; members of that group have root access to this machine"
    else:
        line = errors.splitlines()[-1].strip() if errors else "no answer"
        found = f"the Docker engine does not answer: {line[:200]}"
        fix = "sudo systemctl start docker; without systemd: sudo dockerd &; with Docker Desktop: start it"
    return None, Issue(key=KEY, found=found, fix=fix)


def _elsewhere() -> Issue | None:
    """The issue of an engine on another machine, whose containers cannot mount this machine's folders."""
    host = os.environ.get("DOCKER_HOST")
    if host is None:
        answer = ask("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        host = answer.stdout.strip() if answer.returncode == 0 else ""
    if not host or host.startswith(("unix://", "npipe://")):
        return None
    found = f"the Docker engine is on another machine ({host}) and cannot mount the run's folder"
    return Issue(key=KEY, found=found, fix="run docker context use default, and unset DOCKER_HOST")
