"""The `process` backend: AWS's own container toolkit, one process tree a host, on loopback addresses. No Docker, no AWS, no network."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import records
from launcher.aws.request import profiler_config
from launcher.backends import local_hosts
from launcher.backends.base import HostPlan, Upload
from launcher.findings import Finding, mistake
from launcher.hyperparameters import argument
from launcher.job import Job
from launcher.package import TravelFile, copy_files
from launcher.redaction import secrets_in

if TYPE_CHECKING:
    from launcher.planning import Plan

REQUIREMENTS = "requirements.txt"
"""Does not travel: the toolkit would install these packages into the user's own environment."""

SECRETS = "LAUNCHER_SECRETS"
"""The variable that takes the job's secrets to the supervisor."""

NEEDED = {
    "sagemaker_training": "sagemaker-training",
    "sagemaker_pytorch_container": "sagemaker-pytorch-training",
    "torch": "torch",
    "psutil": "psutil",
}
"""Module -> package that this backend needs in the launcher's own environment."""

DIFFERENCES: Mapping[str, str] = {
    "SM_HOSTS": "127.0.0.1, 127.0.0.2 … instead of algo-1, algo-2 …; wherever hosts are named",
    "SM_CURRENT_INSTANCE_TYPE": "local: no instance of SageMaker's; SM_RESOURCE_CONFIG and SM_INSTANCE_GROUPS_DICT say so too",
    "SM_NETWORK_INTERFACE_NAME": "lo: the hosts are on one machine",
    "NCCL_SOCKET_IFNAME": "lo too",
    "SM_NUM_CPUS": "this machine's; SM_NUM_GPUS too",
    "MASTER_PORT": "a free one, because hosts of other runs are on the same machine",
    "PET_MASTER_PORT": "the same, torchrun's name for it",
    "OMP_NUM_THREADS": "this machine's cores shared among the processes of all hosts",
    "GOMP_SPINCOUNT": "short, because a machine that is yours has other work too",
    "SAGEMAKER_REGION": "not set: there is no region",
    "AWS_REGION": "not set: a script finds neither a region nor credentials",
    "AWS_DEFAULT_REGION": "not set either",
    "TRAINING_JOB_ARN": "not set: SageMaker knows of no job",
    "SM_MODULE_DIR": "the folder of the code, which on SageMaker is the address of its archive in S3",
    "SAGEMAKER_BASE_DIR": "the run's folder, hosts/<host>/opt/ml, in the place of /opt/ml",
    "packages": "your own environment's; a requirements.txt is not installed into it",
    "distribution": "smddp runs as torchrun, with gloo or nccl: the library exists on SageMaker only",
    "inputs": "shown in place: not copied, sharded or streamed",
    "checkpoints": "stay in the run's folder: nothing is copied to S3 or back",
    "aside": "spot, warm pool, disk size, network, KMS, tags, metrics, Debugger and Profiler exist on SageMaker only",
}
"""What differs from SageMaker, by the variable of the script's environment or the subject, and why. All else is the same."""


def check(job: Job, source: Path, files: list[TravelFile]) -> list[Finding]:
    """What this machine lacks to run a job as processes."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    findings = []
    if missing:
        findings.append(
            Finding(
                key="--on process",
                found=f"not installed: {', '.join(missing)}",
                cure="make, or pip install -e '.[local]', in this kit's folder",
            )
        )
    findings += check_cluster(job, processes_per_host(job), local_hosts.gpu_count())
    if wants_dali(job) and not _is_installed("nvidia.dali"):
        findings.append(
            Finding(
                key="hyperparameters.preprocessing",
                found="dali, and NVIDIA's package is not installed",
                valid="cpu, cpu_reference; dali with the package",
                cure="pip install -e '.[dali]' in this kit's folder, or write preprocessing: cpu",
            )
        )
    if (source / REQUIREMENTS).is_file():
        findings.append(
            Finding(
                key="source",
                level="warning",
                found="requirements.txt is not installed into your own environment",
                cure=f"if the script needs it: {sys.executable} -m pip install -r {source}/requirements.txt",
            )
        )
    if job.distribution == "smddp":
        findings.append(smddp_is_torchrun())
    findings += check_inputs(job)
    return findings


def wants_dali(job: Job) -> bool:
    """Whether one of this kit's scripts is to preprocess with NVIDIA DALI."""
    return job.source is None and job.hyperparameters.get("preprocessing") == "dali"


def _is_installed(module: str) -> bool:
    """Whether a module can be imported; no parent of it need be there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_cluster(job: Job, processes: int, gpus: int) -> list[Finding]:
    """Where a job is too large for one machine.

    Args:
        processes: training processes on each host.
        gpus: those of this machine that the hosts may share.
    """
    findings = []
    if len(job.compute.instance_groups) > 1:
        names = ", ".join(group.name for group in job.compute.instance_groups)
        findings.append(
            Finding(
                key="compute.instance_groups",
                level="warning",
                found=f"{names}: all hosts are alike here, {job.compute.instance_count} of homogeneousCluster",
                cure="to try the groups on this machine, each host as a process: launcher emulate",
            )
        )
    if job.compute.instance_count > local_hosts.MAX_HOSTS:
        findings.append(
            Finding(
                key="compute.instance_count",
                found=f"{job.compute.instance_count} hosts on this machine",
                valid=f"at most {local_hosts.MAX_HOSTS}",
                cure="write a smaller one under smoke: compute:, or give --hosts 2",
            )
        )
    cores = len(os.sched_getaffinity(0))
    if job.compute.processes_per_host is not None and job.compute.processes_per_host > 4 * max(cores, gpus):
        findings.append(
            Finding(
                key="compute.processes_per_host",
                found=f"{job.compute.processes_per_host} processes on {cores} cores",
                valid=f"at most {4 * max(cores, gpus)} here",
                cure="write processes_per_host: null, which takes one a GPU",
            )
        )
    if 0 < gpus < job.compute.instance_count * processes:
        findings.append(
            Finding(
                key="compute",
                level="warning",
                found=f"more training processes than this machine's {gpus} GPU(s): they train on the CPU, with gloo",
                cure="nothing to do if this run is a trial; else fewer hosts or processes",
            )
        )
    return findings


def smddp_is_torchrun() -> Finding:
    """What becomes of smddp on a machine that is not SageMaker's."""
    return Finding(
        key="distribution",
        level="warning",
        found="smddp exists on SageMaker only; here torchrun starts the same script",
        cure="nothing to do: the script takes nccl or gloo and says so",
    )


def check_inputs(job: Job) -> list[Finding]:
    """The inputs that lie on SageMaker's side only."""
    return [
        Finding(
            key=f"inputs.{name}",
            found=f"{given.source}, which is there on SageMaker only",
            valid="folder; file; run",
            cure="--on aws; or --smoke, where the config's smoke section names a folder for it",
        )
        for name, given in job.inputs.items()
        if given.source in ("s3", "fsx", "efs")
    ]


def travelling(job: Job, files: list[TravelFile]) -> list[TravelFile]:
    """The files of the source folder that travel."""
    return [file for file in files if file.path != REQUIREMENTS]


def channels(job: Job, places: dict[str, str]) -> tuple[dict[str, str], tuple[Upload, ...]]:
    """What each channel shows: its place on this machine. Nothing is uploaded."""
    return places, ()


def request(job: Job, run_name: str, channels: dict[str, str]) -> None:
    """Nobody is sent anything."""


def about(job: Job) -> dict[str, str]:
    """Nothing beside the hosts."""
    return {}


def price(job: Job) -> None:
    """This machine's time has no price."""


def check_online(plan: Plan) -> list[Finding]:
    """Nothing here lies beyond this machine."""
    return []


def spend(folder: records.RunFolder) -> None:
    """This machine's time has no price."""


def world_size(job: Job) -> int:
    """Training processes on all hosts."""
    return job.compute.instance_count * processes_per_host(job)


def refresh(folder: records.RunFolder) -> bool:
    """Nothing to fetch: the supervisor writes the run's folder."""
    return False


def hosts(job: Job) -> tuple[HostPlan, ...]:
    """Each host of a job: its loopback address, the command that the toolkit will build, and what it is given."""
    count = job.compute.instance_count
    processes = processes_per_host(job)
    planned = []
    for index in range(count):
        command = launch_command(job, index, processes, python=sys.executable, leader="127.0.0.1", port="<free port>")
        planned.append(
            HostPlan(f"algo-{index + 1}", f"127.0.0.{index + 1}", command, _environment(job, index, count, processes))
        )
    return tuple(planned)


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


def toolkit_hyperparameters(job: Job, run_name: str) -> dict[str, Any]:
    """What SageMaker's SDK adds to the hyperparameters for its toolkit."""
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
    return added


def processes_per_host(job: Job) -> int:
    """As the job says; else this machine's GPUs shared among the hosts; else 1."""
    if job.compute.processes_per_host is not None or job.distribution == "none":
        return job.compute.processes_per_host or 1
    return max(1, local_hosts.gpu_count() // job.compute.instance_count)


def start(plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
    """Write the hosts' /opt/ml folders and start the supervisor that stays with the run.

    Args:
        plan: without errors.
        folder: already holds the records.
        lock: the locked file of the run, which the supervisor holds as long as it lives.
        lifeline: reading end of a pipe; when its writing end closes before a byte came, the supervisor stops the run.
            None: the run outlives whoever started it.
    """
    for host in plan.hosts:
        lay_out(plan, host, folder, interface="lo")
        for channel, place in plan.channels.items():
            show_channel(folder.host(host.name) / "input/data" / channel, Path(place))
    start_supervisor("launcher.backends.supervisor", plan, folder, lock, lifeline)


def lay_out(plan: Plan, host: HostPlan, folder: records.RunFolder, *, interface: str) -> None:
    """Make a host's /opt/ml, but for its channels.

    Args:
        interface: the network interface that its script shall use.
    """
    base = folder.host(host.name)
    for place in ("code", "model", "output/data", "input/data", "input/config", "checkpoints"):
        (base / place).mkdir(parents=True)
    copy_files(list(plan.files), base / "code")
    if plan.resumes is not None:
        earlier = records.RunFolder(records.store() / plan.resumes).host(host.name) / "checkpoints"
        if earlier.is_dir():  # copied, not linked: a script may change its files in place
            shutil.copytree(earlier, base / "checkpoints", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for name, text in config_files(plan, host, interface).items():
        records.write_atomically(base / "input/config" / name, text)


def show_channel(at: Path, place: Path) -> None:
    """A channel as a link to its folder, or as a folder with a link to its file."""
    if place.is_dir():
        at.symlink_to(place, target_is_directory=True)
    else:
        at.mkdir()
        (at / place.name).symlink_to(place)


def start_supervisor(module: str, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
    """Start the process that stays with the run, and wait until it is there."""
    folder.supervisor_log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", module, str(folder.path)]
    command += ["--lifeline", str(lifeline)] if lifeline is not None else []
    package = str(Path(__file__).parents[2])  # found there by the supervisor too, wherever it starts
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        SECRETS: json.dumps(secrets_in(plan.job.environment)),  # from memory to memory: the folder does not hold them
    }
    with open(folder.supervisor_log, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder.path,  # a module of the user's in the current folder must not stand in for ours
            pass_fds=[lock] if lifeline is None else [lock, lifeline],
            env=environment,
        )
    while not folder.supervisor.exists():
        if process.poll() is not None:
            raise mistake(
                "run", f"the supervisor ended at once with status {process.returncode}", f"read {folder.supervisor_log}"
            )
        time.sleep(0.01)
    threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay as a zombie of ours


def stop(folder: records.RunFolder, reason: str) -> None:
    """Ask a run to stop: its training processes get SIGTERM, and SIGKILL after the grace period. Returns at once."""
    if not folder.stop_request.exists():
        records.write_json(folder.stop_request, {"reason": reason, "time": time.time()})


def config_files(plan: Plan, host: HostPlan, interface: str = "lo") -> dict[str, str]:
    """The files below input/config that SageMaker writes for a host, by name."""
    resources = {
        "current_host": host.address,
        "current_instance_type": "local",
        "current_group_name": "homogeneousCluster",
        "hosts": [other.address for other in plan.hosts],
        "network_interface_name": interface,
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "local",
                "hosts": [other.address for other in plan.hosts],
            }
        ],
    }
    channels = {
        name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for name in plan.channels
    }
    written: dict[str, Any] = {
        "hyperparameters.json": plan.hyperparameters,
        "resourceconfig.json": resources,
        "inputdataconfig.json": channels,
    }
    if plan.job.profiling is not None:
        written["profilerconfig.json"] = profiler_config(plan.job)
    return {name: json.dumps(value, indent=1) for name, value in written.items()}


def shim_environment(plan: Plan, host: HostPlan, folder: records.RunFolder, outer: Mapping[str, str]) -> dict[str, str]:
    """A host's whole environment: what is passed on of `outer`, what SageMaker sets, and the job's own."""
    return {
        **local_hosts.inherited(outer),
        "SAGEMAKER_BASE_DIR": str(folder.host(host.name)),
        "TRAINING_JOB_NAME": plan.name,
        **host.environment,
        **json.loads(outer.get(SECRETS, "{}")),
    }


def _environment(job: Job, index: int, count: int, processes: int) -> dict[str, str]:
    """What a host is given beside its own paths: the toolkit's module, a share of this machine, and the job's environment."""
    return {**toolkit_environment(local_hosts.share(index, count, processes)), **job.environment}


def toolkit_environment(share: Mapping[str, str]) -> dict[str, str]:
    """What the toolkit is given on this machine, with a host's share of it."""
    return {
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **share,
    }
