"""The hosts of a training job: the files that SageMaker writes below /opt/ml, and the toolkit's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends import host_folders, leftovers, local_hosts
from launcher.emulator.training_job import TrainingJob

LAUNCHERS = (
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_mpi_enabled",
)
"""Hyperparameters that start the script with mpirun, which needs sshd on every host; the first two also need SMDDP."""

TORCHRUN = "sagemaker_torch_distributed_enabled"
TRAINING_GROUPS = "sagemaker_distribution_instance_groups"
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
"""The toolkit reads this name for every launcher: runner.py of sagemaker-training 5.1.4."""

DIFFERENCES: Mapping[str, str] = {
    "SM_HOSTS": "127.0.0.1, 127.0.0.2 … instead of algo-1, algo-2 …, wherever a host is named",
    "SM_NETWORK_INTERFACE_NAME": "lo: the hosts are on one machine",
    "NCCL_SOCKET_IFNAME": "lo, for the same reason",
    "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
    "MASTER_PORT": "a free port: other runs share this machine",
    "PET_MASTER_PORT": "torchrun's name for MASTER_PORT",
    "TRAINING_SERVERS_PORT": "a free port where the job has several instance groups, for the same reason",
    "OMP_NUM_THREADS": "all processes share this machine's cores",
    "GOMP_SPINCOUNT": "short: other work shares this machine",
    "SAGEMAKER_BASE_DIR": "the host's folder, instead of /opt/ml",
    "AWS_ENDPOINT_URL": "the emulator's address",
    "S3_ENDPOINT_URL": "the toolkit's name for AWS_ENDPOINT_URL",
    "NO_PROXY": "the emulator's address",
    "AWS_ACCESS_KEY_ID": "the emulator's; on SageMaker a container uses its role's credentials",
    "AWS_SECRET_ACCESS_KEY": "the emulator's too",
    "AWS_CONFIG_FILE": "empty: a job does not use the settings of this machine's user",
    "AWS_SHARED_CREDENTIALS_FILE": "empty, for the same reason",
    "BOTO_CONFIG": "empty, for the same reason",
    "AWS_EC2_METADATA_DISABLED": "true: a job does not use this machine's role",
    "PIP_DRY_RUN": "requirements.txt is checked, not installed into this machine's Python",
    "PIP_NO_INDEX": "for the same reason",
    "PIP_CONFIG_FILE": "for the same reason",
    "PIP_DISABLE_PIP_VERSION_CHECK": "for the same reason",
}
"""Differences from SageMaker: variable -> reason."""


@dataclass(frozen=True)
class Host:
    """One instance of a job."""

    name: str
    """algo-1 …, as in the names of log streams."""
    address: str
    """127.0.0.1 …: the script's SM_CURRENT_HOST, which has to resolve on this machine."""
    instance_type: str
    group: str
    base: Path
    """The folder that stands for /opt/ml."""


def hosts_of(job: TrainingJob) -> list[Host]:
    """A job's hosts, group after group."""
    resources = job.request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [{**resources, "InstanceGroupName": host_folders.HOMOGENEOUS}]
    kinds = [
        (group["InstanceType"], group["InstanceGroupName"])
        for group in groups
        for _ in range(group.get("InstanceCount", 1))
    ]
    return [
        Host(f"algo-{number}", f"127.0.0.{number}", kind, group, job.folder / f"algo-{number}" / "opt/ml")
        for number, (kind, group) in enumerate(kinds, 1)
    ]


def write_tree(job: TrainingJob, host: Host, hosts: list[Host], hyperparameters: dict[str, str]) -> None:
    """Write a host's /opt/ml without its channels and checkpoints, and remove an earlier attempt's."""
    shutil.rmtree(host.base, ignore_errors=True)
    for place in ("code", "model", "output/data", "input/data", "input/config"):
        (host.base / place).mkdir(parents=True)
    texts = {
        "hyperparameters.json": hyperparameters,
        "resourceconfig.json": resource_config(host, hosts),
        "inputdataconfig.json": input_data_config(job, host),
    }
    profiling = job.request.get("ProfilerConfig", {})
    if not profiling.get("DisableProfiler"):
        texts["profilerconfig.json"] = profiling
    for name, value in texts.items():
        (host.base / "input/config" / name).write_text(json.dumps(value), encoding="utf-8")


def resource_config(host: Host, hosts: list[Host]) -> dict[str, Any]:
    """resourceconfig.json, with addresses instead of names, which would not resolve."""
    this, *all_hosts = [(other.address, other.group, other.instance_type) for other in (host, *hosts)]
    return host_folders.resource_config(this, all_hosts, "lo")


def training_hosts(job: TrainingJob, hosts: list[Host]) -> list[Host]:
    """The hosts on which the toolkit starts the job's launcher: those of the training groups, else all."""
    groups = json.loads(job.hyperparameters.get(TRAINING_GROUPS, "[]"))
    return [host for host in hosts if host.group in groups] or hosts


def channels_of(job: TrainingJob, host: Host) -> list[dict[str, Any]]:
    """A host's channels. Those of a heterogeneous job may belong to single groups."""
    found = []
    for channel in job.request.get("InputDataConfig", []):
        names = channel["DataSource"].get("S3DataSource", {}).get("InstanceGroupNames")
        if not names or host.group in names:
            found.append(channel)
    return found


def input_data_config(job: TrainingJob, host: Host) -> dict[str, Any]:
    """inputdataconfig.json."""
    written = {}
    for channel in channels_of(job, host):
        entry = {
            "TrainingInputMode": input_mode(job, channel),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
        }
        if "ContentType" in channel:
            entry["ContentType"] = channel["ContentType"]
        if "S3DataSource" in channel["DataSource"]:
            entry["S3DistributionType"] = channel["DataSource"]["S3DataSource"].get(
                "S3DataDistributionType", "FullyReplicated"
            )
        written[channel["ChannelName"]] = entry
    return written


def input_mode(job: TrainingJob, channel: dict[str, Any]) -> str:
    """File, FastFile or Pipe: the channel's own, else the job's."""
    mode = channel.get("InputMode") or job.request["AlgorithmSpecification"].get("TrainingInputMode", "File")
    return str(mode)


def hyperparameters_here(job: TrainingJob, training: int) -> tuple[dict[str, str], str]:
    """The job's hyperparameters with a launcher that this machine has, and a log line about it.

    Without a number of processes per host, the hosts that train share this machine's GPUs.

    Args:
        training: the number of hosts that train.
    """
    here, note = dict(job.hyperparameters), ""
    mpirun = [name for name in LAUNCHERS if here.get(name, "").strip('"').lower() == "true"]
    if mpirun:
        for name in mpirun:
            del here[name]
        here[TORCHRUN] = "true"
        note = f"emulator: {', '.join(mpirun)} needs mpirun and sshd, which exist on SageMaker only; torchrun starts the script"
    if here.get(TORCHRUN, "").lower() == "true" and PROCESSES not in here:
        here[PROCESSES] = str(max(1, local_hosts.gpu_count() // training))
    return here, note


def environment(
    job: TrainingJob, host: Host, hosts: list[Host], processes: int, aws: Mapping[str, str]
) -> dict[str, str]:
    """A host's environment: as clean as a container's, with `aws` for its AWS clients."""
    inherited = local_hosts.inherited(os.environ)
    training = training_hosts(job, hosts)
    rank = training.index(host) if host in training else None
    no_proxy = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1"]))
    return {
        **inherited,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        **local_hosts.share(rank, len(training), processes, len(hosts) - len(training)),
        **job.request.get("Environment", {}),
        "PATH": inherited["PATH"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SAGEMAKER_BASE_DIR": str(host.base),
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "TRAINING_JOB_NAME": job.name,
        "TRAINING_JOB_ARN": job.arn,
        "AWS_REGION": job.region,
        "AWS_DEFAULT_REGION": job.region,
        **aws,
        "S3_ENDPOINT_URL": aws["AWS_ENDPOINT_URL"],  # the name that the toolkit reads
        **local_hosts.NO_CREDENTIALS,
        # the toolkit would install a requirements.txt into the user's own Python
        "PIP_DRY_RUN": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


class RunningHosts:
    """The toolkit's processes in one attempt."""

    def __init__(self) -> None:
        self.shims: dict[str, subprocess.Popen[bytes]] = {}
        self.lifelines: list[int] = []
        self.reservations: list[socket.socket] = []

    def start(self, job: TrainingJob, hosts: list[Host], note: str, processes: int, aws: Mapping[str, str]) -> None:
        port, reservation = local_hosts.reserve_port()
        servers, more = local_hosts.servers_port(len({host.group for host in hosts}))
        self.reservations = [reservation, *([more] if more else [])]
        for host in hosts:
            with open(log_file(host), "wb") as log:
                log.write(note.encode() + b"\n" if note else b"")
                log.flush()
                environment_here = environment(job, host, hosts, processes, aws) | servers
                # for every job: whether its script names /opt/ml is known only once the toolkit has unpacked it
                self.shims[host.name], lifeline = local_hosts.start_shim(
                    port, log, host.base, environment_here, own_opt_ml=True
                )
            self.lifelines.append(lifeline)  # closes with this process, however it dies

    def running(self) -> bool:
        return any(shim.poll() is None for shim in self.shims.values())

    def failed(self) -> str:
        """The name of the first host that failed; empty: none."""
        return next((name for name, shim in self.shims.items() if shim.poll()), "")

    def terminate(self) -> None:
        """Send SIGTERM, which the shim forwards to the training processes."""
        for shim in self.shims.values():
            if shim.poll() is None:
                shim.send_signal(signal.SIGTERM)

    def close(self, folder: Path) -> None:
        """Kill what still runs, with all its children."""
        for lifeline in self.lifelines:
            os.close(lifeline)
        self.lifelines.clear()
        deadline = time.monotonic() + 10
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        leftovers.end_processes_below(folder)  # of shims that hang or were killed
        for shim in self.shims.values():
            shim.wait()
        for reservation in self.reservations:
            reservation.close()


def exit_code(shim: subprocess.Popen[bytes]) -> int:
    """The exit code as a container reports it: 128 plus the signal's number after a signal."""
    code = shim.returncode or 0
    return code if code >= 0 else 128 - code


def log_file(host: Host) -> Path:
    """A host's standard output and error."""
    return host.base.parents[1] / "log.txt"
