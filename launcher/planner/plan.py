"""Job -> Plan: everything that a run will do, worked out in full and without effect."""

from __future__ import annotations

import json
import secrets
import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.backends.base import HostPlan, Price, Upload
from launcher.config import hyperparameters
from launcher.config.entrypoints import entrypoints_folder
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.config.loading import load
from launcher.config.redaction import redact
from launcher.planner import validation
from launcher.planner.source_package import SourceFile, source_files
from launcher.runner import display
from launcher.show.text import counted, indent


@dataclass(frozen=True)
class Plan:
    """A job worked out in full. `print(plan)` is for people, as is showing it in a notebook; `plan.to_dict()` for machines.

    >>> plan = launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True))
    >>> print(plan)
    plan quickstart-...
      runs on     process, 1 host, at most 1 h
      algo-1      127.0.0.1: ...
    >>> sorted(plan.channels)
    ['teacher', 'train', 'validation']
    """

    name: str
    """The run's name, fixed here: job name, UTC time, four letters."""
    planned: str
    """When, ISO 8601 in UTC."""
    backend: str
    job: Job
    source: Path
    """The folder that holds the script."""
    hosts: tuple[HostPlan, ...]
    hyperparameters: dict[str, str]
    """As they travel: JSON texts, with the toolkit's own."""
    channels: dict[str, str]
    """Channel -> what it shows: a folder or file on this machine, or for SageMaker its place in S3 or on a file system."""
    files: tuple[SourceFile, ...]
    issues: tuple[Issue, ...]
    uploads: tuple[Upload, ...] = ()
    """Data of this machine that goes to S3 before the job starts."""
    request: dict[str, Any] | None = None
    """The exact CreateTrainingJob request, secrets included; None where SageMaker is not asked, or the plan has errors."""
    price: Price | None = None
    """On SageMaker: what it costs at most."""
    pinned: dict[str, str] = field(default_factory=dict)
    """Channel -> the run whose model it shows, by its full name."""
    replay_of: str | None = None
    """The run that this one repeats."""
    resumes: str | None = None
    """The run whose checkpoints its hosts begin with."""
    checked: bool = False
    """Whether `check` has looked online."""

    @property
    def errors(self) -> tuple[Issue, ...]:
        return tuple(issue for issue in self.issues if issue.level == "error")

    def kept_job(self) -> dict[str, Any]:
        """The job as it is kept and shown: without its secrets, and with every `run` by its full name."""
        kept = {**self.job.model_dump(exclude_none=True), "environment": redact(self.job.environment)}
        for channel, run in self.pinned.items():
            kept["inputs"][channel]["run"] = run
        return kept

    def kept_request(self) -> dict[str, Any] | None:
        """The request as it is kept and shown: without its secrets."""
        if self.request is None or "Environment" not in self.request:
            return self.request
        return {**self.request, "Environment": redact(self.request["Environment"])}

    def estimator(self, boto_session: Any = None) -> tuple[Any, dict[str, Any]]:
        """The plan as a real sagemaker.pytorch.PyTorch (SDK v2) and its inputs: `estimator.fit(inputs, job_name=plan.name)`
        sends `request`. What `uploads` names and the code must be in S3 by then: `launcher.upload(plan)` does it.

        Args:
            boto_session: a boto3.Session; None: a new one in the job's region.

        Raises:
            UserError: the plan has errors, is not for SageMaker, or the SDK is not installed.
        """
        refuse_errors(self)
        if self.request is None:
            raise mistake("--on", f"a plan for {self.backend} has no estimator", "plan(job, on='aws')")
        from launcher.aws import estimator, session

        estimator.require_sdk()
        boto_session = boto_session or session.boto_session(str(self.job.region))
        made = estimator.estimator(self.job, self.name, estimator.session(self.job, boto_session))
        return made, estimator.inputs(self.job, self.channels)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, complete."""
        return {
            "name": self.name,
            "planned": self.planned,
            "backend": self.backend,
            "job": self.kept_job(),
            "source": str(self.source),
            "hosts": [{**asdict(host), "environment": redact(host.environment)} for host in self.hosts],
            "hyperparameters": self.hyperparameters,
            "channels": self.channels,
            "files": [{"path": file.path, "size": file.size} for file in self.files],
            "issues": [issue.to_dict() for issue in self.issues],
            "uploads": [{**asdict(upload), "source": str(upload.source)} for upload in self.uploads],
            "request": self.kept_request(),
            "price": self.price.to_dict() if self.price else None,
            "differences": dict(backends.get(self.backend).DIFFERENCES),
            "replay_of": self.replay_of,
            "resumes": self.resumes,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        return f"<plan {self.name}: {self.backend}, {counted(len(self.errors), 'error')}>"

    def _repr_html_(self) -> str:
        return display.plan(self)

    def __str__(self) -> str:
        total = sum(file.size for file in self.files)
        widest = max((len(file.path) for file in self.files), default=0)
        hosts = counted(len(self.hosts), "host")
        lines = [
            f"plan {self.name}",
            f"  runs on     {self.backend}, {hosts}, at most {self.job.compute.max_hours:g} h",
        ]
        if self.price is not None:
            lines += [f"  price       {self.price.text}"]
        if self.resumes is not None:
            lines += [f"  resumes     {self.resumes}, from its last checkpoint"]
        lines += [
            f"  {host.name:<11} {f'{host.group}, ' if host.group else ''}{host.address}: {shlex.join(host.command)}"
            for host in self.hosts
        ]
        if self.hosts and self.hosts[0].environment:
            lines += [
                "  environment "
                + " ".join(
                    f"{name}={shlex.quote(value)}" for name, value in sorted(redact(self.hosts[0].environment).items())
                )
            ]
        lines += [f"  channel     {name}: {place}" for name, place in self.channels.items()]
        lines += [
            f"  upload      {upload.source}: {counted(upload.files, 'file')}, "
            f"{upload.size / 2**20:.1f} MiB, to {upload.target}"
            for upload in self.uploads
        ]
        lines += _about_the_request(self.kept_request())
        backend = backends.get(self.backend)
        lines += [f"  {name:<11} {text}" for name, text in backend.about(self.job).items()]
        lines += [f"  code        {len(self.files)} files, {total / 1024:.1f} KiB, from {self.source}"]
        lines += [f"              {file.path:<{widest}} {file.size:>8} B" for file in self.files]
        for level in ("error", "warning", "not checked"):
            of_level = [issue for issue in self.issues if issue.level == level]
            if of_level:
                lines += [
                    f"  {level}{'s' if level != 'not checked' and len(of_level) > 1 else ''}",
                    *(indent(str(issue), "    ") for issue in of_level),
                ]
        if self.hosts and backend.DIFFERENCES:
            lines += [
                "  differs from SageMaker in",
                *(f"    {name}: {why}" for name, why in backend.DIFFERENCES.items()),
            ]
        if not self.errors:
            lines += ["  nothing was started; `launcher run` with the same arguments does it"]
        return "\n".join(lines)


def plan(job: Job, *, on: str = "process") -> Plan:
    """Work a job out in full. Nothing is written, started, imported or asked over a network.

    >>> plan = launcher.plan(launcher.load("configs/kt_food_tag.yaml"), on="aws")
    >>> plan.errors, plan.request["ResourceConfig"]["InstanceCount"]
    ((), 4)

    Args:
        job: what to run.
        on: the backend's name.

    Returns:
        A Plan; its `issues` hold everything that preflight found, errors too.

    Raises:
        UserError: no such backend.
    """
    backend = backends.get(on)
    now = datetime.now(timezone.utc)
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))  # random's seed is the user's
    name = f"{job.name}-{now:%Y%m%d-%H%M%S}-{letters}"
    source = _source(job)
    places, issues = validation.places(job)
    files, file_issues = source_files(source) if source.is_dir() else ([], [])
    issues += file_issues
    files = backend.source_files(job, files)
    issues += validation.check(job, source, files, backend.world_size(job))
    issues += backend.check(job, source, files)
    try:
        channels, uploads = backend.channels(job, places)
    except UserError as error:
        channels, uploads = {}, ()
        issues += error.issues
    possible = not any(issue.level == "error" for issue in issues)
    request = backend.request(job, name, channels) if possible else None
    encoded = {**job.hyperparameters, **backend.toolkit_hyperparameters(job, name)} if possible else {}
    return Plan(
        name=name,
        planned=now.isoformat(timespec="microseconds"),
        backend=on,
        job=job,
        source=source,
        hosts=backend.hosts(job) if possible else (),
        hyperparameters=hyperparameters.encode(encoded),
        channels=channels,
        files=tuple(files),
        issues=tuple(issues),
        uploads=uploads,
        request=request,
        price=backend.price(job),
        pinned={
            name: Path(places[name]).parent.name for name, given in job.inputs.items() if given.run and name in places
        },
    )


def _source(job: Job) -> Path:
    """The folder that holds the script. Raises UserError where it is no path at all."""
    if job.source is None:
        return entrypoints_folder()
    try:
        path = Path(job.source).expanduser().absolute()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise mistake("source", f"{job.source[:80]}: {error}", "check the path") from None
    return path


def check(planned: Plan) -> Plan:
    """The plan with what a look online shows: read-only requests to AWS about data, role, network, quota and price.

    Where something could not be looked at, the issue says "not checked". A plan for this machine comes back as it is.

    >>> plan = launcher.check(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws"))
    >>> plan.checked, plan.errors
    (True, ())
    """
    if planned.errors:
        return planned
    issues = backends.get(planned.backend).check_online(planned)
    price = backends.get(planned.backend).price(planned.job)
    return replace(planned, issues=(*planned.issues, *issues), price=price, checked=True)


def plan_config(path: str | Path, overrides: Sequence[str] = (), *, on: str = "process", smoke: bool = False) -> Plan:
    """`load` and `plan` in one, so that the mistakes of both come at once.

    Raises:
        UserError: the file is no job; what is wrong with the rest of it is told too.
    """
    try:
        return plan(load(path, overrides, smoke=smoke), on=on)
    except UserError as error:
        if error.rest is None:
            raise
        known = [issue.key.split(" (line")[0] for issue in error.issues]
        rest = [
            issue
            for issue in plan(error.rest, on=on).errors
            if not any(issue.key == key or key.startswith(f"{issue.key}.") for key in known)
        ]
        raise UserError([*error.issues, *rest], error.title) from None


def refuse_errors(planned: Plan) -> None:
    """Raise a UserError with all of a plan's errors, if there are any."""
    if planned.errors:
        raise UserError(planned.errors, f"the plan for {planned.job.name}")


def _about_the_request(request: dict[str, Any] | None) -> list[str]:
    """What the request says and nothing else of the plan shows, for people."""
    if request is None:
        return []
    about = {
        "image": request["AlgorithmSpecification"]["TrainingImage"],
        "role": request["RoleArn"],
        "output": request["OutputDataConfig"]["S3OutputPath"],
    }
    if "CheckpointConfig" in request:
        about["checkpoints"] = request["CheckpointConfig"]["S3Uri"]
    if "VpcConfig" in request:
        about["network"] = ", ".join([*request["VpcConfig"]["Subnets"], *request["VpcConfig"]["SecurityGroupIds"]])
    if request.get("EnableManagedSpotTraining"):
        about["spot"] = f"waits and trains at most {request['StoppingCondition']['MaxWaitTimeInSeconds'] / 3600:g} h"
    profiler = request["ProfilerConfig"]
    interval = profiler.get("ProfilingIntervalInMilliseconds")
    rules = [rule["RuleConfigurationName"] for rule in request.get("ProfilerRuleConfigurations", [])]
    about["profiling"] = (
        "off (profiling: {system_interval_ms: 500} samples CPU, GPU, memory and I/O)"
        if profiler["DisableProfiler"]
        else ", ".join([f"system metrics every {interval or 500} ms", *rules])
    )
    about["request"] = "launcher plan … --json shows CreateTrainingJob in full"
    return [f"  {name:<11} {text}" for name, text in about.items()]
