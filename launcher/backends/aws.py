"""The `aws` backend: SageMaker training jobs. launcher/aws/ does the work."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.aws import (
    accounts,
    catalog,
    checkpoint_prefix,
    follow,
    online,
    prices,
    requirements,
    secrets_manager,
    session,
    submit,
    upload,
    validation,
    warm_pool,
)
from launcher.aws import request as requests
from launcher.aws.plan import SageMakerPlan, summary
from launcher.backends.base import Backend, in_s3_only
from launcher.backends.interrupts import interruptible
from launcher.config.hyperparameters import argument
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.config.redaction import redact_text
from launcher.planner import groups, source_package
from launcher.planner.plan import HostPlan, Plan, Price, Upload
from launcher.planner.source_package import SourceFile
from launcher.record import disk, records

UNKNOWN_JOB_SECONDS = 60
"""Seconds for which a stop is repeated while SageMaker does not know the job yet."""

SECONDS_BETWEEN_STOPS = 3


class Aws(Backend):
    """Each host as an instance of a SageMaker training job."""

    name = "aws"
    plan_class = SageMakerPlan
    on_this_machine = False

    def plan(self, job: Job, source: Path | None = None) -> Plan:
        """The plan, with the checksum of its code, by which `upload` sees changes."""
        made = super().plan(job, source)
        if made.request is None:
            return made
        return replace(made, code_checksum=source_package.code_checksum(made.files))

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
        """Each channel's address, and the uploads of channels on this machine.

        Raises:
            UserError: an earlier run's model is neither on this machine nor where the job's role may read it; or from `planned_upload`.
        """
        shown: dict[str, str] = {}
        uploads = []
        for name, given in job.inputs.items():
            if given.s3 is not None:
                shown[name] = given.s3
            elif given.source in ("fsx", "efs"):
                shown[name] = f"{given.source} {given.fsx or given.efs}:{given.path}"
            elif name in places and job.output is not None:
                place = Path(places[name])
                whole = given.run is not None and given.student is None
                in_s3 = _model_in_s3(records.RunFolder(place.parent), job) if whole else None
                if in_s3 is None:
                    if whole and not place.exists():
                        raise UserError([in_s3_only(name, place)])
                    item = upload.planned_upload(job, name, place)
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

    def checked(self, planned: Plan) -> Plan:
        """The plan with the issues of `check_online`. A run that left nothing to resume from is dropped from `resumes`."""
        made = super().checked(planned)
        left_none = any(issue.key == checkpoint_prefix.RESUME for issue in made.issues)
        return replace(made, resumes=None) if left_none else made

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
        """True on an emulator."""
        return bool(session.emulator())

    def world_size(self, job: Job) -> int:
        """Training processes on all hosts that train."""
        if job.distribution == "none":
            return 1
        return sum(_processes(job, place.instance_type) for place in groups.places(job) if place.rank is not None)

    def start(self, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
        """Upload data, code and record, and create the training job, which outlives this process.

        The code is the record's copy, so that a change of the source folder reaches neither the job nor the bucket.
        The job is recorded as sent before it is sent: whatever happens then, it may be running, and `refresh` finds out.
        There is no supervisor. This process holds the lock until the job is created, and `lifeline` is unused.

        Raises:
            UserError: AWS refused, the recorded code holds what looks like a secret, or a job that was started meanwhile has the
                checkpoint prefix, and the run is recorded as not started; or a stop was requested meanwhile, and the created job
                could not be stopped.
        """
        assert plan.request is not None
        region = str(plan.job.region)
        try:
            with interruptible(), session.as_user_error("run"):
                client = session.client("s3", region)
                upload.upload(plan, upload.recorded_code(folder), client, _print)
                upload.upload_record(plan, folder, client)
                account = session.account(region)
                _refuse_used_checkpoints(plan)
        except BaseException as error:  # Ctrl-C too: the record says that nothing runs
            _not_started(plan, folder, error)
            raise
        if folder.stop_request.exists():
            _not_started(plan, folder, "stopped before the job was created", records.STOPPED)
            return
        disk.hold_reserve(folder.reserve)
        whose = {"account": account, "emulator": session.emulator(), "sent_by": submit.sender()}
        records.write_json(folder.remote, {"TrainingJobStatus": records.IN_PROGRESS, "sent": time.time(), **whose})
        try:
            with session.as_user_error("run"):
                submit.create(plan)
        except BaseException as error:
            is_there = submit.is_there(plan)
            if not is_there and submit.is_refusal(error):
                _not_started(plan, folder, error)
                raise
            # botocore's attempts may have taken minutes, and the last may just have got through
            follow.note_sent(folder)
            _say_that_it_may_run(plan.name, error, is_there)
            self._hand_over(folder, lock)
            if not isinstance(error, UserError):
                raise
        else:
            self._hand_over(folder, lock)

    def _hand_over(self, folder: records.RunFolder, lock: int) -> None:
        """Release the lock, so that `stop` asks SageMaker from now on, and carry out a stop that was requested before.

        The order matters: a `stop` that found the lock held has already written its request, so it is seen here.
        """
        fcntl.flock(lock, fcntl.LOCK_UN)
        if folder.stop_request.exists():
            self._stop_job(folder, is_first=True)

    def upload(self, plan: Plan) -> None:
        code = upload.planned_code(plan)
        with session.as_user_error("upload"):
            upload.upload(plan, code, session.client("s3", str(plan.job.region)), _print)

    def stop(self, folder: records.RunFolder, reason: str) -> None:
        """Ask SageMaker to stop the job, for up to UNKNOWN_JOB_SECONDS if it does not know it yet. If another process is creating it, that
        process stops it once it is created.

        A folder that cannot be written, a colleague's or on a full disk, does not keep the job going: SageMaker is asked all the same.

        Raises:
            UserError: SageMaker did not answer; the job continues.
        """
        try:
            is_first = folder.request_stop(reason)
        except OSError as error:  # nor would a process that is creating the job see the request
            self._stop_job(folder, is_first=True)
            _print(
                f"{folder.name}: SageMaker stops it; the request could not be noted in {folder.path}: {error.strerror}"
            )
            return
        if not folder.supervisor_lives():
            self._stop_job(folder, is_first)

    def _stop_job(self, folder: records.RunFolder, is_first: bool) -> None:
        """Ask SageMaker to stop the job. If it does not answer, say so, and take back the recorded request if it is the first.

        Args:
            is_first: SageMaker has received no earlier request.
        """
        try:
            with session.as_user_error("stop"):
                _send_stop(folder)
        except BaseException as error:  # Ctrl-C too, while SageMaker does not answer
            goes_on = f"{folder.name} was asked to stop before, and may go on"
            if is_first:
                with contextlib.suppress(OSError):  # it could not be written either
                    folder.stop_request.unlink(missing_ok=True)
                goes_on = f"{folder.name} was NOT stopped and goes on"
            again = f"launcher stop {folder.name} tries again"
            if not isinstance(error, UserError):
                _print(f"{goes_on}, as far as is known: interrupted before SageMaker accepted the stop; {again}")
                raise
            issue = error.issues[0]
            raise mistake("stop", f"{goes_on}: {issue.found}", f"{issue.fix}; then {again}") from error

    def refresh(self, folder: records.RunFolder) -> bool:
        with session.unreachable():
            return follow.refresh(folder)

    def spend(self, folder: records.RunFolder) -> float | None:
        """On-demand US dollars so far, from TrainingStartTime on, as AWS bills."""
        per_hour = (folder.read(folder.plan).get("price") or {}).get("usd_per_hour")
        return prices.so_far(per_hour, folder.read(folder.remote))

    def remaining_costs(self, folder: records.RunFolder) -> str:
        return warm_pool.text_of(folder)

    def settle(self, folder: records.RunFolder) -> None:
        with session.unreachable():
            warm_pool.settle(folder)

    def usd_after_end(self, folder: records.RunFolder) -> float:
        return warm_pool.usd_at_most(folder)

    def release(self, folder: records.RunFolder) -> str:
        with session.as_user_error("stop"):
            return warm_pool.end(folder)

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
        kept = given = _prefix(job)
        with contextlib.suppress(records.DamagedRecord):  # reported where the job is read
            kept = _prefix(folder.read_job())
        if kept and given and kept != given:
            found = f"{given}, and {folder.name} kept its checkpoints under {kept}"
            anew = f"launcher replay {folder.name} {shlex.quote(f'checkpoints={given}')}"
            fix = f"leave checkpoints as it was; or {anew} starts from the beginning"
            return Issue(key="checkpoints", found=found, fix=fix)
        if kept and given:
            return None
        fix = f"launcher replay {folder.name} starts anew; add checkpoints: s3://your-bucket/prefix/checkpoints to resume later ones"
        return Issue(key="checkpoints", found=f"{folder.name} wrote no checkpoints to S3", fix=fix)

    def room_for_checkpoints(self, job: Mapping[str, Any]) -> str | None:
        if job.get("checkpoints") is not None or job.get("output") is None:
            return None
        return f"{job['output'].rstrip('/')}/{job['name']}/checkpoints"

    def shared_checkpoints(self, job: Job) -> str:
        return job.checkpoints.s3 if job.checkpoints is not None else ""


def _prefix(job: Mapping[str, Any]) -> str:
    """Where a job keeps its checkpoints in S3; "": nowhere."""
    kept = job.get("checkpoints") or {}
    return str(kept["s3"] if isinstance(kept, Mapping) else kept).rstrip("/") if kept else ""


def _refuse_used_checkpoints(plan: Plan) -> None:
    """Look once more for running jobs with the plan's checkpoint prefix: another launcher may have started one during the upload.

    Raises:
        UserError: there is one.
    """
    issues = online.check_users_of_checkpoints(plan.job)
    errors = [issue for issue in issues if issue.level == "error"]
    if errors:
        raise UserError(errors, f"the plan for {plan.job.name}")
    for issue in issues:
        if issue not in plan.issues:  # the plan's own are printed already
            _print(f"{issue.level}: {issue}")


def _send_stop(folder: records.RunFolder) -> None:
    """Send StopTrainingJob; repeatedly while SageMaker does not know the job yet: a new one takes a moment to be known.

    Raises:
        botocore's errors, and UserError if SageMaker does not know the job.
    """
    known, now = folder.read(folder.remote), time.time()
    deadline = min(now + UNKNOWN_JOB_SECONDS, known.get("sent", 0.0) + follow.UNKNOWN_SECONDS)
    unknown = _send_stop_once(folder)
    if unknown is not None and now < deadline:
        _print(
            f"{folder.name}: SageMaker does not know the job yet; the stop is repeated for up to {deadline - now:.0f} s"
        )
    while unknown is not None:
        if time.time() >= deadline:
            fix = "wait a minute if it has just been started"
            raise mistake("stop", "SageMaker does not know such a job", fix) from unknown
        time.sleep(SECONDS_BETWEEN_STOPS)
        unknown = _send_stop_once(folder)


def _send_stop_once(folder: records.RunFolder) -> Exception | None:
    """Send StopTrainingJob. Returns SageMaker's error if it does not know the job, and the record does not say that it is over."""
    region = folder.read(folder.plan)["job"]["region"]
    try:
        session.client("sagemaker", region).stop_training_job(TrainingJobName=folder.name)
    except session.errors() as error:
        if session.code(error) != "ValidationException":
            raise
        follow.refresh(folder)  # it ended just before, is gone, or is another account's
        return error if session.is_unknown_job(error) and not folder.outcome.exists() else None
    return None


def _say_that_it_may_run(name: str, error: BaseException, is_there: bool) -> None:
    """Say what is known about a job whose creation SageMaker did not confirm."""
    if isinstance(error, UserError) and is_there:
        return  # the answer was lost: it is followed like any other
    started = "has started and goes on" if is_there else "may have been started"
    why = f": {error.issues[0].found}" if isinstance(error, UserError) else ""
    _print(f"{name} {started}{why}; launcher attach {name} follows it, launcher stop {name} stops it")


def _not_started(plan: Plan, folder: records.RunFolder, why: BaseException | str, state: str = records.FAILED) -> None:
    """Record a run that did not start. AWS's message may quote the request, so secrets are redacted."""
    for file in (folder.remote, folder.reserve):
        file.unlink(missing_ok=True)
    text = redact_text(str(why) or type(why).__name__, plan.job.environment)
    key = "stop_reason" if state == records.STOPPED else "failure"
    records.write_json(folder.outcome, {"state": state, key: f"not started: {text}"})


def _processes(job: Job, instance_type: str) -> int:
    """Training processes on a host: the job's number, else one per GPU, else 1."""
    machine = catalog.instance(instance_type)
    gpus = machine.gpus if machine is not None else 0
    return job.compute.processes_per_host or max(1, gpus) if job.distribution != "none" else 1


def _model_in_s3(run: records.RunFolder, job: Job) -> str | None:
    """The S3 address of an earlier run's model; None for a run on this machine, in another region or account, or on an emulator that
    the environment does not name."""
    remote = run.read(run.remote)
    if not remote or run.read(run.plan)["job"].get("region") != job.region:
        return None
    known = {accounts.sent_to(remote), session.account_in(job.role or "")} - {""}
    if len(known) > 1 or remote.get("emulator", "") != session.emulator():
        return None
    return run.read(run.outcome).get("model_uri")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
