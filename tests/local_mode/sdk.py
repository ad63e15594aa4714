"""The local mode of SageMaker's SDK v2, with a plan's estimator: what it hands to its containers, and those containers themselves.

The docker backend makes its containers without the SDK; tests hold it to what this gives.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3

import tests.read_once  # noqa: F401 - imported for its effect
from launcher.aws import estimator
from launcher.backends import docker, docker_engine
from launcher.config.job import Job
from launcher.config.sections import Input, Network
from launcher.planner import groups
from launcher.planner.plan import Plan
from launcher.record import archives

NO_CREDENTIALS = boto3.Session("none", "none", region_name=docker.REGION)
"""A session with credentials, so that the SDK looks for none."""

with estimator.isolated_credentials(NO_CREDENTIALS):
    from sagemaker.local import LocalSession
    from sagemaker.local.entities import _LocalTrainingJob
    from sagemaker.local.image import _SageMakerContainer
    from sagemaker.local.local_session import LocalSagemakerClient


@dataclass
class HandedOver(_SageMakerContainer):
    """Keeps what the SDK hands to its containers, and starts none."""

    instance_count: int
    channels: tuple[str, ...] = ()
    hyperparameters: dict[str, str] | None = None
    environment: dict[str, str] | None = None
    job_name: str = ""

    def train(
        self,
        input_data_config: list[dict[str, Any]],
        output_data_config: dict[str, Any],
        hyperparameters: dict[str, str],
        environment: dict[str, str],
        job_name: str,
    ) -> None:
        assert not self.job_name, "handed over twice"
        self.channels = tuple(sorted(channel["ChannelName"] for channel in input_data_config))
        self.hyperparameters, self.environment, self.job_name = hyperparameters, environment, job_name


class Client(LocalSagemakerClient):
    """The SDK's local client, with a container class that it does not know, and without telemetry."""

    def __init__(self, session: LocalSession, container: HandedOver):
        super().__init__(session)
        self.container = container

    def create_training_job(self, **request: Any) -> None:
        job = _LocalTrainingJob(self.container)
        job.start(
            request.get("InputDataConfig") or [],
            request["OutputDataConfig"],
            request["HyperParameters"],
            request.get("Environment") or {},
            request["TrainingJobName"],
        )
        LocalSagemakerClient._training_jobs[request["TrainingJobName"]] = job


def hand_over(plan: Plan) -> HandedOver:
    """What the SDK's local mode hands to its containers for this plan, without network and without credentials."""
    container = HandedOver(len(plan.hosts))
    _fit(plan, plan.source, lambda session: setattr(session, "sagemaker_client", Client(session, container)))
    return container


def run(plan: Plan, code: Path, root: Path) -> None:
    """The plan's job in the SDK's own containers, to its end.

    Args:
        code: the folder of the source files.
        root: gets a folder for each host, `model.tar.gz`, and the hosts' common `output`.
    """

    def keep_below(session: LocalSession) -> None:
        session.config["local"]["container_root"] = str(root)

    root.mkdir()
    try:
        _fit(plan, code, keep_below, output=f"file://{root}", wait=True)
    finally:
        found = docker_engine.find_compose()
        assert found is not None
        for file in root.glob("*/docker-compose.yaml"):  # the SDK leaves its containers and its network
            subprocess.run([*found[0], "--file", str(file), "down"], capture_output=True, check=True)
    archives.unpack(root / "output.tar.gz", root / "output", most_bytes=2**20)


def _fit(
    plan: Plan, code: Path, change: Callable[[LocalSession], None], output: str | None = None, wait: bool = False
) -> None:
    job = _for_the_sdk(plan.job).model_copy(update={"output": output})
    credentials = boto3.Session("none", "none", region_name=job.region)
    with estimator.isolated_credentials(credentials):
        session = LocalSession(credentials, sagemaker_config=estimator.NO_TELEMETRY)
        session.config = {"local": {"local_code": True}}
        change(session)
        made = estimator.estimator(job, plan.name, session)
        made.source_dir = str(code)
        inputs = estimator.inputs(job, {name: f"file://{quote(place)}" for name, place in plan.channels.items()})
        made.fit(inputs or None, wait=wait, job_name=plan.name)


def _for_the_sdk(job: Job) -> Job:
    """The job without the settings of SageMaker that the SDK's local mode refuses."""
    local = docker.local_job(job)
    compute = {
        "instance_count": groups.host_count(job),
        **dict.fromkeys(("max_wait_hours", "keep_alive_minutes", "max_attempts", "training_plan", "volume_key")),
        "spot": False,
    }
    return local.model_copy(
        update={
            "compute": local.compute.model_copy(update=compute),
            "role": job.role or "arn:aws:iam::000000000000:role/local-mode",
            "inputs": {name: Input(folder="here") for name in job.inputs},
            "network": Network(),
            "compress_output": True,
            "tags": {},
            **dict.fromkeys(("custom_mpi_options", "output_key", "code", "checkpoints", "profiling", "debugger"), None),
        }
    )
