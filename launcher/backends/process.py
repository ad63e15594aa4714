"""The `process` backend: AWS's container toolkit, one process tree per host, on loopback addresses. No Docker, no AWS, no network."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.aws import request as requests
from launcher.backends import host_folders, local_hosts, local_jobs, opt_ml, supervision
from launcher.backends.base import Backend
from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.planner import groups
from launcher.planner.plan import HostPlan, Plan
from launcher.planner.source_package import SourceFile
from launcher.record import disk, records

REQUIREMENTS = "requirements.txt"
"""Left out of a host's code: the toolkit would install these packages into the user's own environment."""

NEEDED = {
    "sagemaker_training": "sagemaker-training",
    "sagemaker_pytorch_container": "sagemaker-pytorch-training",
    "torch": "torch",
    "psutil": "psutil",
}
"""Module -> package that this backend needs in the launcher's environment."""

COMPUTING_PACKAGES = ("torch", "timm", "numpy", "pillow", "simplejpeg", "opencv-python-headless")
"""Packages whose versions determine a run's speed."""


class Process(Backend):
    """Each host as a process tree on this machine, with its own loopback address."""

    name = "process"
    DIFFERENCES = {
        "SM_HOSTS": "127.0.0.1, 127.0.0.2 … instead of algo-1, algo-2 …, wherever a host is named",
        "SM_CURRENT_INSTANCE_TYPE": "local, also in SM_RESOURCE_CONFIG and SM_INSTANCE_GROUPS_DICT: no SageMaker instance",
        "SM_NETWORK_INTERFACE_NAME": "lo: the hosts are on one machine",
        "NCCL_SOCKET_IFNAME": "lo, for the same reason",
        "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
        "MASTER_PORT": "a free port: other runs share this machine",
        "PET_MASTER_PORT": "torchrun's name for MASTER_PORT",
        "TRAINING_SERVERS_PORT": "a free port where the job has several instance groups, for the same reason",
        "OMP_NUM_THREADS": "all processes share this machine's cores",
        "GOMP_SPINCOUNT": "short: other work shares this machine",
        "SAGEMAKER_REGION": "not set: there is no region",
        "AWS_REGION": "not set: there is neither a region nor credentials",
        "AWS_DEFAULT_REGION": "not set, for the same reason",
        "AWS_CONFIG_FILE": "empty: a job does not use your settings and credentials, unless `environment` sets it",
        "AWS_SHARED_CREDENTIALS_FILE": "empty, for the same reason",
        "BOTO_CONFIG": "empty, for the same reason",
        "AWS_EC2_METADATA_DISABLED": "true: a job does not use this machine's role",
        "TRAINING_JOB_ARN": "not set: there is no SageMaker job",
        "SM_MODULE_DIR": "the code's folder; on SageMaker, the archive's address in S3",
        "SAGEMAKER_BASE_DIR": "hosts/<host>/opt/ml in the run's folder; a script that names /opt/ml sees it there, on Linux",
        "packages": "those of your environment; requirements.txt is not installed",
        "distribution": "smddp runs as torchrun with gloo or nccl: its library exists on SageMaker only",
        "inputs": "linked: not copied, sharded or streamed",
        "checkpoints": "stay in the run's folder, without a copy in S3",
        "SageMaker only": "spot, warm pool, disk size, network, KMS, tags, metrics, Debugger and Profiler",
    }

    PACKAGES = (
        f"install the package that provides {{module}} with {sys.executable} -m pip install: this backend uses your environment and "
        f"installs no {REQUIREMENTS}"
    )

    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """Issues of running a job as processes of this machine."""
        missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
        issues = []
        if missing:
            issues.append(
                Issue(
                    key="--on process",
                    found=f"not installed: {', '.join(missing)}",
                    fix="make, or pip install -e '.[local]', in this kit's folder",
                )
            )
        if job.distribution != "none" and not local_hosts.finds_torchrun():
            issues.append(
                Issue(
                    key="distribution",
                    found=f"{job.distribution}, but there is no torchrun beside {sys.executable} or on PATH",
                    fix=local_hosts.NO_TORCHRUN,
                )
            )
        issues += local_jobs.check_cluster(job, processes_per_host(job), local_hosts.gpu_count())
        if local_jobs.wants_dali(job) and self.lacks("nvidia.dali"):
            issues.append(
                Issue(
                    key="hyperparameters.preprocessing",
                    found="dali, but NVIDIA's package is not installed",
                    valid="cpu, cpu_reference; dali with the package",
                    fix="pip install -e '.[dali]' in this kit's folder, or write preprocessing: cpu",
                )
            )
        if groups.is_remote(job) and self.lacks("ray"):
            issues.append(
                Issue(
                    key="hyperparameters.worker_type",
                    found="remote, but Ray is not installed",
                    valid="auto, threads, processes; remote with the package",
                    fix="pip install -e '.[remote]' in this kit's folder, or write worker_type: auto",
                )
            )
        if (source / REQUIREMENTS).is_file():
            issues.append(
                Issue(
                    key="source",
                    level="warning",
                    found="requirements.txt is not installed into your environment",
                    fix=f"if the script needs it, run {sys.executable} -m pip install -r {source}/requirements.txt",
                )
            )
        if job.distribution == "smddp":
            issues.append(local_jobs.smddp_is_torchrun())
        issues += _check_opt_ml(job, files)
        issues += local_jobs.check_inputs(job)
        issues += local_jobs.check_disk(job, files)
        issues += local_jobs.check_secrets(job)
        return issues

    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """All of them: a replay elsewhere needs the requirements.txt that `start` leaves out."""
        return files

    def world_size(self, job: Job) -> int:
        """Training processes on all hosts."""
        return local_jobs.world_size(job, processes_per_host(job))

    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host: its loopback address, the toolkit's command, and its environment."""
        processes, places = processes_per_host(job), groups.places(job)
        leader = _address(places[0])
        planned = []
        for place in places:
            command = local_jobs.launch_command(
                job, place.rank, processes, python=sys.executable, leader=leader, port="<free port>"
            )
            environment = _environment(job, place.rank, processes)
            planned.append(HostPlan(place.name, _address(place), command, environment, place.group))
        return tuple(planned)

    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        """The hyperparameters that SageMaker's SDK adds for the container toolkit."""
        added: dict[str, Any] = {
            "sagemaker_program": job.script,
            "sagemaker_job_name": run_name,
            "sagemaker_container_log_level": 20,
        }
        if job.distribution != "none":
            added |= {
                "sagemaker_torch_distributed_enabled": True,
                "sagemaker_instance_type": "local",
                # the toolkit reads this name for every launcher: runner.py of sagemaker-training 5.1.4
                "sagemaker_mpi_num_of_processes_per_host": processes_per_host(job),
            }
        return added | requests.groups_hyperparameter(job)

    def gpus_here(self, job: Job) -> int:
        return local_hosts.gpu_count()

    def machine(self, job: Job) -> str:
        packages = [f"{package} {_version(package)}" for package in COMPUTING_PACKAGES]
        return ", ".join(filter(None, [local_hosts.hardware(), *packages, local_hosts.shown_gpus()]))

    def timm_version(self, job: Job) -> str | None:
        """The version that is installed beside this kit, which is what its scripts import."""
        return _version("timm")

    def lacks(self, module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:  # the parent package is missing
            return True

    def start(self, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
        """Write the hosts' /opt/ml folders and start the supervisor."""
        for host in plan.hosts:
            host_folders.lay_out(plan, host, folder, interface="lo", left_out={REQUIREMENTS})
            for channel, place in plan.channels_of(host).items():
                host_folders.show_channel(folder.host(host.name) / "input/data" / channel, Path(place))
        supervision.start_supervisor("launcher.backends.supervisor", plan, folder, lock, lifeline)


def _check_opt_ml(job: Job, files: list[SourceFile]) -> list[Issue]:
    """A warning if the script names /opt/ml and this machine cannot show it to a host's processes."""
    named = host_folders.names_opt_ml(job, ((file.path, file.source) for file in files if file.source is not None))
    why = opt_ml.why_not(disk.existing(records.store())) if named else ""
    if not why:
        return []
    return [
        Issue(
            key="script",
            level="warning",
            found=f"{named} names /opt/ml, which does not exist for processes of this machine: {why}",
            fix="run it with --on docker; or read the folders from SM_CHANNEL_<NAME>, SM_MODEL_DIR and SM_OUTPUT_DATA_DIR",
        )
    ]


def processes_per_host(job: Job) -> int:
    """Training processes per host: the job's number, else the host's share of GPUs, else 1."""
    if job.compute.processes_per_host is not None or job.distribution == "none":
        return job.compute.processes_per_host or 1
    return max(1, local_hosts.gpu_count() // groups.training_host_count(job))


def _address(place: groups.Place) -> str:
    return f"127.0.0.{place.index + 1}"


def _environment(job: Job, rank: int | None, processes: int) -> dict[str, str]:
    """A host's variables without its paths: the toolkit's, its share of this machine, and the job's."""
    return {**local_jobs.toolkit_environment(local_jobs.share(job, rank, processes)), **job.environment}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
