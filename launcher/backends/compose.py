"""A plan as a Compose file: one service a host, on a network of the run's own. Pure functions of their arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.backends.docker_containers import FOLDER_LABEL, RUN_LABEL
from launcher.config.redaction import secrets_in
from launcher.planner.plan import Plan
from launcher.record import records

FILE = "compose.yaml"
"""Its name in the run's folder."""

CODE = "/opt/ml/code"


def text(plan: Plan, folder: Path, image: str, user: str, shm_mb: int, gpus: tuple[tuple[str, ...], ...] = ()) -> str:
    """The Compose file; JSON, which is YAML too. No secret stands in it: Compose takes those from its own environment.

    Args:
        folder: the run's.
        image: its address or id on this machine.
        user: `uid:gid` that the containers run as.
        shm_mb: size of each host's /dev/shm, in MiB.
        gpus: each host's GPUs; none: no host gets any.
    """
    return json.dumps(compose(plan, folder, image, user, shm_mb, gpus), indent=1, ensure_ascii=False) + "\n"


def compose(
    plan: Plan, folder: Path, image: str, user: str, shm_mb: int, gpus: tuple[tuple[str, ...], ...] = ()
) -> dict[str, Any]:
    """The same as a dict."""
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
            "volumes": _volumes(plan, folder, host.name),
            "networks": ["hosts"],
            "shm_size": f"{shm_mb}m",
            "labels": labels,
            "logging": {"driver": "none"},  # the run's folder has the log
        }
        if gpus:
            devices = {"driver": "nvidia", "device_ids": list(gpus[index]), "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
        services[host.address] = service
    network = {"name": plan.name, "labels": labels, "internal": plan.job.network.isolation}
    return {"services": services, "networks": {"hosts": network}}


def container(run: str, host: str) -> str:
    """The name of a host's container."""
    return f"{run}-{host}"


def project(run: str) -> str:
    """Compose's name for a run; it takes no capital letters."""
    return run.lower()


def channel_mounts(plan: Plan) -> list[tuple[Path, str]]:
    """What each channel shows, and where in a container: a folder, or a single file under its own name."""
    return [
        (
            Path(place),
            f"/opt/ml/input/data/{channel}" + ("" if plan.job.inputs[channel].folder else f"/{Path(place).name}"),
        )
        for channel, place in sorted(plan.channels.items())
    ]


def _volumes(plan: Plan, folder: Path, host: str) -> list[dict[str, Any]]:
    """A host's folders: its own /opt/ml, which stays when the container goes, and each channel, read only."""
    channels = [_bind(place, target) | {"read_only": True} for place, target in channel_mounts(plan)]
    return [_bind(records.RunFolder(folder).host(host), "/opt/ml"), *channels]


def _bind(source: Path, target: str) -> dict[str, Any]:
    """A folder or file of this machine.

    With `propagation`, here Docker's own default, Compose v2 uses the engine's mount API, which takes a colon in a path
    (bindRequiresMountAPI in its pkg/compose/create.go).
    """
    literal = {"source": _literal(str(source)), "target": _literal(target)}
    return {"type": "bind", **literal, "bind": {"propagation": "rprivate"}}


def _environment(plan: Plan, index: int, user: str) -> dict[str, str | None]:
    """A host's variables; a secret has no value here, which has Compose take it from the environment around it."""
    given: dict[str, str | None] = {"TRAINING_JOB_NAME": plan.name}
    if plan.job.region is not None:
        given["AWS_REGION"] = plan.job.region
    if not user.startswith("0:"):  # whom the image does not know, so that nothing finds a name or a home for it
        given |= {"HOME": "/tmp", "USER": "sagemaker", "LOGNAME": "sagemaker"}
    given |= {name: _literal(value) for name, value in plan.hosts[index].environment.items()}
    return given | dict.fromkeys(secrets_in(plan.job.environment))


def _literal(text: str) -> str:
    """A text that Compose takes as it is."""
    return text.replace("$", "$$")
