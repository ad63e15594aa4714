"""Plan: everything that a run will do, worked out without side effects, and the values it is made of."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.config.redaction import redact
from launcher.config.students import students
from launcher.planner import plan_text
from launcher.planner.plan_text import Part
from launcher.planner.source_package import SourceFile
from launcher.show import html
from launcher.show.text import counted, dollars, file_size

START = "launcher.run(plan)"
"""What starts a plan in Python."""

STOP_SECONDS = 120
"""Seconds that SageMaker leaves a job between SIGTERM, at max_hours at the latest, and SIGKILL. They are billed.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html"""


def longest_hours(max_hours: float) -> float:
    """Hours after which a job's processes are gone at the latest: `compute.max_hours` plus the time that they have to stop."""
    return max_hours + STOP_SECONDS / 3600


@dataclass(frozen=True)
class HostPlan:
    """One host of a run."""

    name: str
    """algo-1, algo-2 …, as on SageMaker; the run folder uses the same names."""
    address: str
    """The value of SM_CURRENT_HOST."""
    command: tuple[str, ...]
    """What the container toolkit will start there. `<free port>` stands for the port that the run picks."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the backend sets for the toolkit. The toolkit adds the SM_* variables of the job."""
    group: str = ""
    """The instance group, if the job has groups."""

    def text(self) -> str:
        """One line for people: what it runs."""
        where = ", ".join(filter(None, [self.group, self.address if self.address != self.name else ""]))
        command = shlex.join(self.command)
        return f"{where}: {command}" if where else command


@dataclass(frozen=True)
class GroupPlan:
    """One instance group of a run."""

    name: str
    instance_type: str
    hosts: tuple[str, ...]
    """Their names: algo-1 …"""
    does: str
    """trains, preprocesses (and runs the teacher), or runs the script."""
    usd_per_hour: float | None = None
    """For all its hosts, on demand; None: unknown, or free."""

    def text(self, max_hours: float | None) -> str:
        """One line for people. `max_hours`: of the job; None: it is free."""
        price = ""
        if max_hours is not None and self.usd_per_hour is None:
            price = "; price not known"
        elif max_hours is not None and self.usd_per_hour is not None:
            most = dollars(self.usd_per_hour * longest_hours(max_hours))
            price = f"; at most {most}, at {dollars(self.usd_per_hour)} an hour"
        names = ", ".join(self.hosts) if len(self.hosts) < 4 else f"{self.hosts[0]} to {self.hosts[-1]}"
        return f"{self.name} {self.does}: {counted(len(self.hosts), 'host')} of {self.instance_type} ({names}){price}"


@dataclass(frozen=True)
class Upload:
    """Data on this machine that a run uploads before it starts."""

    source: Path
    """A file or a folder."""
    target: str
    """An s3:// address: the object's for a file, the prefix (it ends with /) for a folder."""
    files: int
    size: int
    """Bytes."""

    def text(self, source: str) -> str:
        """One line for people. `source` is how it names the source."""
        return f"{source}: {counted(self.files, 'file')}, {file_size(self.size)}, to {self.target}"


@dataclass(frozen=True)
class Price:
    """What all hosts of a job cost together."""

    per_hour: float | None
    """US dollars an hour for the whole cluster, on demand; None: unknown."""
    ceiling: float | None
    """Maximum US dollars until the results are uploaded: `longest_hours` of the cluster plus the warm pool's time; None: unknown."""
    text: str
    """One line for people: the price and its source, or how to find it out."""

    def to_dict(self) -> dict[str, Any]:
        return {"usd_per_hour": self.per_hour, "ceiling_usd": self.ceiling, "text": self.text}


@dataclass(frozen=True)
class Plan:
    """A job worked out in full. `print(plan)` and a notebook show it to people; `plan.to_dict()` is for machines.

    >>> plan = launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True))
    >>> print(plan)
    plan quickstart-...
      runs on     process, 1 host, at most 1 h
      algo-1      127.0.0.1: ...
    >>> sorted(plan.channels)
    ['teacher', 'train', 'validation']
    """

    name: str
    """The run's name, fixed when planned: job name, UTC time, four letters."""
    planned: str
    """When, ISO 8601 in UTC."""
    backend: str
    job: Job
    source: Path
    """The folder that holds the script."""
    hosts: tuple[HostPlan, ...]
    hyperparameters: dict[str, str]
    """Name -> value as JSON, with the toolkit's own."""
    channels: dict[str, str]
    """Channel -> where its data are: a folder or file on this machine, or for SageMaker in S3 or on a file system."""
    files: tuple[SourceFile, ...]
    issues: tuple[Issue, ...]
    uploads: tuple[Upload, ...] = ()
    """Data on this machine that goes to S3 before the job starts."""
    request: dict[str, Any] | None = None
    """The exact CreateTrainingJob request, secrets included; None for other backends and if the plan has errors."""
    price: Price | None = None
    """What the job costs at most; None if it runs on this machine."""
    groups: tuple[GroupPlan, ...] = ()
    """The instance groups, if the job has any. `hosts` lists those that train first."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What else the backend prints, by name."""
    differences: Mapping[str, str] = field(default_factory=dict)
    """Environment variable or subject -> how it differs from SageMaker, and why."""
    pinned: dict[str, str] = field(default_factory=dict)
    """Channel -> full name of the run whose model it holds."""
    replay_of: str | None = None
    """The run that this one replays."""
    resumes: str | None = None
    """The run whose checkpoints this one starts from."""
    checked: bool = False
    """Whether `check` has looked online."""
    code_checksum: str = ""
    """`source_package.code_checksum` of `files` when planned; "" for other backends than SageMaker and if the plan has errors."""

    @property
    def errors(self) -> tuple[Issue, ...]:
        return tuple(issue for issue in self.issues if issue.level == "error")

    def channels_of(self, host: HostPlan) -> dict[str, str]:
        """The channels that a host gets, as in `channels`: all, or those of its instance group."""
        given = {name: self.job.inputs[name].instance_groups for name in self.channels}
        return {name: place for name, place in self.channels.items() if host.group in (given[name] or [host.group])}

    def kept_job(self) -> dict[str, Any]:
        """The job as it is recorded and printed: without its secrets, and with the full name of every `run` and the whole path of every
        folder and file."""
        kept = self.job.with_whole_paths(self.job.redacted())
        for channel, run in self.pinned.items():
            kept["inputs"][channel]["run"] = run
        return kept

    def kept_request(self) -> dict[str, Any] | None:
        """The request as it is recorded and printed: without its secrets."""
        if self.request is None or "Environment" not in self.request:
            return self.request
        return {**self.request, "Environment": redact(self.request["Environment"])}

    def estimator(self, boto_session: Any = None) -> tuple[Any, dict[str, Any]]:
        """The plan as a real sagemaker.pytorch.PyTorch (SDK v2) and its inputs: `estimator.fit(inputs, job_name=plan.name)`
        sends `request`. Before that, `launcher.upload(plan)` must put the code and the `uploads` into S3.

        Args:
            boto_session: a boto3.Session; None: a new one in the job's region.

        Raises:
            UserError: the plan has errors, is not for SageMaker, or the SDK is not installed.
        """
        raise self._not_for_sagemaker("estimator")

    def model_trainer(self, boto_session: Any = None) -> Any:
        """The plan as a real sagemaker.train.ModelTrainer (SDK v3), with its inputs: `train(wait=False)` sends `request`. Before that,
        `launcher.upload(plan)` must put the code and the `uploads` into S3.

        A ModelTrainer cannot express three parts of `request`: it builds the job's name from `job.name` and the time,
        SageMaker's own profiling, which costs, is not turned off (`ProfilerConfig`), and `EnableSageMakerMetricsTimeSeries` is not sent.

        Args:
            boto_session: a boto3.Session; None: a new one in the job's region.

        Raises:
            UserError: the plan has errors, is not for SageMaker, or asks for `profiling` or `debugger`; or SDK v3 is not installed.
        """
        raise self._not_for_sagemaker("ModelTrainer")

    def _not_for_sagemaker(self, what: str) -> UserError:
        refuse_errors(self)
        return mistake("--on", f"a plan for {self.backend} has no {what}", "plan it for SageMaker: plan(job, on='aws')")

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
            "groups": [asdict(group) for group in self.groups],
            "defaults": dict(self.job.defaults),
            "differences": dict(self.differences),
            "replay_of": self.replay_of,
            "resumes": self.resumes,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        return f"<plan {self.name}: {self.backend}, {counted(len(self.errors), 'error')}>"

    def _repr_html_(self) -> str:
        hosts = [counted(len(self.hosts), "host")] if self.hosts else []
        about = [self.backend, *hosts, f"at most {self.job.compute.max_hours:g} h"]
        rows = [("script", self.job.script), ("code", plan_text.code_text(self.files))]
        rows += [("price", self.price.text)] if self.price is not None else []
        rows += [("defaults", text) for text in plan_text.defaults(self.job.defaults)]
        rows += [("group", text) for text in self._group_texts()]
        rows += [("resumes", self.resumes)] if self.resumes is not None else []
        rows += [(f"secret {name}", str(secret)) for name, secret in self.job.secrets.items()]
        rows += [(f"channel {name}", _near(place)) for name, place in self.channels.items()]
        rows += [(f"student {name}", own) for name, own in self._students().items()]
        rows += [("upload", upload.text(_near(str(upload.source)))) for upload in self.uploads]
        found = "".join(html.note(issue.level, str(issue)) for issue in self.issues)
        end = (
            f"{counted(len(self.errors), 'error')}: see above"
            if self.errors
            else f"nothing has started; {START} starts it"
        )
        folded = {
            "hyperparameters": self.job.redacted()["hyperparameters"],
            "variables of the environment": redact(self.hosts[0].environment) if self.hosts else {},
            "files": {file.path: file_size(file.size) for file in self.files},
            "differences from SageMaker": self.differences if self.hosts else {},
        }
        settings = "".join(html.more(name, html.rows(values)) for name, values in folded.items())
        return html.box(f"plan {self.name}", " · ".join(about), found + html.pairs(rows) + settings, end)

    def text(self, *opened: Part, start: str = START) -> str:
        """As `print(plan)` shows it, but with the `opened` parts in full: "files", "env", "differences".

        Args:
            start: the call or command that starts the plan.
        """
        hosts = [counted(len(self.hosts), "host")] if self.hosts else []  # none if the job has errors
        about = ", ".join([self.backend, *hosts, f"at most {self.job.compute.max_hours:g} h"])
        title = ": ".join(filter(None, [f"plan {self.name}", plan_text.counts(self.issues)]))
        lines = [title, *plan_text.headlines(self.issues)]
        lines += [f"  runs on     {about}"]
        lines += [f"  price       {self.price.text}"] if self.price is not None else []
        lines += [f"  defaults    {text}" for text in plan_text.defaults(self.job.defaults)]
        lines += [f"  group       {text}" for text in self._group_texts()]
        lines += [f"  resumes     {self.resumes}, from its last checkpoint"] if self.resumes is not None else []
        for _, of_group in groupby(self.hosts, key=lambda host: host.group):
            lines += plan_text.hosts([(host.name, host.text()) for host in of_group])
        lines += plan_text.environment(redact(self.hosts[0].environment) if self.hosts else {}, "env" in opened)
        lines += [f"  secret      {name}: {secret}" for name, secret in self.job.secrets.items()]
        lines += [f"  channel     {name}: {place}" for name, place in self.channels.items()]
        lines += [f"  student     {name}: {own}" for name, own in self._students().items()]
        lines += [f"  upload      {upload.text(str(upload.source))}" for upload in self.uploads]
        lines += [f"  {name:<11} {text}" for name, text in self.about.items()]
        lines += plan_text.code(self.files, str(self.source), "files" in opened)
        lines += plan_text.differences(self.differences if self.hosts else {}, "differences" in opened)
        lines += plan_text.in_full(self.issues)
        lines += [] if self.errors else [f"  nothing has started; {start} starts it"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _students(self) -> dict[str, str]:
        """Each student's own settings, as one line."""
        return {
            name: ", ".join(f"{key} {value}" for key, value in own.items()) or "as the others"
            for name, own in students(self.job).items()
        }

    def _group_texts(self) -> list[str]:
        """What the printed plan says about each instance group."""
        hours = self.job.compute.max_hours if self.price is not None else None
        return [group.text(hours) for group in self.groups]


def run_name(job: str, planned: datetime) -> str:
    """A new run's name: its job's, the UTC time of its plan, and four letters."""
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))  # `random` belongs to the user's seed
    return f"{job}-{planned:%Y%m%d-%H%M%S}-{letters}"


def refuse_cost(plan: Plan, max_cost: float) -> None:
    """Raise UserError if a plan could cost more than `max_cost` US dollars, or its price is unknown."""
    if plan.price is None:
        return
    if plan.price.ceiling is None:
        raise mistake("--max-cost", plan.price.text.partition(":")[0], "set compute.price_per_hour, in US dollars")
    if not plan.price.ceiling <= max_cost:  # nan allows nothing
        fix = "lower compute.max_hours or compute.instance_count, or raise --max-cost"
        raise mistake("--max-cost", plan.price.text, fix, valid=f"at most ${max_cost:,.2f}")


def refuse_errors(planned: Plan) -> None:
    """Raise UserError with all of a plan's errors, if it has any."""
    if planned.errors:
        raise UserError(planned.errors, f"the plan for {planned.job.name}")


def _near(place: str) -> str:
    """A path, relative to the current folder if it lies below it."""
    here = os.getcwd()
    return os.path.relpath(place, here) if Path(place).is_absolute() and Path(place).is_relative_to(here) else place
