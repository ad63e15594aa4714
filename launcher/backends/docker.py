"""The `docker` backend: SageMaker's local mode with Docker Compose, one container per host. No AWS, no credentials, no SDK.

The containers get what the local mode of SageMaker's SDK v2 gives them (sagemaker/local/image.py of 2.257.7; a test runs both). The
SDK's own class shares one network and folder among all runs, keeps containers, writes files as root, limits /dev/shm to 64 MB and shares
one model folder among hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from launcher.aws import request as requests
from launcher.aws import requirements
from launcher.backends import (
    compose,
    docker_containers,
    docker_engine,
    host_folders,
    local_hosts,
    local_jobs,
    supervision,
)
from launcher.backends.base import Backend
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job
from launcher.config.sections import Image
from launcher.planner import groups
from launcher.planner.plan import HostPlan, Plan
from launcher.planner.source_package import SourceFile
from launcher.record import records

IMAGE = "vision-launcher-local"
"""The image of local mode, built by `make image` (docker/README.md)."""

BUILD_IMAGE = "run make image in this kit's folder"

PORT = 7777
"""The toolkit's rendezvous port. Each run has its own network, so the port is free."""

REGION = "us-east-1"
"""The region that the toolkit gets for a job without one. No service there is called."""

SPARED_MEMORY = 0.1
"""Fraction of this machine's memory that containers may not use."""

MIN_PROCESSES, PROCESSES_PER_CORE = 4096, 256
"""A container's limit of processes and threads: far more than data loaders and math on every core start; it ends a fork bomb."""


class Docker(Backend):
    """Each host as a container on this machine, in the run's own network."""

    name = "docker"
    DIFFERENCES = {
        "SM_CURRENT_INSTANCE_TYPE": "local, also in SM_RESOURCE_CONFIG and SM_INSTANCE_GROUPS_DICT: no SageMaker instance",
        "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
        "OMP_NUM_THREADS": "all processes share this machine's cores",
        "GOMP_SPINCOUNT": "short: other work shares this machine",
        "AWS_DEFAULT_REGION": "not set; AWS_REGION is set, without credentials",
        "AWS_CONFIG_FILE": "empty: a job does not use your settings and credentials, unless `environment` sets it",
        "AWS_SHARED_CREDENTIALS_FILE": "empty, for the same reason",
        "BOTO_CONFIG": "empty, for the same reason",
        "AWS_EC2_METADATA_DISABLED": "true: a job does not use this machine's role",
        "TRAINING_JOB_ARN": "not set: there is no SageMaker job",
        "SM_MODULE_DIR": "the code's folder; on SageMaker, the archive's address in S3",
        "PET_MASTER_PORT": "7777, set by this kit's image: MASTER_PORT is then 7777 with one host too",
        "user": "you instead of root, so that you own the run's files; HOME is /tmp",
        "rights": "no capability and none to gain (no-new-privileges); memory and number of processes are limited",
        "image": f"image.uri unless it is in AWS's registry, else {IMAGE}",
        "distribution": "smddp runs as torchrun with gloo or nccl: its library exists on SageMaker only",
        "network": "a bridge between containers: no EFA, no VPC; with network.isolation, no outside network",
        "inputs": "mounted read-only: not copied, sharded or streamed; links out of the folder are broken",
        "checkpoints": "stay in the run's folder, without a copy in S3",
        "SageMaker only": "spot, warm pool, disk size, KMS, tags, metrics, Debugger and Profiler",
    }

    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """Issues that are found without asking the engine."""
        issues = []
        if shutil.which("docker") is None:
            issues.append(
                Issue(key=docker_engine.KEY, found="no docker command on this machine", fix=docker_engine.INSTALL)
            )
        issues += local_jobs.check_cluster(job, processes_per_host(job), gpus_here(job))
        issues += local_jobs.check_inputs(job)
        issues += local_jobs.check_disk(job, files)
        issues += local_jobs.check_secrets(job)
        if job.distribution == "smddp":
            issues.append(local_jobs.smddp_is_torchrun())
        given = job.image.uri if job.image is not None else None
        if given is not None and given != image(job):
            issues.append(
                Issue(
                    key="image.uri",
                    level="warning",
                    found=f"{given} is in AWS's registry; here the job runs in {image(job)}",
                    fix=f"no change needed; to use it: docker pull {given}, docker tag {given} aws:local, and write image.uri=aws:local",
                )
            )
        if local_jobs.wants_dali(job) and image(job) == IMAGE:
            issues.append(
                Issue(
                    key="hyperparameters.preprocessing",
                    found=f"dali in {IMAGE}, which lacks NVIDIA's package",
                    valid="cpu, cpu_reference; dali in an image with the package",
                    fix="write preprocessing: cpu, use --on process, or use your own image with nvidia-dali-cuda130",
                )
            )
        sharded = [name for name, item in job.inputs.items() if item.sharded]
        if sharded:
            found = f"{', '.join(sharded)}: here every host reads the whole channel"
            issues.append(Issue(key="inputs", level="warning", found=found, fix="no change needed for a trial run"))
        return issues

    def check_online(self, plan: Plan) -> list[Issue]:
        """Issues of the engine, Compose, the image and disk space. Read-only."""
        engine, issues = docker_engine.look()
        if engine is None:
            return issues
        wanted = image(plan.job)
        if docker_engine.find_image(wanted) is None:
            fix = BUILD_IMAGE if wanted == IMAGE else f"docker pull {wanted}, or remove image to use this kit's own"
            issues.append(Issue(key="image", found=f"{wanted} is not on this machine", fix=fix))
        if gpu_count(plan.job) and not engine.nvidia:
            issues.append(
                Issue(
                    key=docker_engine.KEY,
                    level="warning",
                    found="the engine has no nvidia runtime, so containers may get no GPU",
                    fix="install nvidia-container-toolkit and run sudo nvidia-ctk runtime configure; or set CUDA_VISIBLE_DEVICES=",
                )
            )
        return issues + docker_engine.check_disk(engine, records.store())

    def about(self, job: Job, request: dict[str, Any] | None) -> dict[str, str]:
        """The plan's lines about image, memory and /dev/shm."""
        given, compute = limits(job), job.compute
        shm = "compute.shm_gb" if compute.shm_gb else "half of this machine's memory, shared among the hosts"
        memory = "compute.memory_gb" if compute.memory_gb else "nine tenths of this machine's, shared among the hosts"
        return {
            "image": f"{image(job)} (--check looks for it on this machine)",
            "memory": f"at most {given.memory_mb / 1024:.1f} GB a host ({memory})",
            "/dev/shm": f"{given.shm_mb / 1024:.1f} GB a host ({shm})",
        }

    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """The source files, with a requirements.txt for what one of AWS's images lacks."""
        return requirements.complete(local_job(job), files)

    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host: its name in the run's network, the toolkit's command, and its environment."""
        processes, places = processes_per_host(job), groups.places(job)
        planned = []
        for place in places:
            command = local_jobs.launch_command(
                job, place.rank, processes, python="python", leader=places[0].name, port=str(PORT)
            )
            given = local_jobs.toolkit_environment(local_jobs.share(job, place.rank, processes))
            given.pop("CUDA_VISIBLE_DEVICES", None)  # a container has its own GPUs only
            planned.append(HostPlan(place.name, place.name, command, {**given, **job.environment}, place.group))
        return tuple(planned)

    def world_size(self, job: Job) -> int:
        """Training processes on all hosts."""
        return local_jobs.world_size(job, processes_per_host(job))

    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        """The hyperparameters that SageMaker's SDK adds for the container toolkit in local mode."""
        return requests.toolkit_hyperparameters(local_job(job), run_name) | {"sagemaker_submit_directory": compose.CODE}

    def gpus_here(self, job: Job) -> int:
        return gpus_here(job)

    def machine(self, job: Job) -> str:
        engine, _ = docker_engine.look()
        found = docker_engine.find_image(image(job)) if engine is not None else None
        named = f"{image(job)} {found['Id'][:19] if found else 'not on this machine'}"
        return ", ".join(filter(None, [local_hosts.hardware(), named, local_hosts.shown_gpus()]))

    def start(self, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
        """Write the hosts' /opt/ml folders and the Compose file, and start the supervisor."""
        engine, issues = docker_engine.look()
        wanted = image(plan.job)
        found = docker_engine.find_image(wanted) if engine is not None else None
        if engine is None or found is None:
            issues = issues or [Issue(key="image", found=f"{wanted} is not on this machine", fix=BUILD_IMAGE)]
            records.write_json(folder.outcome, {"state": records.FAILED, "failure": f"not started: {issues[0]}"})
            raise UserError(issues)
        sweep()
        for host in plan.hosts:
            host_folders.lay_out(plan, host, folder, interface="eth0")
            base = folder.host(host.name)
            for place, target in compose.channel_mounts(plan, host):
                # root would own mount points that the engine makes
                point = base / Path(target).relative_to("/opt/ml")
                if place.is_dir():
                    point.mkdir()
                else:
                    point.parent.mkdir()
                    point.touch()
            if plan.job.checkpoints is not None and plan.job.checkpoints.path is not None:
                (base / Path(plan.job.checkpoints.path).relative_to("/opt/ml")).mkdir(parents=True, exist_ok=True)
        user = "0:0" if engine.rootless else f"{os.getuid()}:{os.getgid()}"
        text = compose.text(plan, folder.path, wanted, user, limits(plan.job), gpus(plan.job))
        records.write_atomically(folder.path / compose.FILE, text)
        records.write_json(engine_file(folder), {**engine.to_dict(), "image": wanted, "image_id": found["Id"]})
        supervision.start_supervisor("launcher.backends.docker_supervisor", plan, folder, lock, lifeline)


def processes_per_host(job: Job) -> int:
    """Training processes per host: the job's number, else one per GPU of the host, else 1."""
    if job.compute.processes_per_host is not None or job.distribution == "none":
        return job.compute.processes_per_host or 1
    return max(1, gpu_count(job) // groups.training_host_count(job))


def local_job(job: Job) -> Job:
    """The job as local mode's containers get it: local image and instance type, no groups, and torchrun instead of smddp."""
    gpus = gpu_count(job) and groups.host_count(job) == 1  # the SDK refuses local_gpu for several hosts
    compute = job.compute.model_copy(
        update={
            "instance_type": "local_gpu" if gpus else "local",
            "instance_groups": [],  # the SDK's local mode has none: the hosts' resourceconfig.json names them
        }
    )
    return job.model_copy(
        update={
            "compute": compute,
            "distribution": "none" if job.distribution == "none" else "torchrun",
            "image": Image(uri=image(job)),
            "region": job.region or REGION,
        }
    )


def image(job: Job) -> str:
    """The job's image unless it is in AWS's registry, else this kit's own."""
    given = job.image.uri if job.image is not None else None
    in_aws = given is not None and re.match(r"\d{12}\.dkr\.ecr[.-]", given)
    return given if given is not None and not in_aws else IMAGE


def gpu_count(job: Job) -> int:
    """GPUs that the hosts share; 0 if there are fewer GPUs than processes, or for this kit's CPU image."""
    there = gpus_here(job)
    return there if there >= groups.training_host_count(job) * (job.compute.processes_per_host or 1) else 0


def gpus_here(job: Job) -> int:
    """This machine's GPUs; 0 for this kit's CPU image, which could not use them."""
    return 0 if image(job) == IMAGE else local_hosts.gpu_count()


def limits(job: Job) -> compose.Limits:
    """Resource limits of each host's container.

    Unless the job sets them, hosts split all memory but SPARED_MEMORY, and half of this machine's memory as /dev/shm: unused space there
    takes no memory, and Docker's default of 64 MB breaks data loaders with workers.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    hosts, compute = groups.host_count(job), job.compute
    return compose.Limits(
        memory_mb=_mb(compute.memory_gb) or max(64, round(memory * (1 - SPARED_MEMORY)) // hosts),
        shm_mb=_mb(compute.shm_gb) or max(64, memory // 2 // hosts),
        processes=max(MIN_PROCESSES, PROCESSES_PER_CORE * local_hosts.core_count()),
    )


def _mb(gb: float | None) -> int | None:
    return None if gb is None else max(64, round(gb * 1024))


def engine_file(folder: records.RunFolder) -> Path:
    """The file with the run's engine, Compose and image."""
    return folder.path / "docker.json"


def gpus(job: Job) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each host that trains; (): none."""
    if not gpu_count(job):
        return ()
    hosts = groups.training_host_count(job)
    share = gpu_count(job) // hosts
    all_gpus = local_hosts.gpus()
    return tuple(all_gpus[rank * share : (rank + 1) * share] for rank in range(hosts))


def sweep() -> None:
    """Remove the containers and networks of the user's runs whose supervisor and janitor were both killed."""
    for run, folder in docker_containers.runs().items():
        with contextlib.suppress(OSError):  # the engine also has other users' runs, in folders closed to us
            if os.stat(folder).st_uid == os.getuid() and not records.RunFolder(folder).supervisor_lives():
                docker_containers.remove(run)


def explain(output: str) -> str:
    """A failure from Compose's output, with its fix if known."""
    known = {
        "bind source path does not exist": "the engine does not see this machine's folders (does it run outside this container?): "
        "share the run store at the same path, or set LAUNCHER_RUNS to a folder that both see",
        "mounts denied": "add the folder of the run store to Docker Desktop's file sharing",
        "address pool": "docker network prune removes unused networks",
        "address space": "docker network prune removes unused networks",
        "no space left on device": "docker system prune removes unused data",
    }
    last = " ".join(output.strip().splitlines()[-3:])
    fix = next((fix for sign, fix in known.items() if sign in output), "")
    return f"Compose could not make the containers: {last}" + (f"; {fix}" if fix else "")
