"""Validation against CreateTrainingJob's limits: counts, lengths and patterns. Offline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sized

from launcher.aws import request
from launcher.config import hyperparameters
from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.config.redaction import mentions_a_secret
from launcher.show.text import counted


def check(job: Job) -> Iterator[Issue]:
    """Issues of sizes and names.

    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html and the pages of its Channel,
    S3DataSource, Tag, VpcConfig, MetricDefinition, ResourceConfig, DebugHookConfig and ProfilerConfig.
    """
    yield from _counts(job)
    yield from _toolkit(job)
    yield from _tags(job)
    yield from _metrics(job)
    yield from _names(job)


def _counts(job: Job) -> Iterator[Issue]:
    profiling, debugger = job.profiling, job.debugger
    limits: list[tuple[str, Sized, int]] = [
        ("inputs", job.inputs, 20 - job.network.isolation),
        ("tags", job.tags, 50),
        ("environment", job.environment, 100),
        ("metrics", job.metrics or {}, 40),
        ("network.subnets", job.network.subnets, 16),
        ("network.security_groups", job.network.security_groups, 5),
        ("compute.instance_groups", job.compute.instance_groups, 5),
        ("profiling.rules", profiling.rules if profiling else {}, 19 if profiling and profiling.profiler else 20),
        ("debugger.collections", debugger.collections if debugger else {}, 20),
        ("debugger.hook_parameters", debugger.hook_parameters if debugger else {}, 20),
    ]
    limits += [(f"inputs.{name}.attributes", given.attributes or [], 16) for name, given in job.inputs.items()]
    for key, values, most in limits:
        if len(values) > most:
            yield Issue(key=key, found=f"{len(values)} entries", valid=f"at most {most}", fix="remove some")


def _toolkit(job: Job) -> Iterator[Issue]:
    """Limits that the container toolkit's own hyperparameters and channel share."""
    longest_name = "x" * 63
    own = hyperparameters.encode(request.toolkit_hyperparameters(job, longest_name))
    count = len(job.hyperparameters) + len(own)
    if len(job.hyperparameters) <= hyperparameters.MAX_COUNT < count:
        yield Issue(
            key="hyperparameters",
            found=f"{count} hyperparameters, with {len(own)} of the container toolkit",
            valid=f"at most {hyperparameters.MAX_COUNT - len(own)} of your own",
            fix="move some to a file in an input channel",
        )
    options = own.get("sagemaker_distributed_dataparallel_custom_mpi_options", "")
    if len(options) > hyperparameters.MAX_VALUE:
        yield Issue(
            key="custom_mpi_options",
            found=f"{len(options)} characters as JSON",
            valid=f"at most {hyperparameters.MAX_VALUE}",
            fix="shorten it",
        )
    if job.network.isolation and request.CODE_CHANNEL in job.inputs:
        yield Issue(
            key=f"inputs.{request.CODE_CHANNEL}",
            found="with network.isolation, the code uses a channel of this name",
            fix="rename yours",
        )


def _tags(job: Job) -> Iterator[Issue]:
    for name, value in job.tags.items():
        if not re.fullmatch(r"[\w .:/=+\-@]{1,128}", name) or name.lower().startswith("aws:"):
            valid = "1 to 128 letters, digits, spaces and _ . : / = + - @, not starting with aws:"
            yield Issue(key=f"tags.{name}", found="not a valid tag name", valid=valid, fix="rename it")
        if not re.fullmatch(r"[\w .:/=+\-@]{0,256}", value):
            valid = "at most 256 letters, digits, spaces and _ . : / = + - @"
            found = "a value with other characters" if mentions_a_secret(f"{name} {value}") else f"{value[:40]!r}"
            yield Issue(key=f"tags.{name}", found=found, valid=valid, fix="use only these characters")


def _metrics(job: Job) -> Iterator[Issue]:
    for name, regex in (job.metrics or {}).items():
        try:
            groups = re.compile(regex).groups
        except re.error as error:
            yield Issue(key=f"metrics.{name}", found=f"{regex!r}: {error}", fix="correct the regular expression")
            continue
        if groups != 1:
            yield Issue(
                key=f"metrics.{name}",
                level="error" if not groups else "warning",
                found=f"{counted(groups, 'group')} in {regex!r}",
                valid="one group, around the number",
                fix="write ( ) around the number and (?: ) for other groups",
            )
        if len(regex) > 500 or not 0 < len(name) <= 255:
            valid = "a name of at most 255 and an expression of at most 500 characters"
            yield Issue(key=f"metrics.{name[:40]}", found="too long", valid=valid, fix="shorten it")


def _names(job: Job) -> Iterator[Issue]:
    """Ids, keys and ARNs against SageMaker's patterns."""
    for key, prefix, ids in (
        ("network.subnets", "subnet-", job.network.subnets),
        ("network.security_groups", "sg-", job.network.security_groups),
    ):
        for name in ids:
            if not re.fullmatch(rf"{prefix}[0-9a-f]{{8,32}}", name):
                yield Issue(key=key, found=name, valid=f"{prefix} and hexadecimal digits", fix="correct the id")
    for key, kms_key in (("compute.volume_key", job.compute.volume_key), ("output_key", job.output_key)):
        if kms_key is not None and not re.fullmatch(r"[a-zA-Z0-9:/_-]*", kms_key):
            valid = "a KMS key's id, alias or ARN: letters, digits and : / _ -"
            yield Issue(key=key, found=kms_key, valid=valid, fix="correct the key")
    plan = job.compute.training_plan
    if plan is not None and not re.fullmatch(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+", plan):
        yield Issue(
            key="compute.training_plan",
            found=plan,
            valid="arn:aws:sagemaker:<region>:<account>:training-plan/<name>",
            fix="aws sagemaker list-training-plans lists yours",
        )
