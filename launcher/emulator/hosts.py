"""The hosts of a training job: what SageMaker writes for each below /opt/ml, and the toolkit's process that stands for it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from launcher.backends import local_hosts
from launcher.emulator.operations import FAR_SIDE_KEY
from launcher.emulator.training_job import TrainingJob

GROUP = "homogeneousCluster"
"""SageMaker's name for the instance group of a job that has none."""

LAUNCHERS = (
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_mpi_enabled",
)
"""Hyperparameters that start the script with mpirun, which needs sshd on every host and, for the first two, SMDDP."""

TORCHRUN = "sagemaker_torch_distributed_enabled"
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
"""The toolkit reads this name for every launcher: runner.py of sagemaker-training 5.1.4."""

DIFFERENCES: Mapping[str, str] = {
    "SM_HOSTS": "127.0.0.1, 127.0.0.2 … instead of algo-1, algo-2 …; wherever hosts are named",
    "SM_NETWORK_INTERFACE_NAME": "lo: the hosts are on one machine",
    "NCCL_SOCKET_IFNAME": "lo too",
    "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
    "MASTER_PORT": "a free one, because hosts of other runs are on the same machine",
    "PET_MASTER_PORT": "the same, torchrun's name for it",
    "OMP_NUM_THREADS": "this machine's cores shared among the processes of all hosts",
    "GOMP_SPINCOUNT": "short, because this machine has other work too",
    "SAGEMAKER_BASE_DIR": "the host's folder here, in the place of /opt/ml",
    "AWS_ENDPOINT_URL": "the emulator's address",
    "S3_ENDPOINT_URL": "the same, by the toolkit's name for it",
    "NO_PROXY": "that address",
    "AWS_ACCESS_KEY_ID": "the emulator's own; on SageMaker the container asks for its role's",
    "AWS_SECRET_ACCESS_KEY": "the same",
    "AWS_CONFIG_FILE": "none: the settings of whoever runs the emulator do not reach the job",
    "AWS_SHARED_CREDENTIALS_FILE": "none, for the same reason",
    "PIP_DRY_RUN": "a requirements.txt is looked at, not installed into this machine's Python",
    "PIP_NO_INDEX": "for the same reason",
    "PIP_CONFIG_FILE": "for the same reason",
    "PIP_DISABLE_PIP_VERSION_CHECK": "for the same reason",
}
"""What a script sees otherwise than on SageMaker, by its variable, and why."""


@dataclass(frozen=True)
class Host:
    """One instance of a job."""

    name: str
    """algo-1 …, as in the names of log streams."""
    address: str
    """127.0.0.1 …: what the script reads as SM_CURRENT_HOST, because it has to resolve on this machine."""
    instance_type: str
    group: str
    base: Path
    """What is /opt/ml on SageMaker."""


def hosts_of(job: TrainingJob) -> list[Host]:
    """A job's hosts, group after group."""
    resources = job.request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [{**resources, "InstanceGroupName": GROUP}]
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
    """A host's /opt/ml as it is before the channels come; whatever an earlier attempt left is gone."""
    shutil.rmtree(host.base, ignore_errors=True)
    for place in ("code", "model", "output/data", "input/data", "input/config", "checkpoints"):
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
    """resourceconfig.json, with addresses in place of names, because a host's name has to resolve."""
    groups: dict[str, dict[str, Any]] = {}
    for other in hosts:
        entry = {"instance_group_name": other.group, "instance_type": other.instance_type, "hosts": []}
        groups.setdefault(other.group, entry)["hosts"].append(other.address)
    return {
        "current_host": host.address,
        "current_instance_type": host.instance_type,
        "current_group_name": host.group,
        "hosts": [other.address for other in hosts],
        "instance_groups": list(groups.values()),
        "network_interface_name": "lo",
    }


def channels_of(job: TrainingJob, host: Host) -> list[dict[str, Any]]:
    """The channels that a host gets: a heterogeneous job may give each group its own."""
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


def hyperparameters_here(job: TrainingJob, host_count: int) -> tuple[dict[str, str], str]:
    """The job's hyperparameters with a launcher that this machine has, and what to tell in the log about it.

    Where nothing says how many processes a host has, the hosts share this machine's GPUs.
    """
    here, note = dict(job.hyperparameters), ""
    mpirun = [name for name in LAUNCHERS if here.get(name, "").strip('"').lower() == "true"]
    if mpirun:
        for name in mpirun:
            del here[name]
        here[TORCHRUN] = "true"
        note = f"emulator: {', '.join(mpirun)} needs mpirun and sshd, which are on SageMaker only; torchrun starts the script"
    if here.get(TORCHRUN, "").lower() == "true" and PROCESSES not in here:
        here[PROCESSES] = str(max(1, local_hosts.gpu_count() // host_count))
    return here, note


def environment(job: TrainingJob, host: Host, hosts: list[Host], processes: int, url: str) -> dict[str, str]:
    """A host's whole environment: a clean one, as in a container, which leads AWS clients to the emulator."""
    inherited = local_hosts.inherited(os.environ)
    no_proxy = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1"]))
    return {
        **inherited,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        **local_hosts.share(hosts.index(host), len(hosts), processes),
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
        "AWS_ACCESS_KEY_ID": FAR_SIDE_KEY,
        "AWS_SECRET_ACCESS_KEY": FAR_SIDE_KEY,
        "AWS_ENDPOINT_URL": url,
        "S3_ENDPOINT_URL": url,  # the name that the toolkit reads
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        # the toolkit installs a requirements.txt into the Python that runs it, which is the user's own: only look
        "PIP_DRY_RUN": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


class RunningHosts:
    """The toolkit's processes of one attempt at a job."""

    def __init__(self) -> None:
        self.shims: dict[str, subprocess.Popen[bytes]] = {}
        self.lifelines: list[int] = []
        self.port_lock: IO[bytes] | None = None

    def start(self, job: TrainingJob, hosts: list[Host], note: str, processes: int, url: str) -> None:
        port, self.port_lock = local_hosts.reserve_port()
        for host in hosts:
            with open(log_file(host), "wb") as log:
                log.write(note.encode() + b"\n" if note else b"")
                log.flush()
                environment_here = environment(job, host, hosts, processes, url)
                self.shims[host.name], lifeline = local_hosts.start_shim(port, log, host.base, environment_here)
            self.lifelines.append(lifeline)  # nobody else holds it: it closes with this process, however it dies

    def running(self) -> bool:
        return any(shim.poll() is None for shim in self.shims.values())

    def failed(self) -> str:
        """The name of the first host that is over with an error; empty where none is."""
        return next((name for name, shim in self.shims.items() if shim.poll()), "")

    def terminate(self) -> None:
        """SIGTERM, which the shim hands on to the training processes."""
        for shim in self.shims.values():
            if shim.poll() is None:
                shim.send_signal(signal.SIGTERM)

    def close(self, folder: Path) -> None:
        """End whatever still runs, at once, and all that it started."""
        for lifeline in self.lifelines:
            os.close(lifeline)
        self.lifelines.clear()
        deadline = time.monotonic() + 10
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        end_processes_below(folder)  # of shims that did not hear, or that somebody killed
        for shim in self.shims.values():
            shim.wait()
        if self.port_lock is not None:
            self.port_lock.close()


def exit_code(shim: subprocess.Popen[bytes]) -> int:
    """As a container reports it: 128 and the signal's number where a signal ended it."""
    code = shim.returncode or 0
    return code if code >= 0 else 128 - code


def log_file(host: Host) -> Path:
    """What a host wrote to its standard output and error."""
    return host.base.parents[1] / "log.txt"


def end_processes_below(folder: Path) -> None:
    """SIGKILL every process of ours whose /opt/ml lies below a folder."""
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if candidate.uids().real != os.getuid():
                continue
            base = candidate.environ().get("SAGEMAKER_BASE_DIR", "")
            if base and Path(base).is_relative_to(folder):
                candidate.kill()
