"""A plan as a Compose file: one service per host, in the run's own network. Pure functions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends.docker_containers import FOLDER_LABEL, RUN_LABEL
from launcher.config.redaction import secrets_in
from launcher.planner.plan import HostPlan, Plan
from launcher.record import records

FILE = "compose.yaml"
"""The Compose file's name in the run's folder."""

CODE = "/opt/ml/code"

CONFINED: dict[str, Any] = {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
"""No capabilities, and none to gain: a script needs none, because its user owns what it writes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What each host's container may use."""

    memory_mb: int
    """Memory in MiB, including /dev/shm and its file cache."""
    shm_mb: int
    """Size of /dev/shm, in MiB."""
    processes: int
    """Processes and threads."""


def text(
    plan: Plan, folder: Path, image: str, user: str, limits: Limits, gpus: tuple[tuple[str, ...], ...] = ()
) -> str:
    """The Compose file as JSON, which is valid YAML. It holds no secret: Compose reads those from its environment.

    Args:
        folder: the run's folder.
        image: its address, or its id on this machine.
        user: `uid:gid` of the containers.
        gpus: the GPUs of each host that trains, which are the plan's first hosts; (): no GPUs.
    """
    return json.dumps(compose(plan, folder, image, user, limits, gpus), indent=1, ensure_ascii=False) + "\n"


def compose(
    plan: Plan, folder: Path, image: str, user: str, limits: Limits, gpus: tuple[tuple[str, ...], ...] = ()
) -> dict[str, Any]:
    """The Compose file as a dict."""
    labels = {RUN_LABEL: plan.name, FOLDER_LABEL: _literal(str(folder))}
    services = {}
    for index, host in enumerate(plan.hosts):
        service: dict[str, Any] = {
            "image": _literal(image),
            "container_name": container(plan.name, host.name),
            "hostname": host.address,
            "command": ["train"],
            "user": user,
            "environment": _environment(plan, index, user),
            "volumes": _volumes(plan, folder, host),
            "networks": ["hosts"],
            "shm_size": f"{limits.shm_mb}m",
            "mem_limit": f"{limits.memory_mb}m",
            "pids_limit": limits.processes,
            **CONFINED,
            "labels": labels,
            "logging": {"driver": "none"},  # the log is in the run's folder
        }
        if index < len(gpus):
            devices = {"driver": "nvidia", "device_ids": list(gpus[index]), "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
        services[host.address] = service
    network = {"name": plan.name, "labels": labels, "internal": plan.job.network.isolation}
    return {"services": services, "networks": {"hosts": network}}


def container(run: str, host: str) -> str:
    """The name of a host's container."""
    return f"{run}-{host}"


def project(run: str) -> str:
    """Compose's project name, which has no capital letters."""
    return run.lower()


def channel_mounts(plan: Plan, host: HostPlan) -> list[tuple[Path, str]]:
    """(local path, path in the container) of each channel of a host: a folder is mounted as the channel, a file inside it."""
    mounts = []
    for channel, place in sorted(plan.channels_of(host).items()):
        given, source = plan.job.inputs[channel], Path(place)
        target = f"/opt/ml/input/data/{channel}"
        mounts.append((source, target if given.folder or given.student else f"{target}/{source.name}"))
    return mounts


def _volumes(plan: Plan, folder: Path, host: HostPlan) -> list[dict[str, Any]]:
    """A host's mounts: its /opt/ml, which outlives the container, and each channel, read-only."""
    channels = [_bind(place, target) | {"read_only": True} for place, target in channel_mounts(plan, host)]
    return [_bind(records.RunFolder(folder).host(host.name), "/opt/ml"), *channels]


def _bind(source: Path, target: str) -> dict[str, Any]:
    """A bind mount.

    Setting `propagation`, even to Docker's default, makes Compose v2 use the engine's mount API, which accepts a colon in a path
    (bindRequiresMountAPI in its pkg/compose/create.go).
    """
    literal = {"source": _literal(str(source)), "target": _literal(target)}
    return {"type": "bind", **literal, "bind": {"propagation": "rprivate"}}


def _environment(plan: Plan, index: int, user: str) -> dict[str, str | None]:
    """A host's variables. A secret is None, so that Compose reads it from its own environment."""
    given: dict[str, str | None] = {"TRAINING_JOB_NAME": plan.name}
    if plan.job.region is not None:
        given["AWS_REGION"] = plan.job.region
    if not user.startswith("0:"):  # the image has no name and no home for this user
        given |= {"HOME": "/tmp", "USER": "sagemaker", "LOGNAME": "sagemaker"}
    given |= {name: _literal(value) for name, value in plan.hosts[index].environment.items()}
    return given | dict.fromkeys({**secrets_in(plan.job.environment), **plan.job.secrets})


def _literal(text: str) -> str:
    """A text in which Compose substitutes no variables."""
    return text.replace("$", "$$")
