"""The `docker` backend: SageMaker's local mode by the SDK, one container a host, with Docker Compose. No AWS, no credentials."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

from launcher.aws import estimator, requirements
from launcher.aws import request as requests
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
from launcher.config.sections import Image, Input, Network
from launcher.planner.plan import HostPlan, Plan
from launcher.planner.source_package import SourceFile
from launcher.record import records

IMAGE = "vision-launcher-local"
"""The image for local mode, which `make image` builds (docker/README.md)."""

BUILD_IMAGE = "make image, in this kit's folder"

PORT = 7777
"""The toolkit's own rendezvous port: every run has a network of its own."""

REGION = "us-east-1"
"""For a job that names none: the SDK needs one, and nothing is asked there."""

ROLE = "arn:aws:iam::000000000000:role/local-mode"
"""For a job that names none: the SDK needs one, and nothing is asked about it."""


class Docker(Backend):
    """Each host as a container on this machine, in a network of the run's own."""

    name = "docker"
    DIFFERENCES = {
        "SM_CURRENT_INSTANCE_TYPE": "local: no instance of SageMaker's; SM_RESOURCE_CONFIG and SM_INSTANCE_GROUPS_DICT say so too",
        "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
        "OMP_NUM_THREADS": "this machine's cores shared among the processes of all hosts",
        "GOMP_SPINCOUNT": "short, because a machine that is yours has other work too",
        "AWS_DEFAULT_REGION": "not set; AWS_REGION is, and credentials are not there",
        "TRAINING_JOB_ARN": "not set: SageMaker knows of no job",
        "SM_MODULE_DIR": "the folder of the code, which on SageMaker is the address of its archive in S3",
        "PET_MASTER_PORT": "7777, from this kit's image, so that MASTER_PORT is 7777 with one host too",
        "user": "you, not root, so that the run's files are yours; HOME is /tmp then",
        "image": f"image.uri, where that is no address in AWS's registry, else {IMAGE}",
        "distribution": "smddp runs as torchrun, with gloo or nccl: the library exists on SageMaker only",
        "network": "a bridge between containers: no EFA, no VPC; with network.isolation no way out",
        "inputs": "shown in place, read only: not copied, sharded or streamed; a link that leads out of its folder is broken",
        "checkpoints": "stay in the run's folder: nothing is copied to S3 or back",
        "aside": "spot, warm pool, disk size, KMS, tags, metrics, Debugger and Profiler exist on SageMaker only",
    }

    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """What can be told without asking the engine."""
        issues = []
        if shutil.which("docker") is None:
            issues.append(
                Issue(key=docker_engine.KEY, found="no docker command on this machine", fix=docker_engine.INSTALL)
            )
        sdk = estimator.sdk_version()
        if sdk is None or not sdk.startswith("2.") or importlib.util.find_spec("boto3") is None:
            issues.append(
                Issue(
                    key=docker_engine.KEY,
                    found=f"sagemaker {sdk} is installed" if sdk else "not installed: sagemaker",
                    valid="SageMaker Python SDK v2, which has local mode",
                    fix="make, or pip install -e '.[sagemaker]', in this kit's folder",
                )
            )
        gpus = 0 if image(job) == IMAGE else local_hosts.gpu_count()
        issues += local_jobs.check_cluster(job, processes_per_host(job), gpus)
        issues += local_jobs.check_inputs(job)
        if job.distribution == "smddp":
            issues.append(local_jobs.smddp_is_torchrun())
        given = job.image.uri if job.image is not None else None
        if given is not None and given != image(job):
            issues.append(
                Issue(
                    key="image.uri",
                    level="warning",
                    found=f"{given} is in a registry of AWS; here the job runs in {image(job)}",
                    fix=f"nothing to do; or to run in that one: docker pull it, docker tag {given} aws:local, and image.uri=aws:local",
                )
            )
        if local_jobs.wants_dali(job) and image(job) == IMAGE:
            issues.append(
                Issue(
                    key="hyperparameters.preprocessing",
                    found=f"dali in {IMAGE}, which does not hold NVIDIA's package",
                    valid="cpu, cpu_reference; dali in an image that holds it",
                    fix="write preprocessing: cpu, run it --on process, or name an image of your own with nvidia-dali-cuda130 in it",
                )
            )
        sharded = [name for name, item in job.inputs.items() if item.sharded]
        if sharded:
            found = f"{', '.join(sharded)}: every host sees all of it here"
            issues.append(Issue(key="inputs", level="warning", found=found, fix="nothing to do if this is a trial"))
        return issues

    def check_online(self, plan: Plan) -> list[Issue]:
        """What the engine says: whether it answers, has Compose, the image, and room. It is only asked."""
        engine, issues = docker_engine.look()
        if engine is None:
            return issues
        wanted = image(plan.job)
        if docker_engine.find_image(wanted) is None:
            fix = BUILD_IMAGE if wanted == IMAGE else f"docker pull {wanted}; or leave image out, for this kit's own"
            issues.append(Issue(key="image", found=f"{wanted} is not on this machine", fix=fix))
        if gpu_count(plan.job) and not engine.nvidia:
            issues.append(
                Issue(
                    key=docker_engine.KEY,
                    level="warning",
                    found="the engine knows no runtime nvidia, so it may refuse to hand GPUs to containers",
                    fix="install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure; or CUDA_VISIBLE_DEVICES= for the CPU",
                )
            )
        return issues + docker_engine.check_disk(engine, records.store())

    def about(self, job: Job, request: dict[str, Any] | None) -> dict[str, str]:
        """What the plan shows beside the hosts."""
        why = "compute.shm_gb" if job.compute.shm_gb else "half of this machine's memory, shared among the hosts"
        return {
            "image": f"{image(job)} (--check asks the engine whether it is there)",
            "/dev/shm": f"{shm_mb(job) / 1024:.1f} GB a host ({why})",
        }

    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """The files of the source folder, and a requirements.txt where an image of AWS's lacks what the script imports."""
        return requirements.complete(local_job(job), files)

    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host of a job: its name on the run's network, the command that the toolkit will build, and what it is given."""
        count, processes = job.compute.instance_count, processes_per_host(job)
        planned = []
        for index in range(count):
            name = f"algo-{index + 1}"
            command = local_jobs.launch_command(job, index, processes, python="python", leader="algo-1", port=str(PORT))
            given = local_jobs.toolkit_environment(local_hosts.share(index, count, processes))
            given.pop("CUDA_VISIBLE_DEVICES", None)  # a container sees its own GPUs only
            planned.append(HostPlan(name, name, command, {**given, **job.environment}))
        return tuple(planned)

    def world_size(self, job: Job) -> int:
        """Training processes on all hosts."""
        return job.compute.instance_count * processes_per_host(job)

    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        """What SageMaker's SDK adds to the hyperparameters for its toolkit, in local mode."""
        return requests.toolkit_hyperparameters(local_job(job), run_name) | {"sagemaker_submit_directory": compose.CODE}

    def machine(self, job: Job) -> str:
        named = job.image.model_dump_json(exclude_none=True) if job.image is not None else "no image"
        return f"{local_hosts.hardware()}, {named}"

    def start(self, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
        """Write the hosts' /opt/ml folders and the Compose file, and start the supervisor that stays with the run."""
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
            for place, target in compose.channel_mounts(plan):  # a mount point that the engine makes would be root's
                point = base / Path(target).relative_to("/opt/ml")
                if place.is_dir():
                    point.mkdir()
                else:
                    point.parent.mkdir()
                    point.touch()
            if plan.job.checkpoints is not None and plan.job.checkpoints.path is not None:
                (base / Path(plan.job.checkpoints.path).relative_to("/opt/ml")).mkdir(parents=True, exist_ok=True)
        user = "0:0" if engine.rootless else f"{os.getuid()}:{os.getgid()}"
        text = compose.text(plan, folder.path, wanted, user, shm_mb(plan.job), gpus(plan.job))
        records.write_atomically(folder.path / compose.FILE, text)
        records.write_json(engine_file(folder), {**engine.to_dict(), "image": wanted, "image_id": found["Id"]})
        supervision.start_supervisor("launcher.backends.docker_supervisor", plan, folder, lock, lifeline)


def processes_per_host(job: Job) -> int:
    """As the job says; else one a GPU of the host's share; else 1."""
    if job.compute.processes_per_host is not None or job.distribution == "none":
        return job.compute.processes_per_host or 1
    return max(1, gpu_count(job) // job.compute.instance_count)


def local_job(job: Job) -> Job:
    """The job as the SDK's local mode takes it: without what exists on SageMaker only, which it would refuse."""
    compute = job.compute.model_copy(
        update={
            "instance_type": "local_gpu" if gpu_count(job) else "local",
            "instance_groups": [],
            "training_groups": [],
            "spot": False,
            "max_wait_hours": None,
            "keep_alive_minutes": None,
            "max_attempts": None,
            "training_plan": None,
            "volume_key": None,
        }
    )
    if (
        gpu_count(job) and compute.instance_count > 1
    ):  # the SDK refuses local_gpu there; the Compose file shares the GPUs out
        compute = compute.model_copy(update={"instance_type": "local"})
    return job.model_copy(
        update={
            "compute": compute,
            "distribution": "none" if job.distribution == "none" else "torchrun",
            "custom_mpi_options": None,
            "image": Image(uri=image(job)),
            "region": job.region or REGION,
            "role": job.role or ROLE,
            "inputs": {name: Input(folder="here") for name in job.inputs},
            "output": None,
            "output_key": None,
            "code": None,
            "compress_output": True,
            "checkpoints": None,
            "network": Network(),
            "profiling": None,
            "debugger": None,
            "tags": {},
        }
    )


def image(job: Job) -> str:
    """The image that the job names, unless it lies in AWS's registry; else this kit's own."""
    given = job.image.uri if job.image is not None else None
    in_aws = given is not None and re.match(r"\d{12}\.dkr\.ecr[.-]", given)
    return given if given is not None and not in_aws else IMAGE


def gpu_count(job: Job) -> int:
    """GPUs of this machine that the hosts share: none where they are fewer than the processes, and none for this kit's CPU image."""
    if image(job) == IMAGE:
        return 0
    needed = job.compute.instance_count * (job.compute.processes_per_host or 1)
    return local_hosts.gpu_count() if local_hosts.gpu_count() >= needed else 0


def shm_mb(job: Job) -> int:
    """Size of each host's /dev/shm, MiB: as the job says, else half of this machine's memory shared among the hosts.

    It is a limit; what is not used takes no memory. Docker's own 64 MB breaks data loaders with workers.
    """
    if job.compute.shm_gb is not None:
        return max(64, round(job.compute.shm_gb * 1024))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(64, memory // 2**20 // 2 // job.compute.instance_count)


def engine_file(folder: records.RunFolder) -> Path:
    """Which engine, Compose and image the run had."""
    return folder.path / "docker.json"


def gpus(job: Job) -> tuple[tuple[str, ...], ...]:
    """Each host's GPUs; () where no host gets any."""
    if not gpu_count(job):
        return ()
    share = gpu_count(job) // job.compute.instance_count
    all_gpus = local_hosts.gpus()
    return tuple(all_gpus[index * share : (index + 1) * share] for index in range(job.compute.instance_count))


def sweep() -> None:
    """Remove what is left of runs whose supervisor and whose janitor were both killed."""
    for run, folder in docker_containers.runs().items():
        if folder.is_dir() and not records.RunFolder(folder).supervisor_lives():
            docker_containers.remove(run)


def explain(output: str) -> str:
    """What Compose said, as a failure with its fix where it is a known one."""
    known = {
        "bind source path does not exist": "the engine does not see this machine's folders (does it run outside of this container?): "
        "share the run store at the same path, or set LAUNCHER_RUNS to a folder that both see",
        "mounts denied": "add the folder of the run store to Docker Desktop's file sharing",
        "address pool": "docker network prune frees networks that nothing uses",
        "address space": "docker network prune frees networks that nothing uses",
        "no space left on device": "docker system prune frees what nothing uses",
    }
    last = " ".join(output.strip().splitlines()[-3:])
    fix = next((fix for sign, fix in known.items() if sign in output), "")
    return f"Compose could not make the containers: {last}" + (f"; {fix}" if fix else "")
