"""A job on this machine, as processes or containers: its issues, and the container toolkit's arguments."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from launcher.aws import secrets_manager
from launcher.backends import local_hosts
from launcher.config.hyperparameters import argument
from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.planner import groups
from launcher.planner.source_package import SourceFile
from launcher.record import disk, records


def check_cluster(job: Job, processes: int, gpus: int) -> list[Issue]:
    """Issues of a cluster that does not fit this machine.

    Args:
        processes: training processes per host.
        gpus: number of GPUs that the hosts share.
    """
    issues = []
    hosts = groups.host_count(job)
    if hosts > local_hosts.MAX_HOSTS:
        grouped = bool(job.compute.instance_groups)
        issues.append(
            Issue(
                key="compute.instance_groups" if grouped else "compute.instance_count",
                found=f"{hosts} hosts on one machine",
                valid=f"at most {local_hosts.MAX_HOSTS}",
                fix="write the groups with smaller counts under smoke: compute:"
                if grouped
                else "write a smaller number under smoke: compute:, or use --hosts 2",
            )
        )
    cores = local_hosts.core_count()
    if job.compute.processes_per_host is not None and job.compute.processes_per_host > 4 * max(cores, gpus):
        issues.append(
            Issue(
                key="compute.processes_per_host",
                found=f"{job.compute.processes_per_host} processes on {cores} cores",
                valid=f"at most {4 * max(cores, gpus)} here",
                fix="write processes_per_host: null, for one process per GPU",
            )
        )
    if 0 < gpus < groups.training_host_count(job) * processes:
        issues.append(
            Issue(
                key="compute",
                level="warning",
                found=f"more training processes than GPUs ({gpus}): training runs on the CPU with gloo",
                fix="no change needed for a trial run; otherwise use fewer hosts or processes",
            )
        )
    return issues


def check_disk(job: Job, files: Sequence[SourceFile]) -> list[Issue]:
    """A warning if the run store's disk has no room for the known writes: the code, for the record and for each host."""
    store = records.store()
    place = disk.existing(store)
    free = shutil.disk_usage(place).free
    needed = disk.RESERVE_BYTES + sum(file.size for file in files) * (1 + groups.host_count(job))
    if free >= needed:
        return []
    return [
        Issue(
            key="LAUNCHER_RUNS",
            level="warning",
            found=f"{free / 2**20:.1f} MiB are free on {disk.device(place)}, at {store}",
            valid=f"at least {needed / 2**20:.1f} MiB for the code; checkpoints, logs and the model come on top",
            fix=disk.FIX,
        )
    ]


def smddp_is_torchrun() -> Issue:
    """The warning that smddp runs as torchrun."""
    return Issue(
        key="distribution",
        level="warning",
        found="smddp exists on SageMaker only; here torchrun starts the same script",
        fix="no change needed: the script uses nccl or gloo and logs which",
    )


def check_inputs(job: Job) -> list[Issue]:
    """Issues of inputs that exist on SageMaker only."""
    return [
        Issue(
            key=f"inputs.{name}",
            found=f"{given.source}, which exists on SageMaker only",
            valid="folder; file; run",
            fix="use --on aws, or --smoke if the config's smoke section names a folder",
        )
        for name, given in job.inputs.items()
        if given.source in ("s3", "fsx", "efs")
    ]


def check_secrets(job: Job) -> list[Issue]:
    """Issues of the job's secrets on this machine, and what the plan does not know about them."""
    return [*secrets_manager.check_here(job), *secrets_manager.not_checked(job, "you")]


def wants_dali(job: Job) -> bool:
    """Whether one of this kit's scripts preprocesses with NVIDIA DALI."""
    return job.source is None and job.hyperparameters.get("preprocessing") == "dali"


def launch_command(
    job: Job, rank: int | None, processes: int, *, python: str, leader: str, port: str
) -> tuple[str, ...]:
    """The container toolkit's command on a host.

    Args:
        rank: the host's rank among those that train, from 0; None if it does not train.
        processes: training processes per host.
        python: the interpreter.
        leader: address of the rendezvous, the first host that trains.
        port: the rendezvous port.
    """
    count = groups.training_host_count(job)
    arguments = [text for name in sorted(job.hyperparameters) for text in argument(name, job.hyperparameters[name])]
    if job.distribution == "none" or rank is None:
        return (python, "--", job.script, *arguments)
    command = ["torchrun", "--nnodes", str(count), "--nproc_per_node", str(processes)]
    if count > 1:
        command += ["--master_addr", leader, "--master_port", port, "--node_rank", str(rank)]
    return (*command, job.script, *arguments)


def world_size(job: Job, processes: int) -> int:
    """Training processes on all hosts.

    Args:
        processes: training processes per host.
    """
    if job.distribution == "none" and job.compute.instance_groups:
        return 1  # whether the hosts of a group train together is up to the script
    return groups.training_host_count(job) * processes


def share(job: Job, rank: int | None, processes: int) -> dict[str, str]:
    """A host's share of this machine; see `local_hosts.share`."""
    training = groups.training_host_count(job)
    return local_hosts.share(rank, training, processes, groups.host_count(job) - training)


def toolkit_environment(share: Mapping[str, str]) -> dict[str, str]:
    """The container toolkit's environment, with the host's share of this machine and without its user's AWS credentials."""
    return {
        **local_hosts.NO_CREDENTIALS,
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **share,
    }
