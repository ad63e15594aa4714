"""A plan's sagemaker.train.ModelTrainer (SDK v3), built from the planned request. Only this file imports SDK v3.

The trainer has no `source_code`. With it, SDK v3 replaces the image's own entry point by a script of its own, which starts no smddp and
takes no hyperparameter with an apostrophe (container_drivers/scripts/environment.py of sagemaker-train 1.27.0). So the image's container
toolkit starts the uploaded code, as it does for the estimator.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.aws.estimator import NO_TELEMETRY, isolated_credentials
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

ROLE_CHECK = "SAGEMAKER_VALIDATE_ROLE"
"""Unless this variable is false, SDK v3 asks IAM what the role may do whenever a trainer is made, and fails without an answer."""


def unsupported(job: Job) -> list[Issue]:
    """The job's settings that a ModelTrainer cannot express (train/model_trainer.py of sagemaker-train 1.27.0)."""
    asked = {"profiling": job.profiling, "debugger": job.debugger}
    return [
        Issue(
            key=key,
            found="SDK v3's ModelTrainer has neither ProfilerConfig, profiler rules nor Debugger's hook",
            valid="a job without it, or launcher.run, which sends the whole request",
            fix=f"remove {key}, or use launcher.run(plan)",
        )
        for key, value in asked.items()
        if value is not None
    ]


def model_trainer(job: Job, request: Mapping[str, Any], boto_session: Any) -> ModelTrainer:
    """The trainer whose `train()` sends the planned request. Making it sends no request; `launcher plan --check` checks the role.

    Args:
        job: the job that `request` is for.

    Raises:
        UserError: the job has settings that a ModelTrainer cannot express.
    """
    issues = unsupported(job)
    if issues:
        raise UserError(issues)
    with isolated_credentials(boto_session), _without_role_check():
        return _model_trainer(job, request, boto_session)


def _model_trainer(job: Job, request: Mapping[str, Any], boto_session: Any) -> ModelTrainer:
    from sagemaker.core import shapes
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training.configs import Compute, Networking
    from sagemaker.train import ModelTrainer

    algorithm, vpc = request["AlgorithmSpecification"], request.get("VpcConfig", {})
    checkpoints, retries = request.get("CheckpointConfig"), request.get("RetryStrategy")
    bucket = request["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://").partition("/")[0]
    made = ModelTrainer(
        sagemaker_session=Session(boto_session, sagemaker_config=NO_TELEMETRY, default_bucket=bucket),
        role=request["RoleArn"],
        base_job_name=job.name,
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        compute=Compute(
            **_named(request["ResourceConfig"]), enable_managed_spot_training=request.get("EnableManagedSpotTraining")
        ),
        networking=Networking(
            **_named(vpc),
            enable_network_isolation=request.get("EnableNetworkIsolation"),
            enable_inter_container_traffic_encryption=request.get("EnableInterContainerTrafficEncryption"),
        ),
        stopping_condition=shapes.StoppingCondition(**_named(request["StoppingCondition"])),
        output_data_config=shapes.OutputDataConfig(**_named(request["OutputDataConfig"])),
        input_data_config=[shapes.Channel(**_named(channel)) for channel in request.get("InputDataConfig", [])],
        checkpoint_config=shapes.CheckpointConfig(**_named(checkpoints)) if checkpoints else None,
        environment=dict(request.get("Environment", {})),
        hyperparameters=dict(request["HyperParameters"]),
        tags=[shapes.Tag(**_named(tag)) for tag in request.get("Tags", [])] or None,
    )
    if "MetricDefinitions" in algorithm:
        made.with_metric_definitions(
            [shapes.MetricDefinition(**_named(metric)) for metric in algorithm["MetricDefinitions"]]
        )
    if retries:
        made.with_retry_strategy(shapes.RetryStrategy(**_named(retries)))
    return made


@contextlib.contextmanager
def _without_role_check() -> Iterator[None]:
    """Let SDK v3 take the role without a request to IAM."""
    before = os.environ.get(ROLE_CHECK)
    os.environ[ROLE_CHECK] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ROLE_CHECK]
        else:
            os.environ[ROLE_CHECK] = before


def _named(part: Any) -> Any:
    """A part of a request with SDK v3's names: `S3OutputPath` is `s3_output_path` there."""
    if isinstance(part, Mapping):
        return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): _named(value) for name, value in part.items()}
    return [_named(item) for item in part] if isinstance(part, list) else part
