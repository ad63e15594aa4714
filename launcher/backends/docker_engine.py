"""What there is of Docker on this machine: the engine, Compose, an image, room on the disk. Everything here only asks."""

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
"""How long a client may take to answer; an engine that hangs is told as one that does not answer."""

LEAST_FREE_GB = 2
"""Room that a run needs at least: the containers' own layers, a log, a model."""

INSTALL = "sudo apt-get install docker.io docker-compose (Debian, Ubuntu), or https://docs.docker.com/engine/install/"

OLDEST_COMPOSE = (1, 29)
"""The last series of v1, and the oldest that this kit is tried with."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers, with Compose."""

    version: str
    compose: tuple[str, ...]
    """The command."""
    compose_version: str
    root: Path
    """Where it keeps images and containers."""
    rootless: bool
    """Whether it runs as its user, so that root in a container is that user."""
    nvidia: bool
    """Whether it can hand GPUs to containers."""

    def to_dict(self) -> dict[str, Any]:
        return {"engine": self.version, "compose": list(self.compose), "compose_version": self.compose_version}


def look() -> tuple[Engine | None, list[Issue]]:
    """The engine that the docker client reaches; or None and why it cannot be used, each with its fix."""
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
    """Compose's command, its version as numbers and as text; None where there is none.

    Every version counts: SDK v2 takes the plugin only where its answer contains "v2", so it misses Compose v5
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
    """What the engine knows of an image that lies on this machine; None where it lies not."""
    answer = ask("docker", "image", "inspect", image)
    try:
        return json.loads(answer.stdout)[0] if answer.returncode == 0 else None
    except (ValueError, IndexError):
        return None


def check_disk(engine: Engine, store: Path) -> list[Issue]:
    """Where the disk of the engine, or of the run store, is nearly full."""
    issues = []
    for what, place in (("the engine's folder", engine.root), ("the run store", store)):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**30
        if free < LEAST_FREE_GB:
            fix = "docker system df shows what Docker keeps, docker system prune frees what nothing uses"
            found = f"{free:.1f} GB free for {what}, {place}"
            issues.append(Issue(key=KEY, found=found, valid=f"at least {LEAST_FREE_GB} GB", fix=fix))
    return issues


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """A command's answer; one that does not come in time is an answer with status 124."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {SECONDS} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _info() -> tuple[dict[str, Any] | None, Issue | None]:
    """What the engine says of itself, or why it does not."""
    answer = ask("docker", "info", "--format", "{{json .}}")
    try:
        info = json.loads(answer.stdout)
    except ValueError:
        info = {}
    said = "\n".join([*(info.get("ServerErrors") or []), answer.stderr]).strip()
    if answer.returncode == 0 and info.get("ServerVersion") and not info.get("ServerErrors"):
        return info, _elsewhere()
    if "permission denied" in said.lower():
        found = "the engine's socket may not be opened by you"
        fix = "sudo usermod -aG docker $USER, then log in again; that group has root's power over this machine"
    else:
        line = said.splitlines()[-1].strip() if said else "no answer"
        found = f"the Docker engine does not answer: {line[:200]}"
        fix = "sudo systemctl start docker; without systemd: sudo dockerd &; on a desktop: start Docker Desktop"
    return None, Issue(key=KEY, found=found, fix=fix)


def _elsewhere() -> Issue | None:
    """An engine on another machine cannot show this one's folders to its containers."""
    host = os.environ.get("DOCKER_HOST")
    if host is None:
        answer = ask("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        host = answer.stdout.strip() if answer.returncode == 0 else ""
    if not host or host.startswith(("unix://", "npipe://")):
        return None
    found = f"the Docker engine is on another machine ({host}), where the run's folder is not"
    return Issue(key=KEY, found=found, fix="docker context use default, and unset DOCKER_HOST")
