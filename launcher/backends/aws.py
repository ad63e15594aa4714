"""The `aws` backend: SageMaker training jobs, planned, submitted, followed and stopped. The work is in launcher/aws/."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import causes, package, records
from launcher.aws import adopt as adopting
from launcher.aws import catalog, follow, online, prices, requirements, session, submit, traps, upload
from launcher.aws import request as requests
from launcher.backends.base import HostPlan, Upload
from launcher.findings import Finding
from launcher.hyperparameters import argument
from launcher.job import Job
from launcher.package import TravelFile

if TYPE_CHECKING:
    from launcher.planning import Plan

toolkit_hyperparameters = requests.toolkit_hyperparameters
price = prices.price
check_online = online.check
adopt = adopting.adopt


def check(job: Job, source: Path, files: list[TravelFile]) -> list[Finding]:
    """What SageMaker would refuse or ignore, and what must not leave this machine."""
    findings = []
    if importlib.util.find_spec("boto3") is None:
        cure = "make, or pip install -e '.[aws]', in this kit's folder"
        findings.append(Finding(key="--on aws", found="not installed: boto3", cure=cure))
    findings += package.check_archive(files)
    lacking = requirements.lacking(job, files)
    if lacking:
        found = f"{requirements.FILE} does not name what the script imports and the image lacks"
        cure = f"add to it: {', '.join(lacking)}"
        findings.append(Finding(key="source", level="warning", found=found, cure=cure))
    brings = any(file.path == requirements.FILE for file in files)
    return findings + traps.check(job, kit_script=job.source is None, requirements=brings)


def travelling(job: Job, files: list[TravelFile]) -> list[TravelFile]:
    """The files of the source folder, and a requirements.txt for what the image lacks."""
    return requirements.complete(job, files)


def channels(job: Job, places: dict[str, str]) -> tuple[dict[str, str], tuple[Upload, ...]]:
    """Each channel's place in S3 or on a file system, and what is uploaded for those on this machine."""
    shown: dict[str, str] = {}
    uploads = []
    for name, given in job.inputs.items():
        if given.s3 is not None:
            shown[name] = given.s3
        elif given.source in ("fsx", "efs"):
            shown[name] = f"{given.source} {given.fsx or given.efs}:{given.path}"
        elif name in places and job.output is not None:
            in_s3 = _model_in_s3(Path(places[name]).parent) if given.run else None
            if in_s3 is None:
                item = upload.planned_upload(job, name, Path(places[name]))
                uploads.append(item)
                in_s3 = item.target
            shown[name] = in_s3
    return shown, tuple(uploads)


def request(job: Job, run_name: str, channels: dict[str, str]) -> dict[str, Any]:
    """The CreateTrainingJob request."""
    return requests.training_job(job, run_name, channels)


def hosts(job: Job) -> tuple[HostPlan, ...]:
    """Each host of a job and what the container's toolkit starts there (runner.py, smdataparallel.py of sagemaker-training 5.1.4)."""
    groups = job.compute.instance_groups
    kinds = [(group.instance_type, group.name) for group in groups for _ in range(group.instance_count)]
    kinds = kinds or [(job.compute.instance_type or "", "")] * job.compute.instance_count
    names = [f"algo-{number + 1}" for number in range(len(kinds))]
    training = [name for name, (_, group) in zip(names, kinds) if not groups or group in job.compute.training_groups]
    arguments = [text for name in sorted(job.hyperparameters) for text in argument(name, job.hyperparameters[name])]
    planned = []
    for number, (name, (kind, _)) in enumerate(zip(names, kinds)):
        processes = _processes(job, kind)
        if job.distribution == "none":
            command = ["python", job.script, *arguments]
        elif job.distribution == "torchrun":
            rendezvous = ["--master_addr", names[0], "--master_port", "7777", "--node_rank", str(number)]
            command = ["torchrun", "--nnodes", str(len(names)), "--nproc_per_node", str(processes)]
            command += [*(rendezvous if len(names) > 1 else []), job.script, *arguments]
        elif name not in training:
            command = ["python", job.script, *arguments]
        elif name == training[0]:
            spread = ",".join(f"{other}:{processes}" for other in training)
            command = ["mpirun", "--host", spread, "-np", str(world_size(job))]
            command += [*(job.custom_mpi_options or "").split(), "smddprun", "python", "-m", "mpi4py"]
            command += [job.script, *arguments]
        else:
            command = ["sshd", f"# mpirun on {training[0]} starts the processes here"]
        planned.append(HostPlan(name, name, tuple(command), dict(job.environment)))
    return tuple(planned)


def world_size(job: Job) -> int:
    """Training processes on all hosts that train."""
    compute = job.compute
    if job.distribution == "none":
        return 1
    if not compute.instance_groups:
        return compute.instance_count * _processes(job, compute.instance_type or "")
    training = [group for group in compute.instance_groups if group.name in compute.training_groups]
    return sum(
        group.instance_count * _processes(job, group.instance_type) for group in training or compute.instance_groups
    )


def start(plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
    """Upload data, code and record, and create the training job, which goes on whatever becomes of this process.

    Args:
        plan: without errors.
        folder: already holds the records.
        lock: unused; SageMaker watches over the job.
        lifeline: unused, for the same reason.

    Raises:
        UserError: AWS refused it; nothing runs, and the record says so.
    """
    assert plan.request is not None
    try:
        with session.told("run"):
            client = session.client("s3", str(plan.job.region))
            upload.upload(plan, client, _say)
            upload.upload_record(plan, folder, client)
            sent_by = submit.create(plan)
    except Exception as error:  # whatever it was, the record shall say that nothing runs
        explained = causes.explain(str(error))
        failure = str(error) if explained is None else f"{error}\n{explained.cause}: {explained.cure}"
        records.write_json(folder.outcome, {"state": records.FAILED, "failure": f"not started: {failure}"})
        raise
    records.write_json(folder.remote, {"sent_by": sent_by, "TrainingJobStatus": records.IN_PROGRESS})


def bring(plan: Plan) -> None:
    """Upload a plan's data and code, for whoever sends the request by the estimator. Raises UserError where AWS refuses."""
    with session.told("upload"):
        upload.upload(plan, session.client("s3", str(plan.job.region)), _say)


def stop(folder: records.RunFolder, reason: str) -> None:
    """Ask SageMaker to stop the job. Raises UserError where it could not be asked."""
    region = folder.read(folder.plan)["job"]["region"]
    with session.told("stop"):
        try:
            session.client("sagemaker", region).stop_training_job(TrainingJobName=folder.name)
        except Exception as error:
            if session.code(error) == "ValidationException" and refresh(folder):
                return  # it ended just before
            raise
    if not folder.stop_request.exists():
        records.write_json(folder.stop_request, {"reason": reason, "time": time.time()})


def refresh(folder: records.RunFolder) -> bool:
    """Bring what is new into the run's folder. Raises Unreachable."""
    with session.unreachable():
        return follow.refresh(folder)


def spend(folder: records.RunFolder) -> float | None:
    """US dollars so far, on demand: from the start of training, from which AWS bills."""
    per_hour = (folder.read(folder.plan).get("price") or {}).get("usd_per_hour")
    return prices.so_far(per_hour, folder.read(folder.remote))


def profile(folder: records.RunFolder, interval_ms: int | None) -> None:
    """Switch the system metrics of a running job: a sample every so many milliseconds, or None for off.

    Raises:
        UserError: the job is over, or AWS refuses.
    """
    plan = folder.read(folder.plan)
    change: dict[str, Any] = {"DisableProfiler": True}
    if interval_ms is not None:
        sent = plan["request"]
        output = sent["ProfilerConfig"].get("S3OutputPath") or sent["OutputDataConfig"]["S3OutputPath"]
        change = {"S3OutputPath": output, "ProfilingIntervalInMilliseconds": interval_ms, "DisableProfiler": False}
    with session.told("profile"):
        session.client("sagemaker", plan["job"]["region"]).update_training_job(
            TrainingJobName=folder.name, ProfilerConfig=change
        )


def _processes(job: Job, instance_type: str) -> int:
    """Training processes on a host: as the job says, else one a GPU, else one."""
    machine = catalog.instance(instance_type)
    gpus = machine.gpus if machine is not None else 0
    return job.compute.processes_per_host or max(1, gpus) if job.distribution != "none" else 1


def _model_in_s3(run: Path) -> str | None:
    """Where an earlier run's model lies in S3 already; None for a run of this machine."""
    folder = records.RunFolder(run)
    return folder.read(folder.outcome).get("model_uri")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
