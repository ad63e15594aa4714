"""A plan's sagemaker.pytorch.PyTorch and its fit() inputs (SDK v2). Only this file imports SDK v2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.aws import request
from launcher.config.job import Job
from launcher.config.sections import Input

if TYPE_CHECKING:
    from sagemaker.instance_group import InstanceGroup
    from sagemaker.pytorch import PyTorch
    from sagemaker.session import Session

NO_TELEMETRY = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
"""Without it, the SDK reports every fit() to a bucket of AWS's, without a timeout (telemetry_logging.py of 2.257.7)."""

NO_METADATA = "AWS_EC2_METADATA_DISABLED"
"""If this variable is true, boto3 sends no request to EC2's metadata address."""


@contextlib.contextmanager
def isolated_credentials(boto_session: Any) -> Iterator[None]:
    """Let the SDK use no credentials but those of a boto3 session.

    The SDK creates sessions when it is imported (jumpstart/constants.py of 2.257.7) and a client of the default session in each
    estimator (interactive_apps/base_interactive_app.py). Without credentials, these request EC2's metadata address and wait
    for a timeout on other machines.
    """
    import boto3

    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    before = boto3.DEFAULT_SESSION, os.environ.get(NO_METADATA)
    boto3.DEFAULT_SESSION = boto_session
    credentials = boto_session.get_credentials()
    if credentials is None or credentials.method != "iam-role":  # an EC2 instance with a role does use that address
        os.environ[NO_METADATA] = "true"
    try:
        yield
    finally:
        boto3.DEFAULT_SESSION, metadata = before
        if metadata is None:
            os.environ.pop(NO_METADATA, None)
        else:
            os.environ[NO_METADATA] = metadata


def session(job: Job, boto_session: Any) -> Session:
    """A SageMaker session without telemetry and without looking up the default bucket."""
    with isolated_credentials(boto_session):
        import sagemaker

        bucket = (job.output or "").removeprefix("s3://").partition("/")[0]
        return sagemaker.Session(
            boto_session=boto_session, sagemaker_config=NO_TELEMETRY, default_bucket=bucket or None
        )


def estimator(job: Job, run_name: str, sagemaker_session: Session) -> PyTorch:
    """The estimator whose `fit(inputs(…), job_name=run_name)` sends the planned request."""
    with isolated_credentials(sagemaker_session.boto_session):
        return _estimator(job, run_name, sagemaker_session)


def _estimator(job: Job, run_name: str, sagemaker_session: Session) -> PyTorch:
    from sagemaker.instance_group import InstanceGroup
    from sagemaker.pytorch import PyTorch

    compute, network, checkpoints = job.compute, job.network, job.checkpoints
    assert job.image is not None
    metrics = request.metrics(job)
    groups = [InstanceGroup(group.name, group.instance_type, group.instance_count) for group in compute.instance_groups]
    hyperparameters: dict[str, Any] = {
        **job.hyperparameters,
        **request.processes_hyperparameter(job),
        **request.groups_hyperparameter(job),
    }
    machines: dict[str, Any] = {"instance_type": compute.instance_type, "instance_count": compute.instance_count}
    return PyTorch(
        entry_point=job.script,
        source_dir=request.code_uri(job, run_name),
        # the SDK's lists of versions refuse torch_distributed on CPU hosts and images that exist
        image_uri=request.image_uri(job),
        enable_sagemaker_metrics=True if job.image.framework_version is not None else None,
        role=job.role,
        hyperparameters=hyperparameters,
        distribution=_distribution(
            job, [group for group in groups if group.instance_group_name in compute.training_groups]
        ),
        **({"instance_groups": groups} if groups else machines),
        volume_size=compute.volume_gb,
        volume_kms_key=compute.volume_key,
        max_run=request.seconds(compute.max_hours),
        use_spot_instances=compute.spot,
        max_wait=request.seconds(request.max_wait_hours(compute)) if compute.spot else None,
        keep_alive_period_in_seconds=request.seconds(compute.keep_alive_minutes / 60)
        if compute.keep_alive_minutes is not None
        else None,
        max_retry_attempts=compute.max_attempts,
        training_plan=compute.training_plan,
        output_path=job.output,
        output_kms_key=job.output_key,
        disable_output_compression=not job.compress_output,
        checkpoint_s3_uri=checkpoints.s3 if checkpoints else None,
        checkpoint_local_path=checkpoints.path if checkpoints else None,
        subnets=list(network.subnets) or None,
        security_group_ids=list(network.security_groups) or None,
        enable_network_isolation=network.isolation,
        encrypt_inter_container_traffic=network.encrypt_traffic,
        environment=dict(job.environment) or None,
        tags=[{"Key": name, "Value": value} for name, value in job.tags.items()] or None,
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in metrics.items()] or None,
        debugger_hook_config=_hook(job),
        **_profiling(job, run_name),
        sagemaker_session=sagemaker_session,
    )


def inputs(job: Job, channels: Mapping[str, str]) -> dict[str, Any]:
    """The argument of `fit()`: a TrainingInput or a FileSystemInput for each channel.

    Args:
        channels: s3:// address of each input that is uploaded.
    """
    return {name: _input(given, channels.get(name)) for name, given in job.inputs.items()}


def _distribution(job: Job, training_groups: list[InstanceGroup]) -> dict[str, Any] | None:
    """The SDK's `distribution` argument, with the estimator's own group objects."""
    if job.distribution == "none":
        return None
    library: dict[str, Any] = {"enabled": True}
    made: dict[str, Any] = {"torch_distributed": library}
    if job.distribution == "smddp":
        made = {"smdistributed": {"dataparallel": library}}
        if job.custom_mpi_options is not None:
            library["custom_mpi_options"] = job.custom_mpi_options
    return {**made, "instance_groups": training_groups} if training_groups else made


def _input(given: Input, uploaded_to: str | None) -> Any:
    from sagemaker.inputs import FileSystemInput, ShuffleConfig, TrainingInput

    if given.source in ("fsx", "efs"):
        kind = "FSxLustre" if given.fsx else "EFS"
        return FileSystemInput(given.fsx or given.efs, kind, given.path, given.access or "ro", given.content_type)
    address = uploaded_to or given.s3
    assert address is not None
    return TrainingInput(
        address,
        distribution="ShardedByS3Key" if given.sharded else "FullyReplicated",
        compression=given.compression,
        content_type=given.content_type,
        record_wrapping=given.record_wrapper,
        s3_data_type=given.data_type or "S3Prefix",
        instance_groups=None if given.instance_groups is None else [*given.instance_groups],
        input_mode=given.mode,
        attribute_names=None if given.attributes is None else [*given.attributes],
        shuffle_config=ShuffleConfig(given.shuffle_seed) if given.shuffle_seed is not None else None,
    )


def _hook(job: Job) -> Any:
    """Debugger's hook, or False; with None the SDK would add one."""
    if job.debugger is None:
        return False
    from sagemaker.debugger import CollectionConfig, DebuggerHookConfig

    return DebuggerHookConfig(
        s3_output_path=job.debugger.output,
        hook_parameters=dict(job.debugger.hook_parameters) or None,
        collection_configs=[
            CollectionConfig(name, dict(parameters) or None)
            for name, parameters in sorted(job.debugger.collections.items())
        ],
    )


def _profiling(job: Job, run_name: str) -> dict[str, Any]:
    """The estimator's profiling arguments."""
    if job.profiling is None:
        return {"disable_profiler": True}
    from sagemaker.debugger import (
        Profiler,
        ProfilerConfig,
        ProfilerRule,
        rule_configs,
    )
    from sagemaker.debugger.debugger import DetailedProfilerProcessingJobConfig

    wanted = job.profiling.profiler
    rules = []
    if wanted is not None:
        name = request.detailed_profiler_name(run_name)
        rules.append(ProfilerRule.sagemaker(DetailedProfilerProcessingJobConfig(), name=name))
    for name, parameters in job.profiling.rules.items():
        rules.append(ProfilerRule.sagemaker(getattr(rule_configs, name)(**parameters)))
    return {
        "profiler_config": ProfilerConfig(
            s3_output_path=job.profiling.output,
            system_monitor_interval_millis=job.profiling.system_interval_ms,
            profile_params=Profiler(str(wanted.cpu_seconds), str(wanted.file_rotation_seconds)) if wanted else None,
        ),
        "rules": rules or None,
    }
