"""SageMaker local mode, as the SDK does it, with the containers as this kit starts them: LocalSession, client and container class.

What the SDK's own container class does and this one does not (sagemaker/local/image.py of 2.257.7): one network and folder for all
runs, containers that stay, files of root, /dev/shm of 64 MB, a model folder shared by all hosts, credentials looked for on the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3

from launcher.aws import estimator
from launcher.backends import compose, docker
from launcher.planner.plan import Plan

NOBODY = boto3.Session("none", "none", region_name=docker.REGION)
"""Credentials that nobody asks for, so that none are looked for."""

with estimator.isolated_credentials(NOBODY):
    from sagemaker.local import LocalSession
    from sagemaker.local.entities import _LocalTrainingJob
    from sagemaker.local.image import _SageMakerContainer
    from sagemaker.local.local_session import LocalSagemakerClient

Start = Callable[[], None]


@dataclass
class Containers(_SageMakerContainer):
    """A run's containers, in place of those that the SDK would start. `train` returns as soon as they run."""

    plan: Plan
    start: Start

    def __post_init__(self) -> None:
        self.instance_count = len(self.plan.hosts)  # all that _LocalTrainingJob reads

    def train(
        self,
        input_data_config: list[dict[str, Any]],
        output_data_config: dict[str, Any],
        hyperparameters: dict[str, str],
        environment: dict[str, str],
        job_name: str,
    ) -> None:
        """Start them. What the SDK made of the job must be what the plan showed; the hosts' files were written from the plan."""
        # the SDK sends the folder's own place and the script's bare name, and corrects only the first
        sent = hyperparameters | {
            "sagemaker_submit_directory": json.dumps(compose.CODE),
            "sagemaker_program": json.dumps(self.plan.job.script),
        }
        assert sent == self.plan.hyperparameters, (sent, self.plan.hyperparameters)
        assert sorted(channel["ChannelName"] for channel in input_data_config) == sorted(self.plan.channels)
        assert job_name == self.plan.name
        self.start()


class Client(LocalSagemakerClient):
    """The SDK's stand-in for SageMaker, with our containers."""

    def __init__(self, sagemaker_session: LocalSession, plan: Plan, start: Start):
        super().__init__(sagemaker_session)  # type: ignore[no-untyped-call]  # the SDK is annotated in part
        self.plan, self.start = plan, start

    def create_training_job(
        self,
        TrainingJobName: str,  # noqa: N803 - the SDK's names
        AlgorithmSpecification: dict[str, Any],  # noqa: N803
        OutputDataConfig: dict[str, Any],  # noqa: N803
        ResourceConfig: dict[str, Any],  # noqa: N803
        InputDataConfig: list[dict[str, Any]] | None = None,  # noqa: N803
        Environment: dict[str, str] | None = None,  # noqa: N803
        **others: Any,
    ) -> None:
        """As the SDK's own, which can take no other container class; and it sends no telemetry."""
        job = _LocalTrainingJob(Containers(self.plan, self.start))
        job.start(
            InputDataConfig or [], OutputDataConfig, others["HyperParameters"], Environment or {}, TrainingJobName
        )
        LocalSagemakerClient._training_jobs[TrainingJobName] = job


def fit(plan: Plan, code: Path, start: Start) -> None:
    """Fit the plan's estimator in local mode. Nothing is asked over a network, and no credentials are looked for.

    Args:
        code: the folder of the files that travel.
        start: starts the containers; called once.
    """
    job = docker.local_job(plan.job)
    nobody = boto3.Session("none", "none", region_name=job.region)
    with estimator.isolated_credentials(nobody):
        session = LocalSession(nobody, sagemaker_config=estimator.NO_TELEMETRY)
        session.config = {"local": {"local_code": True}}
        session.sagemaker_client = Client(session, plan, start)
        made = estimator.estimator(job, plan.name, session)
        made.source_dir = str(code)
        inputs = estimator.inputs(job, {name: f"file://{quote(place)}" for name, place in plan.channels.items()})
        made.fit(inputs or None, wait=False, job_name=plan.name)
