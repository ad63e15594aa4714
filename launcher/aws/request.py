"""A job's CreateTrainingJob request, a pure function of its arguments. A test compares it with what SDK v2 sends.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.aws import catalog
from launcher.config import hyperparameters
from launcher.config.job import Job
from launcher.config.metrics import metric_table
from launcher.config.sections import Compute, Input
from launcher.config.students import LABELS, students

ARCHIVE = "sourcedir.tar.gz"
CODE_CHANNEL = "code"
"""The channel for the code under network isolation, since the container cannot download it then."""

PROFILER_INSTANCE_TYPE, PROFILER_VOLUME_GB = "ml.m5.4xlarge", 128
"""The processing job of SageMaker Profiler: profiler_constants.py of sagemaker 2.257.7."""


def metrics(job: Job) -> dict[str, str]:
    """A training job's metrics, name -> regular expression: the config's, else those of the kit's metric line."""
    trained = [] if job.script == LABELS else [*students(job)]
    return dict(metric_table().sagemaker_metrics(trained) if job.metrics is None else job.metrics)


def code_uri(job: Job, run_name: str) -> str:
    """The source archive's address in S3."""
    return f"{(job.code or job.output or '').rstrip('/')}/{run_name}/source/{ARCHIVE}"


def training_job(job: Job, run_name: str, channels: Mapping[str, str]) -> dict[str, Any]:
    """The request.

    Args:
        job: with role, region, output, image and an instance type.
        run_name: the training job's name.
        channels: s3:// address of each input that is uploaded.

    Raises:
        catalog.UnknownImage: the region has no such image.
    """
    compute, network = job.compute, job.network
    request: dict[str, Any] = {
        "TrainingJobName": run_name,
        "AlgorithmSpecification": {
            "TrainingInputMode": "File",
            "TrainingImage": image_uri(job),
            "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in metrics(job).items()],
        },
        "RoleArn": job.role,
        "HyperParameters": hyperparameters.encode({**job.hyperparameters, **toolkit_hyperparameters(job, run_name)}),
        "InputDataConfig": [channel(name, given, channels.get(name)) for name, given in job.inputs.items()],
        "OutputDataConfig": {"S3OutputPath": job.output},
        "ResourceConfig": _resources(compute),
        "StoppingCondition": {"MaxRuntimeInSeconds": seconds(compute.max_hours)},
        "ProfilerConfig": profiler_config(job),
    }
    if not request["AlgorithmSpecification"]["MetricDefinitions"]:
        del request["AlgorithmSpecification"]["MetricDefinitions"]
    if job.image is not None and job.image.framework_version is not None:
        request["AlgorithmSpecification"]["EnableSageMakerMetricsTimeSeries"] = (
            True  # as the SDK does for its own images
        )
    if network.isolation:
        request["InputDataConfig"].append(_s3_channel(CODE_CHANNEL, code_uri(job, run_name)))
    if not request["InputDataConfig"]:
        del request["InputDataConfig"]
    if job.output_key is not None:
        request["OutputDataConfig"]["KmsKeyId"] = job.output_key
    if not job.compress_output:
        request["OutputDataConfig"]["CompressionType"] = "NONE"
    if compute.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = seconds(max_wait_hours(compute))
    if job.environment:
        request["Environment"] = dict(job.environment)
    if job.tags:
        request["Tags"] = [{"Key": name, "Value": value} for name, value in job.tags.items()]
    if network.subnets:
        request["VpcConfig"] = {"Subnets": list(network.subnets), "SecurityGroupIds": list(network.security_groups)}
    if network.isolation:
        request["EnableNetworkIsolation"] = True
    if network.encrypt_traffic:
        request["EnableInterContainerTrafficEncryption"] = True
    if job.checkpoints is not None:
        request["CheckpointConfig"] = {"S3Uri": job.checkpoints.s3}
        if job.checkpoints.path is not None:
            request["CheckpointConfig"]["LocalPath"] = job.checkpoints.path
    if compute.max_attempts is not None:
        request["RetryStrategy"] = {"MaximumRetryAttempts": compute.max_attempts}
    if job.debugger is not None:
        request["DebugHookConfig"] = _hook_config(job)
    rules = profiler_rules(job, run_name)
    if rules:
        request["ProfilerRuleConfigurations"] = rules
    return request


def image_uri(job: Job) -> str:
    """The image's address: the job's own, or AWS's for the PyTorch version, region and instance type."""
    assert job.image is not None and job.region is not None
    if job.image.uri is not None:
        return job.image.uri
    assert job.image.framework_version is not None and job.image.python is not None
    return catalog.training_image(job.region, first_instance_type(job), job.image.framework_version, job.image.python)


def first_instance_type(job: Job) -> str:
    """The job's instance type. With several groups: the training group's, else the first with accelerators, else the first.

    SDK v2 selects its image by the same order (`_get_instance_type` in estimator.py of 2.257.7).
    """
    groups = job.compute.instance_groups
    training = [group for group in groups if group.name in job.compute.training_groups]
    training = training or [group for group in groups if group.instance_type.startswith(("ml.g", "ml.p"))] or groups
    return training[0].instance_type if training else job.compute.instance_type or ""


def toolkit_hyperparameters(job: Job, run_name: str) -> dict[str, Any]:
    """The hyperparameters that SageMaker's SDK adds for the container toolkit.

    Source: estimator.py and pytorch/estimator.py of sagemaker 2.257.7.
    """
    isolated = job.network.isolation
    added: dict[str, Any] = {
        "sagemaker_submit_directory": f"/opt/ml/input/data/{CODE_CHANNEL}/{ARCHIVE}"
        if isolated
        else code_uri(job, run_name),
        "sagemaker_program": job.script,
        "sagemaker_container_log_level": 20,
        "sagemaker_job_name": run_name,
        "sagemaker_region": job.region,
    }
    if job.distribution == "smddp":
        added |= {
            "sagemaker_distributed_dataparallel_enabled": True,
            "sagemaker_instance_type": job.compute.instance_type if not job.compute.instance_groups else None,
            "sagemaker_distributed_dataparallel_custom_mpi_options": job.custom_mpi_options or "",
        }
    elif job.distribution == "torchrun":
        added["sagemaker_torch_distributed_enabled"] = True
        if not job.compute.instance_groups:
            added["sagemaker_instance_type"] = job.compute.instance_type
    return {**added, **processes_hyperparameter(job), **groups_hyperparameter(job)}


def groups_hyperparameter(job: Job) -> dict[str, list[str]]:
    """The groups that train. SDK v2 drops them with torchrun, but every toolkit release that has torchrun starts it only on these groups'
    hosts (`train` in sagemaker_pytorch_container/training.py, 2.7.0 to 3.0.0). Without a launcher they inform the script.
    """
    training = job.compute.training_groups
    return {"sagemaker_distribution_instance_groups": list(training)} if training else {}


def processes_hyperparameter(job: Job) -> dict[str, int]:
    """The job's training processes per host. The toolkit reads this name for torchrun too (runner.py of 5.1.4)."""
    if job.compute.processes_per_host is None or job.distribution != "torchrun":
        return {}
    return {"sagemaker_mpi_num_of_processes_per_host": job.compute.processes_per_host}


def channel(name: str, given: Input, uploaded_to: str | None) -> dict[str, Any]:
    """One entry of InputDataConfig.

    Args:
        uploaded_to: the s3:// address of an input that is uploaded; None for others.
    """
    if given.source in ("fsx", "efs"):
        made: dict[str, Any] = {
            "ChannelName": name,
            "DataSource": {
                "FileSystemDataSource": {
                    "FileSystemId": given.fsx or given.efs,
                    "FileSystemType": "FSxLustre" if given.fsx else "EFS",
                    "DirectoryPath": given.path,
                    "FileSystemAccessMode": given.access or "ro",
                }
            },
        }
        return made if given.content_type is None else {**made, "ContentType": given.content_type}
    made = _s3_channel(name, uploaded_to or given.s3 or "")
    source = made["DataSource"]["S3DataSource"]
    if given.data_type is not None:
        source["S3DataType"] = given.data_type
    if given.sharded:
        source["S3DataDistributionType"] = "ShardedByS3Key"
    if given.instance_groups is not None:
        source["InstanceGroupNames"] = list(given.instance_groups)
    if given.attributes is not None:
        source["AttributeNames"] = list(given.attributes)
    for key, value in (
        ("CompressionType", given.compression),
        ("ContentType", given.content_type),
        ("RecordWrapperType", given.record_wrapper),
        ("InputMode", given.mode),
    ):
        if value is not None:
            made[key] = value
    if given.shuffle_seed is not None:
        made["ShuffleConfig"] = {"Seed": given.shuffle_seed}
    return made


def profiler_rules(job: Job, run_name: str) -> list[dict[str, Any]]:
    """The processing jobs that run beside the training job: SageMaker Profiler's own, then the job's rules.

    SDK v2 omits Profiler's processing job if a rule is given, which would leave Profiler's recordings unprocessed.
    """
    if job.profiling is None or job.region is None:
        return []
    made = []
    if job.profiling.profiler is not None:
        made.append(
            {
                "RuleConfigurationName": detailed_profiler_name(run_name),
                "RuleEvaluatorImage": catalog.profiler_image(job.region),
                "InstanceType": PROFILER_INSTANCE_TYPE,
                "VolumeSizeInGB": PROFILER_VOLUME_GB,
                "RuleParameters": {"rule_to_invoke": "DetailedProfilerProcessing"},
            }
        )
    for name, parameters in job.profiling.rules.items():
        made.append(
            {
                "RuleConfigurationName": name,
                "RuleEvaluatorImage": catalog.rules_image(job.region),
                "RuleParameters": {
                    key: str(value)
                    for key, value in {**rule_defaults()[name], **parameters, "rule_to_invoke": name}.items()
                },
            }
        )
    return made


@functools.cache
def rule_defaults() -> dict[str, dict[str, Any]]:
    """Debugger's profiling rule -> its default parameters."""
    rules: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("profiler_rules.yaml").read_text(encoding="utf-8")
    )
    return rules


def detailed_profiler_name(run_name: str) -> str:
    """The name of SageMaker Profiler's processing job, made unique by the run's time and letters."""
    return "DetailedProfilerProcessingJobConfig-" + "-".join(run_name.rsplit("-", 3)[1:])


def max_wait_hours(compute: Compute) -> float:
    """Hours that a spot job may wait and train in total."""
    return compute.max_wait_hours if compute.max_wait_hours is not None else min(2 * compute.max_hours, 28 * 24)


def seconds(hours: float) -> int:
    """Hours as whole seconds, at least 1."""
    return max(1, math.floor(hours * 3600 + 0.5))


def _s3_channel(name: str, uri: str) -> dict[str, Any]:
    return {
        "ChannelName": name,
        "DataSource": {
            "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
        },
    }


def _resources(compute: Compute) -> dict[str, Any]:
    made: dict[str, Any] = {"VolumeSizeInGB": compute.volume_gb}
    if compute.instance_groups:
        made["InstanceGroups"] = [
            {
                "InstanceGroupName": group.name,
                "InstanceType": group.instance_type,
                "InstanceCount": group.instance_count,
            }
            for group in compute.instance_groups
        ]
    else:
        made |= {"InstanceType": compute.instance_type, "InstanceCount": compute.instance_count}
    if compute.volume_key is not None:
        made["VolumeKmsKeyId"] = compute.volume_key
    if compute.keep_alive_minutes is not None:
        made["KeepAlivePeriodInSeconds"] = seconds(compute.keep_alive_minutes / 60)
    if compute.training_plan is not None:
        made["TrainingPlanArn"] = compute.training_plan
    return made


def profiler_config(job: Job) -> dict[str, Any]:
    """ProfilerConfig. It disables profiling unless the job asks for it: without the member, SageMaker profiles at a cost."""
    if job.profiling is None:
        return {"DisableProfiler": True}
    made: dict[str, Any] = {"S3OutputPath": job.profiling.output or job.output, "DisableProfiler": False}
    if job.profiling.system_interval_ms is not None:
        made["ProfilingIntervalInMilliseconds"] = job.profiling.system_interval_ms
    if job.profiling.profiler is not None:
        made["ProfilingParameters"] = {
            "CPUProfilingDuration": str(job.profiling.profiler.cpu_seconds),
            "SMPFileRotationSecs": str(job.profiling.profiler.file_rotation_seconds),
        }
    return made


def _hook_config(job: Job) -> dict[str, Any]:
    assert job.debugger is not None
    made: dict[str, Any] = {"S3OutputPath": job.debugger.output or job.output}
    if job.debugger.hook_parameters:
        made["HookParameters"] = dict(job.debugger.hook_parameters)
    made["CollectionConfigurations"] = [
        {"CollectionName": name, **({"CollectionParameters": dict(parameters)} if parameters else {})}
        for name, parameters in sorted(job.debugger.collections.items())
    ]
    return made
