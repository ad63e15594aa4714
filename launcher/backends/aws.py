"""The `aws` backend: SageMaker training jobs. launcher/aws/ does the work."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.aws import (
    catalog,
    follow,
    online,
    prices,
    requirements,
    secrets_manager,
    session,
    submit,
    upload,
    validation,
)
from launcher.aws import request as requests
from launcher.aws.plan import SageMakerPlan, summary
from launcher.backends.base import Backend
from launcher.config.hyperparameters import argument
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.config.redaction import REDACTED, secrets_in
from launcher.planner import groups, source_package
from launcher.planner.plan import HostPlan, Plan, Price, Upload
from launcher.planner.source_package import SourceFile
from launcher.record import records


class Aws(Backend):
    """Each host as an instance of a SageMaker training job."""

    name = "aws"
    plan_class = SageMakerPlan
    on_this_machine = False

    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """Issues of the request and of the source package."""
        issues = []
        if importlib.util.find_spec("boto3") is None:
            fix = "make, or pip install -e '.[aws]', in this kit's folder"
            issues.append(Issue(key="--on aws", found="not installed: boto3", fix=fix))
        issues += source_package.check_archive(files)
        lacking = requirements.lacking(job, files)
        if lacking:
            found = f"{requirements.FILE} lacks packages that the script imports and the image does not hold"
            fix = f"add to it: {', '.join(lacking)}"
            issues.append(Issue(key="source", level="warning", found=found, fix=fix))
        issues += secrets_manager.check_on_sagemaker(job)
        brings = any(file.path == requirements.FILE for file in files)
        return issues + validation.check(job, kit_script=job.source is None, requirements=brings)

    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """The source files, with a requirements.txt for what the image lacks."""
        return requirements.complete(job, files)

    def secrets_read_by_the_job(self, job: Job) -> dict[str, dict[str, str]]:
        return secrets_manager.names(job)

    def channels(self, job: Job, places: dict[str, str]) -> tuple[dict[str, str], tuple[Upload, ...]]:
        """Each channel's address, and the uploads of channels on this machine."""
        shown: dict[str, str] = {}
        uploads = []
        for name, given in job.inputs.items():
            if given.s3 is not None:
                shown[name] = given.s3
            elif given.source in ("fsx", "efs"):
                shown[name] = f"{given.source} {given.fsx or given.efs}:{given.path}"
            elif name in places and job.output is not None:
                whole = given.run is not None and given.student is None
                in_s3 = _model_in_s3(Path(places[name]).parent) if whole else None
                if in_s3 is None:
                    item = upload.planned_upload(job, name, Path(places[name]))
                    uploads.append(item)
                    in_s3 = item.target
                shown[name] = in_s3
        return shown, tuple(uploads)

    def request(self, job: Job, run_name: str, channels: dict[str, str]) -> dict[str, Any]:
        """The CreateTrainingJob request."""
        return requests.training_job(job, run_name, channels)

    def about(self, job: Job, request: dict[str, Any] | None) -> dict[str, str]:
        return {} if request is None else summary(request)

    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        return requests.toolkit_hyperparameters(job, run_name)

    def timm_version(self, job: Job) -> str | None:
        """The version that the source package's requirements.txt installs in one of AWS's images."""
        return requirements.timm_version(job)

    def price(self, job: Job) -> Price:
        return prices.price(job)

    def group_prices(self, job: Job) -> dict[str, float]:
        return prices.of_groups(job)

    def check_online(self, plan: Plan) -> list[Issue]:
        return online.check(plan)

    def machine(self, job: Job) -> str:
        named = job.image.model_dump_json(exclude_none=True) if job.image is not None else "no image"
        types = dict.fromkeys(place.instance_type or "no instance type" for place in groups.places(job))
        return f"{', '.join(types)}, {named}"

    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host, with the container toolkit's command (runner.py and smdataparallel.py of sagemaker-training 5.1.4)."""
        places = groups.places(job)
        training = [place.name for place in places if place.rank is not None]
        arguments = [text for name in sorted(job.hyperparameters) for text in argument(name, job.hyperparameters[name])]
        planned = []
        for place in places:
            processes = _processes(job, place.instance_type)
            if job.distribution == "none" or place.rank is None:
                command = ["python", job.script, *arguments]
            elif job.distribution == "torchrun":
                rendezvous = ["--master_addr", training[0], "--master_port", "7777", "--node_rank", str(place.rank)]
                command = ["torchrun", "--nnodes", str(len(training)), "--nproc_per_node", str(processes)]
                command += [*(rendezvous if len(training) > 1 else []), job.script, *arguments]
            elif place.rank == 0:
                spread = ",".join(f"{other}:{processes}" for other in training)
                command = ["mpirun", "--host", spread, "-np", str(self.world_size(job))]
                command += [*(job.custom_mpi_options or "").split(), "smddprun", "python", "-m", "mpi4py"]
                command += [job.script, *arguments]
            else:
                command = ["sshd", f"# mpirun on {training[0]} starts the processes here"]
            planned.append(HostPlan(place.name, place.name, tuple(command), dict(job.environment), place.group))
        return tuple(planned)

    def hosts_share_a_machine(self) -> bool:
        """On an emulator's machine they do."""
        return session.is_emulated()

    def world_size(self, job: Job) -> int:
        """Training processes on all hosts that train."""
        if job.distribution == "none":
            return 1
        return sum(_processes(job, place.instance_type) for place in groups.places(job) if place.rank is not None)

    def start(self, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
        """Upload data, code and record, and create the training job, which outlives this process.

        `lock` and `lifeline` are unused: there is no supervisor.

        Raises:
            UserError: AWS refused; the run is recorded as not started.
        """
        assert plan.request is not None
        region = str(plan.job.region)
        try:
            with session.as_user_error("run"):
                client = session.client("s3", region)
                upload.upload(plan, client, _say)
                upload.upload_record(plan, folder, client)
        except BaseException as error:  # Ctrl-C too: the record says that nothing runs
            _not_started(plan, folder, error)
            raise
        if folder.stop_request.exists():
            _not_started(plan, folder, "stopped before the job was created", records.STOPPED)
            return
        sent: dict[str, Any] = {"TrainingJobStatus": records.IN_PROGRESS, "sent": time.time()}
        try:
            with session.as_user_error("run"):
                sent["sent_by"] = submit.create(plan)
        except BaseException as error:
            there = submit.is_there(plan)
            if there is False:
                _not_started(plan, folder, error)
                raise
            sent["sent_by"] = "unknown"  # the answer was lost
            self._sent(folder, sent)
            if there is None:
                why = error.issues[0].found if isinstance(error, UserError) else error
                fix = f"launcher attach {plan.name} asks SageMaker again"
                raise mistake("run", f"{plan.name} may have been started: {why}", fix) from error
            if not isinstance(error, Exception):
                _say(f"{plan.name} has started and goes on: launcher stop {plan.name} stops it")
                raise
            return
        self._sent(folder, sent)

    def _sent(self, folder: records.RunFolder, sent: dict[str, Any]) -> None:
        """Record that the job was created; stop it where that was asked for meanwhile, which `stop` leaves to this."""
        records.write_json(folder.remote, sent)
        if folder.stop_request.exists():
            self.stop(folder, "")

    def upload(self, plan: Plan) -> None:
        with session.as_user_error("upload"):
            upload.upload(plan, session.client("s3", str(plan.job.region)), _say)

    def stop(self, folder: records.RunFolder, reason: str) -> None:
        """Ask SageMaker to stop the job. During the upload, the job is then not created.

        Raises:
            UserError: SageMaker did not answer; the job continues.
        """
        region = folder.read(folder.plan)["job"]["region"]
        first = folder.request_stop(reason)
        if not folder.remote.exists():
            return  # `start` looks before it creates the job, and again when it has
        try:
            with session.as_user_error("stop"):
                try:
                    session.client("sagemaker", region).stop_training_job(TrainingJobName=folder.name)
                except session.errors() as error:
                    if session.code(error) != "ValidationException":
                        raise
                    self.refresh(folder)  # it ended just before, or is gone
        except UserError:
            if first:
                folder.stop_request.unlink()
            raise

    def refresh(self, folder: records.RunFolder) -> bool:
        with session.unreachable():
            return follow.refresh(folder)

    def spend(self, folder: records.RunFolder) -> float | None:
        """US dollars so far, on demand, from TrainingStartTime on, as AWS bills."""
        per_hour = (folder.read(folder.plan).get("price") or {}).get("usd_per_hour")
        return prices.so_far(per_hour, folder.read(folder.remote))

    def profile(self, folder: records.RunFolder, interval_ms: int | None) -> None:
        if folder.state() in records.OVER:
            raise mistake("run", f"{folder.name} is over: {folder.state()}", "switch the metrics of a running job only")
        plan = folder.read(folder.plan)
        change: dict[str, Any] = {"DisableProfiler": True}
        if interval_ms is not None:
            sent = plan["request"]
            output = sent["ProfilerConfig"].get("S3OutputPath") or sent["OutputDataConfig"]["S3OutputPath"]
            change = {"S3OutputPath": output, "ProfilingIntervalInMilliseconds": interval_ms, "DisableProfiler": False}
        with session.as_user_error("profile"):
            session.client("sagemaker", plan["job"]["region"]).update_training_job(
                TrainingJobName=folder.name, ProfilerConfig=change
            )

    def why_not_resumed(self, job: Mapping[str, Any], folder: records.RunFolder) -> Issue | None:
        if job.get("checkpoints") is not None:
            return None
        fix = f"launcher replay {folder.name} starts from the beginning; add checkpoints: s3://your-bucket/prefix to resume later runs"
        return Issue(key="checkpoints", found=f"{folder.name} wrote no checkpoints to S3", fix=fix)

    def room_for_checkpoints(self, job: Mapping[str, Any]) -> str | None:
        if job.get("checkpoints") is not None or job.get("output") is None:
            return None
        return f"{job['output'].rstrip('/')}/{job['name']}/checkpoints"

    def shared_checkpoints(self, job: Job) -> str:
        return job.checkpoints.s3 if job.checkpoints is not None else ""


def _not_started(plan: Plan, folder: records.RunFolder, why: BaseException | str, state: str = records.FAILED) -> None:
    """Record a run that did not start. AWS's message may quote the request, so secrets are redacted."""
    text = str(why) or type(why).__name__
    for secret in secrets_in(plan.job.environment).values():
        text = text.replace(secret, REDACTED)
    key = "stop_reason" if state == records.STOPPED else "failure"
    records.write_json(folder.outcome, {"state": state, key: f"not started: {text}"})


def _processes(job: Job, instance_type: str) -> int:
    """Training processes on a host: the job's number, else one per GPU, else 1."""
    machine = catalog.instance(instance_type)
    gpus = machine.gpus if machine is not None else 0
    return job.compute.processes_per_host or max(1, gpus) if job.distribution != "none" else 1


def _model_in_s3(run: Path) -> str | None:
    """The address of an earlier run's model in S3; None for a run on this machine."""
    folder = records.RunFolder(run)
    return folder.read(folder.outcome).get("model_uri")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
