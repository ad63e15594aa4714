"""`launcher doctor`: what each backend needs, and whether this machine has it. It contacts nothing outside this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from launcher.aws import sdk
from launcher.backends import docker, docker_engine, local_hosts, process
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, RUN_FAILED
from launcher.commands.json_text import as_json
from launcher.config.issues import Issue
from launcher.record import records
from launcher.show.severity import coloured

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Versions of Python that this kit is tested with."""

AWS_ROLE_VARIABLES = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""If one of these is set, credentials come over the network."""


def add(to: arguments.Add) -> None:
    made = to("doctor", "check what each backend needs on this machine", carry_out)
    arguments.json(made, "{BACKEND: {ready, needs: [{backend, subject, state, found, fix}]}}")


def carry_out(options: argparse.Namespace) -> int:
    needs = look()
    print(as_json(to_dict(needs)) if options.json else coloured(text(needs), sys.stdout))
    return DONE if any(ready(needs).values()) else RUN_FAILED


@dataclass(frozen=True)
class Need:
    """One thing that a backend needs."""

    backend: str
    subject: str
    state: Literal["ok", "missing", "not checked"]
    found: str
    fix: str = ""


def look() -> list[Need]:
    """Check every need of every backend."""
    return [*_process(), *_docker(), *_aws()]


def ready(needs: list[Need]) -> dict[str, bool]:
    """Backend -> whether it has all that it needs."""
    backends = dict.fromkeys(need.backend for need in needs)
    return {name: all(need.state != "missing" for need in needs if need.backend == name) for name in backends}


def to_dict(needs: list[Need]) -> dict[str, Any]:
    """JSON-ready."""
    found = ready(needs)
    return {
        name: {"ready": found[name], "needs": [asdict(need) for need in needs if need.backend == name]}
        for name in found
    }


def text(needs: list[Need]) -> str:
    """For people."""
    lines = []
    for name, is_ready in ready(needs).items():
        lines.append(f"{name}: {'ready' if is_ready else 'not ready'}")
        for need in needs:
            if need.backend == name:
                lines.append(f"  {need.state:<12} {need.subject}: {need.found}")
                lines += [f"  {'':<12} fix: {need.fix}"] if need.fix else []
    return "\n".join(lines)


def _process() -> Iterator[Need]:
    version = platform.python_version()
    known = version.rpartition(".")[0] in PYTHONS
    found = version if known else f"{version}, with which this kit is not tested"
    yield Need("process", "Python", "ok" if known else "not checked", found, "" if known else f"use {PYTHONS[-1]}")
    for package in process.NEEDED.values():
        yield _package("process", package, "make, or pip install -e '.[local]', in this kit's folder")
    if local_hosts.finds_torchrun():
        yield Need("process", "torchrun", "ok", "for distributed jobs")
    else:
        yield Need(
            "process",
            "torchrun",
            "missing",
            "not beside this Python, not on PATH; distributed jobs need it",
            local_hosts.NO_TORCHRUN,
        )


def _docker() -> Iterator[Need]:
    engine, issues = docker_engine.look()
    yield from (_missing("docker", "engine", issue) for issue in issues)
    if engine is None:
        for subject in ("image", "disk"):
            yield Need("docker", subject, "not checked", "no engine", "")
    else:
        yield Need("docker", "engine", "ok", engine.version)
        yield Need("docker", "Compose", "ok", f"{engine.compose_version} ({' '.join(engine.compose)})")
        image = docker_engine.find_image(docker.IMAGE)
        if image is None:
            yield Need("docker", "image", "missing", f"{docker.IMAGE} is not on this machine", docker.BUILD_IMAGE)
        else:
            yield Need("docker", "image", "ok", f"{docker.IMAGE}, {image['Size'] / 1e9:.1f} GB")
        full = docker_engine.check_disk(engine, records.store())
        yield from (_missing("docker", "disk", issue) for issue in full)
        if not full:
            yield Need("docker", "disk", "ok", f"at least {docker_engine.MIN_FREE_GB} GB free")


def _aws() -> Iterator[Need]:
    boto3 = _package("aws", "boto3", "make, or pip install -e '.[aws]', in this kit's folder")
    yield boto3
    yield _sdk()
    if boto3.state == "missing":
        yield Need("aws", "credentials", "not checked", "needs boto3")
        return
    kind = _credentials()
    if kind is not None:
        yield Need(
            "aws",
            "credentials",
            "ok",
            f"found ({kind}); launcher plan --check asks AWS whether they are valid",
        )
    elif any(os.environ.get(name) for name in AWS_ROLE_VARIABLES):
        yield Need("aws", "credentials", "not checked", "this container's role provides them over the network")
    else:
        fix = "aws configure, or aws sso login; an EC2 instance's role provides them over the network, which was not checked"
        yield Need("aws", "credentials", "missing", "none in the environment or in ~/.aws", fix)


def _credentials() -> str | None:
    """Where this machine's credentials come from; None if it has none. Uses no network."""
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session()
    try:
        resolver = session.get_component("credential_provider")
        for remote in ("container-role", "iam-role"):
            resolver.remove(remote)
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError:  # for example a missing profile
        return None
    return found.method if found is not None else None


def _sdk() -> Need:
    found = sdk.v2() or (f"{sdk.TRAINS} {sdk.v3()}" if sdk.v3() else "not installed")
    here = found if sdk.supports_estimators() else f"{found}; boto3 sends the same request"
    return Need("aws", "SageMaker SDK", "ok", here)


def _package(backend: str, name: str, fix: str) -> Need:
    try:
        return Need(backend, name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Need(backend, name, "missing", "not installed", fix)


def _missing(backend: str, subject: str, issue: Issue) -> Need:
    found = f"{issue.found} (needed: {issue.valid})" if issue.valid else issue.found
    return Need(backend, subject, "missing", found, issue.fix)
