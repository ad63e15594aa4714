"""SageMaker local mode with the SDK's LocalSession, and with this kit's client and container class.

The SDK's own container class (sagemaker/local/image.py of 2.257.7) shares one network and folder among all runs, keeps containers,
writes files as root, limits /dev/shm to 64 MB, shares one model folder among hosts, and looks for credentials on the network.
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

NO_CREDENTIALS = boto3.Session("none", "none", region_name=docker.REGION)
"""A session with credentials, so that the SDK looks for none."""

with estimator.isolated_credentials(NO_CREDENTIALS):
    from sagemaker.local import LocalSession
    from sagemaker.local.entities import _LocalTrainingJob
    from sagemaker.local.image import _SageMakerContainer
    from sagemaker.local.local_session import LocalSagemakerClient

Start = Callable[[], None]


@dataclass
class Containers(_SageMakerContainer):
    """A run's containers, instead of the SDK's own. `train` returns once they run."""

    plan: Plan
    start: Start

    def __post_init__(self) -> None:
        self.instance_count = len(self.plan.hosts)  # the only attribute that _LocalTrainingJob reads

    def train(
        self,
        input_data_config: list[dict[str, Any]],
        output_data_config: dict[str, Any],
        hyperparameters: dict[str, str],
        environment: dict[str, str],
        job_name: str,
    ) -> None:
        """Start the containers, and assert that the SDK's arguments match the plan, from which the hosts' files were written."""
        # the SDK sends the local folder and the script's bare name; its container class corrects only the first
        sent = hyperparameters | {
            "sagemaker_submit_directory": json.dumps(compose.CODE),
            "sagemaker_program": json.dumps(self.plan.job.script),
        }
        assert sent == self.plan.hyperparameters, (sent, self.plan.hyperparameters)
        assert sorted(channel["ChannelName"] for channel in input_data_config) == sorted(self.plan.channels)
        assert job_name == self.plan.name
        self.start()


class Client(LocalSagemakerClient):
    """The SDK's local client, with this kit's containers."""

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
        """As the SDK's own method, which accepts no other container class and sends telemetry."""
        job = _LocalTrainingJob(Containers(self.plan, self.start))
        job.start(
            InputDataConfig or [], OutputDataConfig, others["HyperParameters"], Environment or {}, TrainingJobName
        )
        LocalSagemakerClient._training_jobs[TrainingJobName] = job


def fit(plan: Plan, code: Path, start: Start) -> None:
    """Fit the plan's estimator in local mode, without network and without credentials.

    Args:
        code: the folder of the source files.
        start: starts the containers; called once.
    """
    job = docker.local_job(plan.job)
    no_credentials = boto3.Session("none", "none", region_name=job.region)
    with estimator.isolated_credentials(no_credentials):
        session = LocalSession(no_credentials, sagemaker_config=estimator.NO_TELEMETRY)
        session.config = {"local": {"local_code": True}}
        session.sagemaker_client = Client(session, plan, start)
        made = estimator.estimator(job, plan.name, session)
        made.source_dir = str(code)
        inputs = estimator.inputs(job, {name: f"file://{quote(place)}" for name, place in plan.channels.items()})
        made.fit(inputs or None, wait=False, job_name=plan.name)
