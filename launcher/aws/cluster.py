"""Validation of a job's hosts: types, groups, times and distribution. Offline."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import partial

from launcher.aws import catalog, prices, request
from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.config.sections import Compute
from launcher.planner import groups
from launcher.show.text import listed

warning = partial(Issue, level="warning")

DEFAULT_MAX_HOURS = 5 * 24
"""MaxRuntimeInSeconds without a quota increase. https://docs.aws.amazon.com/general/latest/gr/sagemaker.html"""

FIRST_WITH_GROUPS = (1, 10)
"""PyTorch version. https://docs.aws.amazon.com/sagemaker/latest/dg/train-heterogeneous-cluster.html"""

FIRST_WITH_FP8 = (2, 9)
"""PyTorch version: MIN_TORCH of entrypoints/training/models/fp8.py."""


def check(job: Job, *, kit_script: bool) -> list[Issue]:
    """Issues of `compute` and `distribution`; see `validation.check`."""
    issues = [*_machines(job), *_ignored_volume(job), *_groups(job), *_time(job)]
    if not any(issue.level == "error" and issue.key.startswith("compute.instance") for issue in issues):
        issues += [*_distribution(job, kit_script), *_precision(job), *_compression(job, kit_script), *_workers(job)]
        issues += [*_idle_gpus(job), *_fp8(job)] if kit_script else []
    return issues


def _machines(job: Job) -> Iterator[Issue]:
    compute = job.compute
    named = [("compute.instance_type", compute.instance_type)] if compute.instance_type else []
    named += [
        (f"compute.instance_groups.{index}.instance_type", group.instance_type)
        for index, group in enumerate(compute.instance_groups)
    ]
    for key, name in named:
        found = catalog.instance(name)
        if found is None:
            near = _nearest(name)
            fix = f"did you mean {near}?" if near else "see https://aws.amazon.com/sagemaker/ai/pricing/"
            yield Issue(key=key, found=f"{name}: SageMaker has no such instance type for training", fix=fix)
        if found is not None and found.local_storage_gb and compute.volume_key is not None:
            # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ResourceConfig.html
            yield Issue(
                key="compute.volume_key",
                found=f"{name} has local disks, which its hardware encrypts; SageMaker accepts no key for them",
                fix="remove volume_key",
            )


def _ignored_volume(job: Job) -> Iterator[Issue]:
    """A disk size that no host uses."""
    compute, kinds = job.compute, prices.instances(job)
    own = {name: found.local_storage_gb for name in kinds if (found := catalog.instance(name)) is not None}
    if compute.volume_gb != Compute.model_fields["volume_gb"].default and own and all(own.get(name) for name in kinds):
        yield warning(
            key="compute.volume_gb",
            found=f"{listed([f'{name} has {size} GB' for name, size in own.items()])} of local storage, which SageMaker uses instead",
            fix="remove volume_gb",
        )


def _nearest(name: str) -> str | None:
    """The instance type that a misspelt name meant: of its size, or of its family and no larger; None if that is unclear."""
    sizes: dict[str, list[str]] = {}
    for known in catalog.instance_types():
        _, family, size = known.split(".")
        sizes.setdefault(family, []).append(size)
    _, family, size = name.split(".")
    families = [family] if family in sizes else difflib.get_close_matches(family, sizes, n=3)
    of_size = [each for each in families if size in sizes[each]]
    if of_size:
        return f"ml.{of_size[0]}.{size}"
    if not families:
        return None
    if (asked := _xlarges(size)) is None:
        near = difflib.get_close_matches(size, sizes[families[0]], n=1)
    else:
        near = [each for each in sizes[families[0]] if (_xlarges(each) or asked) < asked]
    return f"ml.{families[0]}.{max(near, key=lambda each: _xlarges(each) or 0)}" if near else None


def _xlarges(size: str) -> float | None:
    """A size as a multiple of `xlarge`; None if it is no size."""
    parts = re.fullmatch(r"(\d*)xlarge|(large)|(medium)", size)
    if parts is None:
        return None
    return 0.5 if parts[2] else 0.25 if parts[3] else int(parts[1] or 1)


def _groups(job: Job) -> Iterator[Issue]:
    """SageMaker's requirements for groups; `launcher.planner.groups` has those of every backend."""
    compute = job.compute
    names = [group.name for group in compute.instance_groups]
    if names and compute.instance_type is not None:
        yield Issue(
            key="compute.instance_type",
            found="given beside instance_groups, which hold the types",
            fix="remove instance_type and instance_count, or the groups",
        )
    if compute.price_per_hour is not None and len(prices.instances(job)) > 1:
        yield Issue(
            key="compute.price_per_hour",
            found="one price for groups of different instance types",
            fix="remove it: launcher plan --check reads AWS's price list",
        )
    version = _framework_version(job) or ""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(names) > 1 and len(numbers) == 2 and numbers < FIRST_WITH_GROUPS:
        yield Issue(
            key="compute.instance_groups",
            found=f"several groups with PyTorch {version}, whose image does not support them",
            valid="PyTorch 1.10 or newer",
            fix="use a newer image, or write one group",
        )
    some = [name for name, channel in job.inputs.items() if channel.instance_groups]
    if some and job.network.isolation:
        yield Issue(
            key="network.isolation",
            found=f"the code comes as a channel for all groups, but {some[0]} has some: SageMaker needs them everywhere or nowhere",
            fix="remove instance_groups from the channels",
        )
    for name, channel in job.inputs.items():
        if some and channel.source in ("fsx", "efs"):
            yield Issue(
                key=f"inputs.{name}",
                found=f"a file system goes to all groups, but {some[0]} has instance_groups: SageMaker needs them everywhere or nowhere",
                fix="remove instance_groups from the other channels, or use S3 for this one",
            )
        elif some and not channel.instance_groups:
            yield Issue(
                key=f"inputs.{name}",
                found=f"no instance_groups, but {some[0]} has them: SageMaker requires them on every channel or on none",
                fix=f"add instance_groups: [{', '.join(names)}]",
            )


def _idle_gpus(job: Job) -> Iterator[Issue]:
    """GPUs of hosts that preprocess on their CPUs."""
    if not groups.is_remote(job) or groups.has_teacher_servers(job):
        return
    for index, group in enumerate(job.compute.instance_groups):
        machine = catalog.instance(group.instance_type)
        if machine is not None and machine.gpus and group.name not in job.compute.training_groups:
            yield warning(
                key=f"compute.instance_groups.{index}.instance_type",
                found=f"{group.instance_type} for {group.name}, whose hosts preprocess on their CPUs: its GPUs would stay idle",
                fix="use an instance type without GPUs, such as ml.c5.18xlarge",
            )


def _time(job: Job) -> Iterator[Issue]:
    compute = job.compute
    if compute.max_wait_hours is not None and not compute.spot:
        yield Issue(key="compute.max_wait_hours", found="given without spot", fix="remove it, or write spot: true")
    elif compute.max_wait_hours is not None and compute.max_wait_hours < compute.max_hours:
        yield Issue(
            key="compute.max_wait_hours",
            found=f"{compute.max_wait_hours:g} h, less than max_hours ({compute.max_hours:g} h): it covers waiting and training",
            valid=f"{compute.max_hours:g} or more",
            fix=f"write max_wait_hours: {min(2 * compute.max_hours, 28 * 24):g}",
        )
    if compute.keep_alive_minutes is not None and compute.spot:
        yield Issue(
            key="compute.keep_alive_minutes",
            found="a warm pool with spot, which SageMaker refuses",
            fix="remove keep_alive_minutes or spot",
        )
    if compute.keep_alive_minutes is not None and len(compute.instance_groups) > 1:
        # https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html, Considerations
        yield Issue(
            key="compute.keep_alive_minutes",
            found="a warm pool with several instance groups, which SageMaker refuses",
            fix="remove keep_alive_minutes, or write instance_type and instance_count",
        )
    if compute.max_hours > DEFAULT_MAX_HOURS:
        yield warning(
            key="compute.max_hours",
            found=f"{compute.max_hours:g} h: the default quota is {DEFAULT_MAX_HOURS} h a job",
            fix="request a higher quota first, or write less",
        )


def _distribution(job: Job, kit_script: bool) -> Iterator[Issue]:
    kind = request.first_instance_type(job)
    machine = catalog.instance(kind)
    if job.custom_mpi_options is not None and job.distribution != "smddp":
        yield Issue(
            key="custom_mpi_options",
            found=f"ignored with distribution: {job.distribution}",
            fix="remove it, or write distribution: smddp",
        )
    if machine is None:
        return
    processes = job.compute.processes_per_host
    if job.distribution == "none" and kit_script and machine.gpus > 1:
        yield warning(
            key="distribution",
            found=f"none on {kind}: one process uses one of its {machine.gpus} GPUs; you pay for all",
            valid="torchrun or smddp",
            fix="write distribution: torchrun, or use an instance type with one GPU",
        )
    if job.distribution != "smddp":
        if machine.gpus and processes is not None and processes > machine.gpus:
            yield Issue(
                key="compute.processes_per_host",
                found=f"{processes} processes for the {machine.gpus} GPUs of {kind}",
                valid=f"at most {machine.gpus}",
                fix="write processes_per_host: null, for one process per GPU",
            )
        return
    if processes not in (None, machine.gpus):
        yield Issue(
            key="compute.processes_per_host",
            found=f"{processes}; smddp runs one process per GPU",
            fix="remove processes_per_host",
        )
    supported = catalog.smddp_instance_types()
    if kind not in supported:
        yield Issue(
            key="distribution",
            found=f"smddp on {kind}: SageMaker's library does not run there",
            valid=", ".join(supported),
            fix="write distribution: torchrun (nccl uses EFA there), or change compute.instance_type",
        )
    version = _framework_version(job)
    versions = catalog.smddp_versions()
    if version is None:
        if job.image is not None:
            yield Issue(
                key="distribution",
                level="not checked",
                found="whether the image holds SageMaker's data parallel library",
                fix="run import smdistributed.dataparallel in it",
            )
    elif version not in versions and any(full.startswith(f"{version}.") for full in versions):
        full = [full for full in versions if full.startswith(f"{version}.")]
        yield Issue(
            key="distribution",
            found=f"smddp with PyTorch {version}: the image's library depends on the patch version",
            valid=", ".join(full),
            fix=f'write the version in full: "{full[-1]}"',
        )
    elif version in versions and kind == "ml.p3.16xlarge" and not versions[version].startswith("1."):
        yield Issue(
            key="distribution",
            found=f"smddp on {kind}: the library of PyTorch {version} ({versions[version]}) no longer runs there",
            valid=", ".join(name for name in supported if name != kind),
            fix="write distribution: torchrun, or change compute.instance_type",
        )
    elif version not in versions:
        yield Issue(
            key="distribution",
            found=f"smddp with PyTorch {version}: its image has no SageMaker data parallel library",
            valid=f"PyTorch {', '.join(versions)}",
            fix="write distribution: torchrun, or use an image of one of these versions",
        )


def _precision(job: Job) -> Iterator[Issue]:
    for name, value in job.hyperparameters.items():
        if not isinstance(value, str) or name == "gradient_compression":
            continue
        machines = [found for kind in _computing(job, name) if (found := catalog.instance(kind)) is not None]
        for name_of_gpu in dict.fromkeys(machine.gpu for machine in machines):
            if name_of_gpu is None or (gpu := catalog.gpu(name_of_gpu)).supports(value):
                continue
            newer = (
                "Ada, Hopper or newer: L4, L40S, H100" if value == "fp8" else "Ampere or newer: A100, A10G, L4, H100"
            )
            instead = "bf16" if gpu.supports("bf16") else "fp16 or fp32"
            yield Issue(
                key=f"hyperparameters.{name}",
                found=f"{value} on {gpu.name}, whose hardware does not support it",
                valid=f"{value} on NVIDIA {newer} …",
                fix=f"write {name}: {instead}, or use {'ml.g6' if value == 'fp8' else 'ml.g5'}",
            )


def _computing(job: Job, name: str) -> list[str]:
    """The instance types that compute in the number format of a hyperparameter: the training one, or those that run the teacher for it."""
    if name == "teacher_precision" and job.hyperparameters.get("teacher_servers"):
        training = groups.training_groups(job)
        return [group.instance_type for group in job.compute.instance_groups if group not in training]
    return [request.first_instance_type(job)]


def _fp8(job: Job) -> Iterator[Issue]:
    version = _framework_version(job)
    if job.hyperparameters.get("teacher_precision") == "fp8" and version and catalog.numbers(version) < FIRST_WITH_FP8:
        yield Issue(
            key="hyperparameters.teacher_precision",
            found=f"fp8 with PyTorch {version}, which is too old for it",
            valid=f"fp8 with PyTorch {'.'.join(map(str, FIRST_WITH_FP8))} or later",
            fix="use a newer image, or write teacher_precision: null, which follows precision",
        )


def _compression(job: Job, kit_script: bool) -> Iterator[Issue]:
    value = job.hyperparameters.get("gradient_compression", "none")
    if kit_script and job.distribution == "smddp" and value != "none":
        yield Issue(
            key="hyperparameters.gradient_compression",
            found=f"{value} with smddp, which does not compress gradients",
            valid="none with smddp; bf16 with torchrun",
            fix="write gradient_compression: none, or distribution: torchrun",
        )


def _workers(job: Job) -> Iterator[Issue]:
    machine = catalog.instance(request.first_instance_type(job))
    workers = job.hyperparameters.get("num_workers")
    if machine is None or machine.vcpus is None or not isinstance(workers, int) or isinstance(workers, bool):
        return
    processes = job.compute.processes_per_host or max(1, machine.gpus) if job.distribution != "none" else 1
    if workers * processes > machine.vcpus:
        yield warning(
            key="hyperparameters.num_workers",
            found=f"{workers} data workers for each of {processes} processes on {machine.vcpus} vCPUs",
            fix=f"write num_workers: {machine.vcpus // processes} or fewer; more workers compete for vCPUs",
        )


def _framework_version(job: Job) -> str | None:
    """The image's PyTorch version; None: unknown."""
    if job.image is None:
        return None
    if job.image.uri is None:
        return job.image.framework_version
    about = catalog.image_facts(job.image.uri)
    return about.framework_version if about is not None else None
