"""What SageMaker would refuse, ignore or fail on after the cluster has started, found before, without asking anybody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from launcher.aws import catalog, request
from launcher.findings import Finding, did_you_mean
from launcher.job import Compute, Job

warning = partial(Finding, level="warning")

HOURS_WITHOUT_CHECKPOINTS = 1
"""SageMaker's own limit for spot jobs that do not checkpoint.
https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html"""

DEFAULT_MAX_HOURS = 5 * 24
"""MaxRuntimeInSeconds without a quota increase. https://docs.aws.amazon.com/general/latest/gr/sagemaker.html"""

TAKEN_FOLDERS = ("/opt/ml/code", "/opt/ml/input", "/opt/ml/model", "/opt/ml/output")
"""Folders in the container that have another use."""


def check(job: Job, *, kit_script: bool, requirements: bool) -> list[Finding]:
    """Everything wrong or doubtful about a job for SageMaker.

    Args:
        kit_script: whether it runs one of this kit's own entry scripts.
        requirements: whether a requirements.txt travels, which the container installs from the network.
    """
    findings = [*_missing(job), *_machines(job), *_groups(job), *_time(job), *_limits(job)]
    if not any(finding.level == "error" and finding.key.startswith("compute.instance") for finding in findings):
        findings += [*_distribution(job), *_precision(job), *_workers(job)]
    findings += [*_image(job, kit_script), *_inputs(job, kit_script), *_network(job, requirements)]
    findings += [*_spot_and_checkpoints(job), *_profiling(job), *_debugger(job, kit_script)]
    return findings


def _missing(job: Job) -> Iterator[Finding]:
    cures = {
        "role": "add role: arn:aws:iam::123456789012:role/SageMakerTraining, with your account and role",
        "region": "add region: us-west-2, or the region of your data",
        "output": "add output: s3://your-bucket/prefix",
        "image": 'add image: {framework_version: "2.8.0", python: py312}, or image: {uri: …}',
    }
    for key, cure in cures.items():
        if getattr(job, key) is None:
            yield Finding(key=key, found="missing; SageMaker needs it", cure=cure)
    if job.compute.instance_type is None and not job.compute.instance_groups:
        yield Finding(
            key="compute.instance_type",
            found="missing; SageMaker needs it",
            cure="add under compute: instance_type: ml.g5.xlarge, or what the job needs",
        )


def _machines(job: Job) -> Iterator[Finding]:
    compute = job.compute
    named = [("compute.instance_type", compute.instance_type)] if compute.instance_type else []
    named += [
        (f"compute.instance_groups.{index}.instance_type", group.instance_type)
        for index, group in enumerate(compute.instance_groups)
    ]
    for key, name in named:
        found = catalog.instance(name)
        if found is None:
            cure = did_you_mean(name, catalog.instance_types(), "see https://aws.amazon.com/sagemaker/ai/pricing/")
            yield Finding(key=key, found=f"{name}: SageMaker has no such instance type for training", cure=cure)
        elif found.local_storage_gb and compute.volume_gb != Compute.model_fields["volume_gb"].default:
            yield warning(
                key="compute.volume_gb",
                found=f"{name} has {found.local_storage_gb} GB of its own, which SageMaker takes instead",
                cure="remove volume_gb",
            )


def _groups(job: Job) -> Iterator[Finding]:
    compute = job.compute
    names = [group.name for group in compute.instance_groups]
    valid = ", ".join(names) or "no groups are given"
    if names and compute.instance_type is not None:
        yield Finding(
            key="compute.instance_type",
            found="stands beside instance_groups, which give the types",
            cure="remove instance_type and instance_count, or the groups",
        )
    if len(set(names)) < len(names):
        yield Finding(key="compute.instance_groups", found="two groups of one name", cure="rename one")
    for name in compute.training_groups:
        if name not in names:
            cure = did_you_mean(name, names)
            yield Finding(key="compute.training_groups", found=f"no group {name}", valid=valid, cure=cure)
    if names and job.distribution == "smddp" and len(compute.training_groups) != 1:
        yield Finding(
            key="compute.training_groups",
            found=f"{len(compute.training_groups)} groups for smddp",
            valid="exactly one",
            cure=f"write training_groups: [{names[0]}]",
        )
    if len(names) > 1 and job.distribution == "torchrun":
        yield Finding(
            key="distribution",
            found="torchrun over several instance groups: each group would train a model of its own, as the container's toolkit starts it",
            valid="one group; or smddp with training_groups",
            cure="write instance_type and instance_count, or one group",
        )
    if compute.training_groups and job.distribution != "smddp":
        yield Finding(
            key="compute.training_groups",
            found=f"ignored with distribution: {job.distribution}",
            cure="remove it, or write distribution: smddp",
        )
    given = {name: channel.instance_groups for name, channel in job.inputs.items()}
    some = [name for name, groups in given.items() if groups]
    for name, groups in given.items():
        for group in groups or ():
            if group not in names:
                cure = did_you_mean(group, names)
                yield Finding(key=f"inputs.{name}.instance_groups", found=f"no group {group}", valid=valid, cure=cure)
        if some and not groups:
            yield Finding(
                key=f"inputs.{name}",
                found=f"no instance_groups, and {some[0]} has them: SageMaker wants them on every channel or on none",
                cure=f"add instance_groups: [{', '.join(names)}]",
            )


def _time(job: Job) -> Iterator[Finding]:
    compute = job.compute
    if compute.max_wait_hours is not None and not compute.spot:
        yield Finding(key="compute.max_wait_hours", found="given without spot", cure="remove it, or write spot: true")
    elif compute.max_wait_hours is not None and compute.max_wait_hours < compute.max_hours:
        yield Finding(
            key="compute.max_wait_hours",
            found=f"{compute.max_wait_hours:g} h, less than max_hours ({compute.max_hours:g} h): waiting and training count together",
            valid=f"{compute.max_hours:g} or more",
            cure=f"write max_wait_hours: {min(2 * compute.max_hours, 28 * 24):g}",
        )
    if compute.keep_alive_minutes is not None and compute.spot:
        yield Finding(
            key="compute.keep_alive_minutes",
            found="a warm pool with spot, which SageMaker refuses",
            cure="remove keep_alive_minutes or spot",
        )
    if compute.max_hours > DEFAULT_MAX_HOURS:
        yield warning(
            key="compute.max_hours",
            found=f"{compute.max_hours:g} h: accounts start with a quota of {DEFAULT_MAX_HOURS} h a job",
            cure="ask AWS for a higher quota first, or write less",
        )


def _limits(job: Job) -> Iterator[Finding]:
    """Sizes that CreateTrainingJob's API page gives: its Channel, Tag, VpcConfig, MetricDefinition and Environment."""
    for key, values, most in (
        ("inputs", job.inputs, 20),
        ("tags", job.tags, 50),
        ("environment", job.environment, 100),
        ("metrics", job.metrics or {}, 40),
        ("network.subnets", job.network.subnets, 16),
        ("network.security_groups", job.network.security_groups, 5),
        ("compute.instance_groups", job.compute.instance_groups, 5),
        ("profiling.rules", job.profiling.rules if job.profiling else {}, 20),
    ):
        if len(values) > most:
            yield Finding(key=key, found=f"{len(values)} of them", valid=f"at most {most}", cure="remove some")
    for name, value in job.tags.items():
        if not re.fullmatch(r"[\w\s.:/=+\-@]{1,128}", name) or name.lower().startswith("aws:"):
            valid = "1 to 128 letters, digits, blanks and _ . : / = + - @, not beginning with aws:"
            yield Finding(key=f"tags.{name}", found="not a tag's name", valid=valid, cure="rename it")
        if not re.fullmatch(r"[\w\s.:/=+\-@]{0,256}", value):
            valid = "at most 256 letters, digits, blanks and _ . : / = + - @"
            yield Finding(key=f"tags.{name}", found=f"{value[:40]!r}", valid=valid, cure="write it with these")
    for name, regex in (job.metrics or {}).items():
        try:
            groups = re.compile(regex).groups
        except re.error as error:
            yield Finding(key=f"metrics.{name}", found=f"{regex!r}: {error}", cure="correct the regular expression")
            continue
        if groups != 1:
            cure = "put the number, and nothing else, into ( )"
            yield Finding(key=f"metrics.{name}", found=f"{groups} groups in {regex!r}", valid="exactly one", cure=cure)
        if len(regex) > 500 or not 0 < len(name) <= 255:
            valid = "a name of 255 and an expression of 500 characters at most"
            yield Finding(key=f"metrics.{name[:40]}", found="too long", valid=valid, cure="shorten it")
    for key, value in (
        ("network.subnets", job.network.subnets),
        ("network.security_groups", job.network.security_groups),
    ):
        prefix = "subnet-" if key.endswith("subnets") else "sg-"
        for name in value:
            if not re.fullmatch(rf"{prefix}[0-9a-f]{{8,32}}", name):
                yield Finding(key=key, found=name, valid=f"{prefix} and hexadecimal digits", cure="correct the id")


def _distribution(job: Job) -> Iterator[Finding]:
    kind = request.first_instance_type(job)
    machine = catalog.instance(kind)
    if job.custom_mpi_options is not None and job.distribution != "smddp":
        yield Finding(
            key="custom_mpi_options",
            found=f"ignored with distribution: {job.distribution}",
            cure="remove it, or write distribution: smddp",
        )
    if machine is None:
        return
    processes = job.compute.processes_per_host
    if job.distribution != "smddp":
        if machine.gpus and processes is not None and processes > machine.gpus:
            yield Finding(
                key="compute.processes_per_host",
                found=f"{processes} processes for the {machine.gpus} GPUs of {kind}",
                valid=f"at most {machine.gpus}",
                cure="write processes_per_host: null, which takes one a GPU",
            )
        return
    if processes not in (None, machine.gpus):
        yield Finding(
            key="compute.processes_per_host",
            found=f"{processes}; smddp takes one process a GPU",
            cure="remove processes_per_host",
        )
    supported = catalog.smddp_instance_types()
    if kind not in supported:
        yield Finding(
            key="distribution",
            found=f"smddp on {kind}: SageMaker's library does not run there",
            valid=", ".join(supported),
            cure="write distribution: torchrun (nccl uses EFA there), or change compute.instance_type",
        )
    version = _framework_version(job)
    versions = catalog.smddp_versions()
    if version is None:
        if job.image is not None:
            yield Finding(
                key="distribution",
                level="not checked",
                found="whether the image holds SageMaker's data parallel library",
                cure="import smdistributed.dataparallel in it, once",
            )
    elif version not in versions:
        yield Finding(
            key="distribution",
            found=f"smddp with PyTorch {version}: its image has no SageMaker data parallel library",
            valid=f"PyTorch {', '.join(versions)}",
            cure="write distribution: torchrun, or an image of one of these versions",
        )


def _precision(job: Job) -> Iterator[Finding]:
    machine = catalog.instance(request.first_instance_type(job))
    if machine is None or machine.gpu is None or catalog.gpu(machine.gpu).bf16:
        return
    for name, value in job.hyperparameters.items():
        if value in ("bf16", "bfloat16"):
            yield Finding(
                key=f"hyperparameters.{name}",
                found=f"{value} on {machine.gpu}, which has none in hardware",
                valid="bf16 from NVIDIA Ampere on: A100, A10G, L4, H100 …",
                cure=f"write {name}: fp16 or fp32, or take ml.p4d or ml.g5",
            )


def _workers(job: Job) -> Iterator[Finding]:
    machine = catalog.instance(request.first_instance_type(job))
    workers = job.hyperparameters.get("num_workers")
    if machine is None or machine.vcpus is None or not isinstance(workers, int) or isinstance(workers, bool):
        return
    processes = job.compute.processes_per_host or max(1, machine.gpus) if job.distribution != "none" else 1
    if workers * processes > machine.vcpus:
        yield warning(
            key="hyperparameters.num_workers",
            found=f"{workers} data workers for each of {processes} processes on {machine.vcpus} vCPUs",
            cure=f"write num_workers: {machine.vcpus // processes} or fewer: more of them only take time from each other",
        )


def _image(job: Job, kit_script: bool) -> Iterator[Finding]:
    if job.image is None or job.region is None:
        return
    kind = request.first_instance_type(job)
    machine = catalog.instance(kind)
    if job.image.uri is None:
        if machine is None:
            return
        try:
            request.image_uri(job)
        except catalog.UnknownImage as error:
            yield Finding(key="image", found=error.found, valid=error.valid, cure=error.cure)
            return
    about = catalog.image_facts(request.image_uri(job))
    if about is None:
        yield Finding(
            key="image",
            level="not checked",
            found=f"{job.image.uri}: not one of AWS's images",
            cure="it needs the container toolkit (sagemaker-training), PyTorch, and what the script imports",
        )
        return
    if about.region != job.region:
        yield Finding(
            key="image.uri",
            found=f"an image in {about.region} for a job in {job.region}; SageMaker pulls from its own region only",
            cure=f"write {job.region} in the address",
        )
    if machine is not None and about.device == "cpu" and machine.gpus:
        yield warning(
            key="image.uri", found=f"a CPU image on {kind}: its GPUs would stay idle", cure="take the -gpu- image"
        )
    if machine is not None and about.device == "gpu" and not machine.gpus:
        yield warning(key="image.uri", found=f"a GPU image on {kind}, which has no GPU", cure="take the -cpu- image")
    version = tuple(int(part) for part in about.framework_version.split(".")[:2])
    if kit_script and (version < (2, 0) or (about.python or "py310") in ("py36", "py37", "py38", "py39")):
        yield Finding(
            key="image",
            found=f"PyTorch {about.framework_version} with {about.python or 'an unknown Python'}",
            valid="PyTorch 2.0 or newer with Python 3.10 or newer, for this kit's scripts",
            cure='write image: {framework_version: "2.0.1", python: py310}, or a newer one',
        )


def _inputs(job: Job, kit_script: bool) -> Iterator[Finding]:
    for name, given in job.inputs.items():
        key = f"inputs.{name}"
        if given.mode == "Pipe" and kit_script:
            yield Finding(
                key=f"{key}.mode",
                found="Pipe: this kit's scripts read files",
                valid="File; FastFile",
                cure="write mode: FastFile",
            )
        if given.data_type == "AugmentedManifestFile" and (given.mode != "Pipe" or not given.attributes):
            yield Finding(
                key=f"{key}.data_type",
                found="AugmentedManifestFile without Pipe mode or without attributes",
                valid="mode: Pipe and attributes: [source-ref, …]",
                cure="add them",
            )
        if given.attributes and given.data_type != "AugmentedManifestFile":
            yield Finding(
                key=f"{key}.attributes",
                found="given without an augmented manifest",
                cure="write data_type: AugmentedManifestFile, or remove attributes",
            )
        if (given.fsx or given.efs) and not (job.network.subnets and job.network.security_groups):
            kind = "FSx for Lustre" if given.fsx else "EFS"
            yield Finding(
                key=key,
                found=f"{kind} without network.subnets and network.security_groups: the hosts could not reach it",
                cure="add network: {subnets: [the file system's subnet], security_groups: [one that it accepts]}",
            )


def _network(job: Job, requirements: bool) -> Iterator[Finding]:
    network = job.network
    if bool(network.subnets) != bool(network.security_groups):
        lacking = "security_groups" if network.subnets else "subnets"
        cure = f"add {lacking}"
        yield Finding(key="network", found=f"{lacking} missing: a VPC needs both", cure=cure)
    if network.isolation and requirements:
        yield Finding(
            key="network.isolation",
            found="requirements.txt travels, and an isolated container cannot install it",
            cure="take an image that holds the packages (image: {uri: …})",
        )
    elif network.subnets and requirements:
        yield warning(
            key="network.subnets",
            found="requirements.txt is installed at the start: the subnets need a way to PyPI",
            cure="a NAT gateway or a package mirror; or an image that holds the packages (image: {uri: …})",
        )
    if network.encrypt_traffic and job.distribution != "none" and job.compute.instance_count > 1:
        yield warning(
            key="network.encrypt_traffic",
            found="encryption between hosts slows distributed training, and EFA does not carry it",
            cure="remove it unless a rule of yours asks for it",
        )


def _spot_and_checkpoints(job: Job) -> Iterator[Finding]:
    compute = job.compute
    wait = request.max_wait_hours(compute)
    if compute.spot and job.checkpoints is None:
        if wait > HOURS_WITHOUT_CHECKPOINTS:
            yield Finding(
                key="compute.spot",
                found=f"spot without checkpoints, for up to {wait:g} h: every interruption would start from nothing",
                valid=f"with checkpoints, or max_wait_hours at most {HOURS_WITHOUT_CHECKPOINTS}",
                cure="add checkpoints: s3://your-bucket/prefix",
            )
        else:
            yield warning(
                key="compute.spot",
                found="spot without checkpoints: an interruption starts from nothing",
                cure="add checkpoints: s3://your-bucket/prefix",
            )
    path = job.checkpoints.path if job.checkpoints else None
    if path is not None and any(path == taken or path.startswith(f"{taken}/") for taken in TAKEN_FOLDERS):
        yield Finding(
            key="checkpoints.path",
            found=f"{path} has another use in the container",
            valid="another folder below /opt/ml",
            cure="remove path: /opt/ml/checkpoints is taken",
        )


def _profiling(job: Job) -> Iterator[Finding]:
    if job.profiling is None:
        return
    debugger, profiler = catalog.closed_service("debugger"), catalog.closed_service("profiler")
    yield warning(
        key="profiling",
        found=f"SageMaker Debugger, which samples system metrics, is closed to new customers since {debugger.date}",
        cure="if your account never used it, remove profiling:",
    )
    if job.profiling.profiler is not None:
        yield warning(
            key="profiling.profiler",
            found=f"SageMaker Profiler ends on {profiler.date}; its processing job ({request.PROFILER_INSTANCE_TYPE}) is paid besides",
            cure="remove profiler: when its report is no longer needed",
        )
    known = request.rule_defaults()
    for name, parameters in job.profiling.rules.items():
        if name not in known:
            yield Finding(
                key=f"profiling.rules.{name}",
                found="no such rule",
                valid=", ".join(known),
                cure=did_you_mean(name, known),
            )
            continue
        of_report = [f"{rule}_{parameter}" for rule, own in known.items() for parameter in own]
        valid = list(known[name]) if name != "ProfilerReport" else of_report
        for parameter in parameters:
            if parameter not in valid:
                cure = did_you_mean(parameter, valid)
                key = f"profiling.rules.{name}.{parameter}"
                yield Finding(key=key, found="no such parameter", valid=", ".join(valid[:12]), cure=cure)


def _debugger(job: Job, kit_script: bool) -> Iterator[Finding]:
    if job.debugger is None:
        return
    if job.checkpoints is not None and (job.distribution != "none" or job.checkpoints.path is not None):
        # https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-considerations.html
        yield Finding(
            key="debugger",
            found="Debugger's hook with checkpoints: not available in distributed training, nor with checkpoints.path",
            cure="remove debugger: or checkpoints:",
        )
    if kit_script and job.script == "train_kd.py":
        # https://github.com/awslabs/sagemaker-debugger/issues/401
        yield Finding(
            key="debugger",
            found="Debugger's hook with a frozen teacher: it fails on tensors that need no gradient",
            cure="remove debugger:",
        )
    yield warning(
        key="debugger",
        found=f"SageMaker Debugger is closed to new customers since {catalog.closed_services()['debugger'].date}",
        cure="remove debugger: unless your account used it before",
    )


def _framework_version(job: Job) -> str | None:
    """The image's PyTorch version; None where it cannot be told."""
    if job.image is None:
        return None
    if job.image.uri is None:
        return job.image.framework_version
    about = catalog.image_facts(job.image.uri)
    return about.framework_version if about is not None else None
