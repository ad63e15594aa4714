"""Offline validation of a job for SageMaker: what SageMaker refuses, ignores or fails on after the hosts have started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from functools import partial
from typing import Any

from launcher.aws import catalog, cluster, limits, prices, request
from launcher.aws.requirements import dali_packages
from launcher.config import placeholders
from launcher.config.issues import Issue, did_you_mean
from launcher.config.job import Job
from launcher.planner import groups
from launcher.record import records

warning = partial(Issue, level="warning")

HOURS_WITHOUT_CHECKPOINTS = 1
"""SageMaker's limit for its own algorithms on spot that do not checkpoint.
https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html"""

TAKEN_FOLDERS = ("/opt/ml/code", "/opt/ml/input", "/opt/ml/model", "/opt/ml/output")
"""Container folders that have another use."""


def check(job: Job, *, kit_script: bool, requirements: bool) -> list[Issue]:
    """Errors and warnings of a job for SageMaker. Offline.

    Args:
        kit_script: whether the script is one of this kit's.
        requirements: whether the source package holds a requirements.txt, which the container installs from the network.
    """
    issues = [*_missing(job), *cluster.check(job, kit_script=kit_script), *limits.check(job)]
    issues += [
        *_image(job, kit_script),
        *_preprocessing(job, kit_script),
        *_inputs(job, kit_script),
        *_network(job, requirements),
    ]
    issues += [*_spot_and_checkpoints(job, kit_script), *_profiling(job), *_debugger(job, kit_script)]
    issues += placeholders.warnings(job)
    return issues


def newest_image() -> str:
    """The image that messages recommend, in a config's form."""
    version, python = catalog.newest_image()
    return f'{{framework_version: "{version}", python: {python}}}'


def _missing(job: Job) -> Iterator[Issue]:
    fixes = {
        "role": "add role: arn:aws:iam::123456789012:role/SageMakerTraining, with your account and role",
        "region": "add region: us-west-2, or the region of your data",
        "output": "add output: s3://your-bucket/prefix",
        "image": f"add image: {newest_image()}, or image: {{uri: …}}",
    }
    for key, fix in fixes.items():
        if getattr(job, key) is None:
            yield Issue(key=key, found="missing; SageMaker requires it", fix=fix)
    if job.compute.instance_type is None and not job.compute.instance_groups:
        yield Issue(
            key="compute.instance_type",
            found="missing; SageMaker requires it",
            fix="add under compute: instance_type: ml.g5.xlarge, or what the job needs",
        )


def _old_gpu(job: Job) -> str | None:
    """A GPU of the job that today's images do not support, with its instance type: `V100 (ml.p3.2xlarge)`."""
    kinds = [job.compute.instance_type, *(group.instance_type for group in job.compute.instance_groups)]
    for kind in kinds:
        machine = catalog.instance(kind) if kind is not None else None
        if machine is not None and machine.gpu is not None and catalog.is_before_turing(machine.gpu):
            return f"{machine.gpu} ({kind})"
    return None


def _image(job: Job, kit_script: bool) -> Iterator[Issue]:
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
            yield Issue(key="image", found=error.found, valid=error.valid, fix=error.fix)
            return
    uri = request.image_uri(job)
    yield from _registry(uri, job.region)
    about = catalog.image_facts(uri)
    if about is None:
        yield Issue(
            key="image",
            level="not checked",
            found=f"{job.image.uri}: not one of AWS's images",
            fix="make sure that it holds the container toolkit (sagemaker-training), PyTorch and what the script imports",
        )
        return
    if about.region is None:
        yield warning(
            key="image.uri",
            found="an image in AWS's public gallery; AWS documents private ECR registries only",
            fix=f"use the same image from {job.region}'s registry, or image: {{framework_version: …, python: …}}",
        )
    if not about.for_sagemaker:
        yield Issue(
            key="image.uri",
            found="an image for EC2, which lacks SageMaker's container toolkit",
            fix="use the image whose tag ends in -sagemaker",
        )
    if machine is not None and about.device == "cpu" and machine.gpus:
        yield warning(
            key="image.uri", found=f"a CPU image on {kind}: its GPUs would stay idle", fix="use the -gpu- image"
        )
    if machine is not None and about.device == "gpu" and not machine.gpus:
        yield warning(key="image.uri", found=f"a GPU image on {kind}, which has no GPU", fix="use the -cpu- image")
    old = _old_gpu(job)
    last, python = catalog.last_image_before_turing()
    if old is not None and about.device == "gpu" and catalog.numbers(about.framework_version) > catalog.numbers(last):
        cuda = catalog.cuda_version(about.framework_version, about.cuda)
        yield Issue(
            key="image",
            level="error" if cuda >= 13 else "warning",
            found=f"PyTorch {about.framework_version} on {old}: "
            + (f"its CUDA {cuda} does not support that GPU" if cuda >= 13 else "its build may leave that GPU out"),
            fix=f'use a newer instance type; or write image: {{framework_version: "{last}", python: {python}}}, which gets no patches',
        )
    unpatched = _unpatched(about.framework_version)
    if unpatched is not None:
        newer = f"image: {newest_image()}"
        yield warning(
            key="image",
            found=f"AWS's image of PyTorch {about.framework_version} {unpatched}",
            fix=f"write {newer}, if the script allows it"
            if old is None
            else f"use an instance type with a newer GPU than {old}, and {newer}",
        )
    version = tuple(int(part) for part in about.framework_version.split(".")[:2])
    if kit_script and (version < (2, 0) or (about.python or "py310") in ("py36", "py37", "py38", "py39")):
        yield Issue(
            key="image",
            found=f"PyTorch {about.framework_version} with {about.python or 'an unknown Python'}",
            valid="PyTorch 2.0 or newer with Python 3.10 or newer, for this kit's scripts",
            fix='write image: {framework_version: "2.0.1", python: py310}, or a newer one',
        )


def _registry(uri: str, region: str) -> Iterator[Issue]:
    """Whether an image is in a registry from which SageMaker pulls for a job in a region."""
    its_region, address = catalog.registry_region(uri), catalog.uri_in_region(uri, region)
    if its_region is not None and its_region != region:
        if address is None:
            address = f"the image's address in a registry of yours in {region}, and copy the image there first"
        found = f"an image in {its_region} for a job in {region}; SageMaker pulls from its own region only"
        yield Issue(key="image.uri", found=found, fix=f"write {address}")
    elif address not in (None, uri):
        found = f"{uri.partition('/')[0]} is not AWS's registry in {region}: account and domain depend on the region"
        yield Issue(key="image.uri", found=found, fix=f"write {address}")


def _unpatched(framework_version: str) -> str | None:
    """What is known about security patches of AWS's image for a PyTorch version, if they have ended or seem to have."""
    last_day = catalog.end_of_patch(framework_version)
    if last_day is not None:
        return f"has had no security patches since {last_day}" if last_day < date.today() else None
    newer = catalog.next_end_of_patch(framework_version)
    if newer is None or newer[1] >= date.today():
        return None
    return f"has no known end of security patches; those of the newer {newer[0]} ended on {newer[1]}"


def _preprocessing(job: Job, kit_script: bool) -> Iterator[Issue]:
    if not kit_script or job.hyperparameters.get("preprocessing") != "dali" or job.image is None:
        return
    key, machine = "hyperparameters.preprocessing", catalog.instance(request.first_instance_type(job))
    about = catalog.image_facts(job.image.uri) if job.image.uri is not None else None
    if job.image.uri is not None and about is None:
        yield Issue(
            key=key,
            level="not checked",
            found="dali: whether the image holds NVIDIA's package",
            fix="pip install nvidia-dali-cuda120 in it, or nvidia-dali-cuda130 for CUDA 13",
        )
    elif dali_packages(job) is None:
        version = about.framework_version if about is not None else job.image.framework_version
        yield Issue(
            key=key,
            found=f"dali with PyTorch {version}, whose image has CUDA 11; DALI 1.50 was the last release for it",
            valid="dali with PyTorch 2.1 or newer; cpu",
            fix=f"write image: {newest_image()}, or preprocessing: cpu",
        )
    if machine is not None and not machine.gpus:
        yield warning(
            key=key,
            found=f"dali on {machine.name}, which has no GPU: it uses more CPU time than preprocessing: cpu",
            fix="write preprocessing: cpu, or use an instance type with a GPU",
        )


def _inputs(job: Job, kit_script: bool) -> Iterator[Issue]:
    for name, given in job.inputs.items():
        key = f"inputs.{name}"
        if given.mode == "Pipe" and kit_script:
            yield Issue(
                key=f"{key}.mode",
                found="Pipe: this kit's scripts read files",
                valid="File; FastFile",
                fix="write mode: FastFile",
            )
        if given.data_type == "AugmentedManifestFile" and (given.mode != "Pipe" or not given.attributes):
            yield Issue(
                key=f"{key}.data_type",
                found="AugmentedManifestFile without Pipe mode or without attributes",
                valid="mode: Pipe and attributes: [source-ref, …]",
                fix="add them",
            )
        for field, value in (("compression", given.compression), ("record_wrapper", given.record_wrapper)):
            if value not in (None, "None") and given.mode != "Pipe":
                # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
                yield Issue(
                    key=f"{key}.{field}",
                    found=f"{value} without Pipe mode: other modes neither unpack nor wrap",
                    valid="mode: Pipe",
                    fix=f"remove {field}, and read the objects as they are",
                )
        if given.attributes and given.data_type != "AugmentedManifestFile":
            yield Issue(
                key=f"{key}.attributes",
                found="given without an augmented manifest",
                fix="write data_type: AugmentedManifestFile, or remove attributes",
            )
        if (given.fsx or given.efs) and not (job.network.subnets or job.network.security_groups):
            kind = "FSx for Lustre" if given.fsx else "EFS"
            yield Issue(
                key=key,
                found=f"{kind} without network.subnets and network.security_groups: the hosts cannot reach it",
                fix="add network: {subnets: [the file system's subnet], security_groups: [a group that it accepts]}",
            )


def _network(job: Job, requirements: bool) -> Iterator[Issue]:
    network = job.network
    if bool(network.subnets) != bool(network.security_groups):
        lacking = "security_groups" if network.subnets else "subnets"
        fix = f"add {lacking}"
        yield Issue(key="network", found=f"{lacking} missing: a VPC needs both", fix=fix)
    if network.isolation and requirements:
        yield Issue(
            key="network.isolation",
            found="the source package holds requirements.txt, which an isolated container cannot install",
            fix="use an image that holds the packages (image: {uri: …})",
        )
    elif network.subnets and requirements:
        yield warning(
            key="network.subnets",
            found="the container installs requirements.txt, so the subnets need a route to PyPI",
            fix="add a NAT gateway or a package mirror, or use an image that holds the packages (image: {uri: …})",
        )
    hosts = sum(prices.instances(job).values())
    if network.encrypt_traffic and (job.distribution != "none" or groups.is_remote(job)) and hosts > 1:
        yield warning(
            key="network.encrypt_traffic",
            found="encryption between hosts slows distributed training, and EFA does not support it",
            fix="remove it unless a policy requires it",
        )


def _is_among_the_checkpoints(job: Job, bank: Mapping[str, Any]) -> bool:
    """Whether a run opens its label bank among its checkpoints: a new bank, or an earlier run's, unpacked there to be added to."""
    where = bank.get("where")
    given = job.inputs.get(where.removeprefix("channel:")) if isinstance(where, str) else None
    return where is None or (given is not None and given.run is not None and not bank.get("complete"))


def _spot_and_checkpoints(job: Job, kit_script: bool) -> Iterator[Issue]:
    compute = job.compute
    wait = request.max_wait_hours(compute)
    if compute.spot and job.checkpoints is None:
        long = wait > HOURS_WITHOUT_CHECKPOINTS
        yield Issue(
            key="compute.spot",
            # a user's own script may keep its state elsewhere
            level="error" if kit_script and long else "warning",
            found=f"spot without checkpoints, for up to {wait:g} h: every interruption would restart training",
            valid=f"with checkpoints, or max_wait_hours at most {HOURS_WITHOUT_CHECKPOINTS}",
            fix="add checkpoints: s3://your-bucket/prefix/checkpoints",
        )
    bank = job.hyperparameters.get("teacher_cache")
    if kit_script and isinstance(bank, dict) and job.checkpoints is None and _is_among_the_checkpoints(job, bank):
        yield Issue(
            key="hyperparameters.teacher_cache",
            found="the label bank lies among the checkpoints, and the job keeps none",
            fix="add checkpoints: s3://your-bucket/prefix/checkpoints, or set teacher_cache.where to channel:NAME, an input",
        )
    yield from _copied_as_checkpoints(job, kit_script)
    path = job.checkpoints.path if job.checkpoints and not kit_script else None
    if path is not None and any(path == taken or path.startswith(f"{taken}/") for taken in TAKEN_FOLDERS):
        yield Issue(
            key="checkpoints.path",
            found=f"{path} has another use in the container",
            valid="another folder below /opt/ml",
            fix=f"remove path; the default is {records.CHECKPOINTS}",
        )


def _copied_as_checkpoints(job: Job, kit_script: bool) -> Iterator[Issue]:
    """SageMaker copies everything below CheckpointConfig.S3Uri to each host before the script starts, and removes from S3 what the script
    removes there: https://docs.aws.amazon.com/sagemaker/latest/dg/model-checkpoints.html"""
    if job.checkpoints is None:
        return
    above = f"{job.checkpoints.s3.rstrip('/')}/"
    others = job.written_to | {f"inputs.{name}": given.s3 for name, given in job.inputs.items() if given.s3 is not None}
    inside = [key for key, uri in others.items() if f"{uri.rstrip('/')}/".startswith(above)]
    if inside:
        bucket = job.checkpoints.s3.removeprefix("s3://").partition("/")[0]
        places = (f"{above}checkpoints", f"s3://{bucket}/checkpoints-of-{job.name}")
        free = (one for one in places if not any(f"{uri}/".startswith(f"{one}/") for uri in others.values()))
        yield Issue(
            key="checkpoints",
            level="error" if kit_script else "warning",  # a user's script may start from what lies there
            found=f"{job.checkpoints.s3} holds {', '.join(inside)} too, which SageMaker would copy to every host as checkpoints",
            valid="a prefix that holds checkpoints alone",
            fix=f"write checkpoints: {next(free, 'another prefix')}",
        )


def _profiling(job: Job) -> Iterator[Issue]:
    if job.profiling is None:
        return
    debugger, profiler = catalog.closed_service("debugger"), catalog.closed_service("profiler")
    yield warning(
        key="profiling",
        found=f"SageMaker Debugger, which samples system metrics, has been closed to new customers since {debugger.date}",
        fix="remove profiling: unless your account used it before",
    )
    if job.profiling.profiler is not None:
        yield warning(
            key="profiling.profiler",
            found=f"SageMaker Profiler ends on {profiler.date}; its processing job ({request.PROFILER_INSTANCE_TYPE}) costs extra",
            fix="remove profiler: unless you need its report",
        )
    yield from _rule_images(job)
    known = request.rule_defaults()
    for name, parameters in job.profiling.rules.items():
        if name not in known:
            yield Issue(
                key=f"profiling.rules.{name}",
                found="no such rule",
                valid=", ".join(known),
                fix=did_you_mean(name, known),
            )
            continue
        of_report = [f"{rule}_{parameter}" for rule, own in known.items() for parameter in own]
        valid = list(known[name]) if name != "ProfilerReport" else of_report
        for parameter in parameters:
            if parameter not in valid:
                fix = did_you_mean(parameter, valid)
                key = f"profiling.rules.{name}.{parameter}"
                yield Issue(key=key, found="no such parameter", valid=", ".join(valid[:12]), fix=fix)


def _rule_images(job: Job) -> Iterator[Issue]:
    """Whether the job's region has the images of profiling."""
    if job.profiling is None or job.region is None:
        return
    for key, wanted, image in (
        ("profiling.profiler", job.profiling.profiler is not None, catalog.profiler_image),
        ("profiling.rules", bool(job.profiling.rules), catalog.rules_image),
    ):
        if wanted:
            try:
                image(job.region)
            except catalog.UnknownImage as error:
                yield Issue(key=key, found=error.found, valid=error.valid, fix=error.fix)


def _debugger(job: Job, kit_script: bool) -> Iterator[Issue]:
    if job.debugger is None:
        return
    if job.checkpoints is not None and (job.distribution != "none" or job.checkpoints.path is not None):
        # https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-considerations.html
        yield Issue(
            key="debugger",
            found="Debugger's hook with checkpoints: not available in distributed training, nor with checkpoints.path",
            fix="remove debugger: or checkpoints:",
        )
    if kit_script and job.script == "train_kd.py":
        # https://github.com/awslabs/sagemaker-debugger/issues/401
        yield Issue(
            key="debugger",
            found="Debugger's hook with a frozen teacher: it fails on tensors without a gradient",
            fix="remove debugger:",
        )
    yield warning(
        key="debugger",
        found=f"SageMaker Debugger has been closed to new customers since {catalog.closed_service('debugger').date}",
        fix="remove debugger: unless your account used it before",
    )
