"""A job on this machine, whether its hosts are processes or containers: what does not fit, and what the toolkit is given."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.backends import local_hosts
from launcher.config.hyperparameters import argument
from launcher.config.issues import Issue
from launcher.config.job import Job


def check_cluster(job: Job, processes: int, gpus: int) -> list[Issue]:
    """Where a job is too large for one machine.

    Args:
        processes: training processes on each host.
        gpus: those of this machine that the hosts may share.
    """
    issues = []
    if len(job.compute.instance_groups) > 1:
        names = ", ".join(group.name for group in job.compute.instance_groups)
        issues.append(
            Issue(
                key="compute.instance_groups",
                level="warning",
                found=f"{names}: all hosts are alike here, {job.compute.instance_count} of homogeneousCluster",
                fix="to try the groups on this machine, each host as a process: launcher emulate",
            )
        )
    if job.compute.instance_count > local_hosts.MAX_HOSTS:
        issues.append(
            Issue(
                key="compute.instance_count",
                found=f"{job.compute.instance_count} hosts on this machine",
                valid=f"at most {local_hosts.MAX_HOSTS}",
                fix="write a smaller one under smoke: compute:, or give --hosts 2",
            )
        )
    cores = len(os.sched_getaffinity(0))
    if job.compute.processes_per_host is not None and job.compute.processes_per_host > 4 * max(cores, gpus):
        issues.append(
            Issue(
                key="compute.processes_per_host",
                found=f"{job.compute.processes_per_host} processes on {cores} cores",
                valid=f"at most {4 * max(cores, gpus)} here",
                fix="write processes_per_host: null, which takes one a GPU",
            )
        )
    if 0 < gpus < job.compute.instance_count * processes:
        issues.append(
            Issue(
                key="compute",
                level="warning",
                found=f"more training processes than this machine's {gpus} GPU(s): they train on the CPU, with gloo",
                fix="nothing to do if this run is a trial; else fewer hosts or processes",
            )
        )
    return issues


def smddp_is_torchrun() -> Issue:
    """What becomes of smddp on a machine that is not SageMaker's."""
    return Issue(
        key="distribution",
        level="warning",
        found="smddp exists on SageMaker only; here torchrun starts the same script",
        fix="nothing to do: the script takes nccl or gloo and says so",
    )


def check_inputs(job: Job) -> list[Issue]:
    """The inputs that lie on SageMaker's side only."""
    return [
        Issue(
            key=f"inputs.{name}",
            found=f"{given.source}, which is there on SageMaker only",
            valid="folder; file; run",
            fix="--on aws; or --smoke, where the config's smoke section names a folder for it",
        )
        for name, given in job.inputs.items()
        if given.source in ("s3", "fsx", "efs")
    ]


def wants_dali(job: Job) -> bool:
    """Whether one of this kit's scripts is to preprocess with NVIDIA DALI."""
    return job.source is None and job.hyperparameters.get("preprocessing") == "dali"


def launch_command(job: Job, index: int, processes: int, *, python: str, leader: str, port: str) -> tuple[str, ...]:
    """What the toolkit starts on a host.

    Args:
        index: which host, from 0.
        processes: training processes on each.
        python: the interpreter.
        leader: address of the first host, where the ranks meet.
        port: and its port.
    """
    count = job.compute.instance_count
    arguments = [text for name in sorted(job.hyperparameters) for text in argument(name, job.hyperparameters[name])]
    if job.distribution == "none":
        return (python, "--", job.script, *arguments)
    command = ["torchrun", "--nnodes", str(count), "--nproc_per_node", str(processes)]
    if count > 1:
        command += ["--master_addr", leader, "--master_port", port, "--node_rank", str(index)]
    return (*command, job.script, *arguments)


def toolkit_environment(share: Mapping[str, str]) -> dict[str, str]:
    """What the toolkit is given on this machine, with a host's share of it."""
    return {
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **share,
    }
