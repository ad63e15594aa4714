"""The Backend interface: a place where plans run."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import hyperparameters
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.planner import groups, model_names, python_start, teachers, validation
from launcher.planner.plan import HostPlan, Plan, Price, Upload, run_name
from launcher.planner.source_package import SourceFile, source_files, source_folder
from launcher.record import failure_causes, records
from launcher.record.records import RunFolder

OBSERVED = "steps, data loading and the machine are measured, the script is unchanged (observe: false: not at all)"


class Starter:
    """What started a run, used to stop and follow it. The defaults fit a supervised run on this machine."""

    name: ClassVar[str]
    """Its name on the command line and in records."""
    on_this_machine: ClassVar[bool] = True
    """Whether hosts share this machine's cores and GPUs, and end with the terminal that started them."""

    def stop(self, folder: RunFolder, reason: str) -> None:
        """Ask a run to stop, and return once the request is accepted. Its training processes get SIGTERM, and SIGKILL after the grace
        period."""
        folder.request_stop(reason)

    def refresh(self, folder: RunFolder) -> bool:
        """Update the run's folder and return whether anything was new. A supervised run needs no update.

        Raises:
            Unreachable: SageMaker does not answer.
        """
        return False

    def spend(self, folder: RunFolder) -> float | None:
        """US dollars so far; None: free, or no price."""
        return None

    def remaining_costs(self, folder: RunFolder) -> str:
        """What a run that is over still costs and how to end that; "" if nothing. Reads only the run's folder."""
        return ""

    def settle(self, folder: RunFolder) -> None:
        """Find out what a run cost after its end, if that was not known yet.

        Raises:
            Unreachable: SageMaker does not answer.
        """

    def usd_after_end(self, folder: RunFolder) -> float:
        """US dollars that a run cost after its end or, while that is unknown, the most it can cost. Reads only the run's folder."""
        return 0.0

    def release(self, folder: RunFolder) -> str:
        """End whatever a run that is over still pays for, and return what was ended, in words; "" if nothing.

        Raises:
            UserError: SageMaker did not answer, or refused; the costs continue.
        """
        return ""

    def why_not_planned_again(self, folder: RunFolder) -> Issue | None:
        """Why a run has no job to replay, resume or probe; None if it has one."""
        missing = folder.job if not folder.job.is_file() else folder.code if not folder.code.is_dir() else None
        if missing is None:
            return None
        return Issue(key="run", found=f"{folder.name} has no {missing.name}", fix="name a run whose record is complete")

    def room_for_checkpoints(self, job: Mapping[str, Any]) -> str | None:
        """Where a recorded job without checkpoints could keep them; None if it has a place or needs none.

        Args:
            job: the job in its run's plan.json.
        """
        return None

    def profile(self, folder: RunFolder, interval_ms: int | None) -> None:
        """Turn the system metrics of a running job on or off.

        Args:
            interval_ms: milliseconds between two samples; None: off.

        Raises:
            UserError: the backend cannot switch them, or the run is over.
        """
        raise mistake("run", f"{folder.name} runs on {self.name}", "switch the metrics of a run on SageMaker only")


class Backend(Starter, ABC):
    """A place where plans run. It does not know what a job trains.

    Planning writes nothing and uses no network. The defaults fit a run on this machine with a supervisor.
    """

    DIFFERENCES: ClassVar[Mapping[str, str]] = {}
    """Differences from SageMaker: environment variable or subject -> reason. All else is the same."""
    PACKAGES: ClassVar[str] = failure_causes.IN_AN_IMAGE
    """How to get a missing {module} to a script that fails without it."""
    plan_class: ClassVar[type[Plan]] = Plan

    def plan(self, job: Job, source: Path | None = None) -> Plan:
        """Plan a job in full. It writes nothing, starts nothing, and uses no network.

        Args:
            source: the code, if it is not where the job says.

        Returns:
            A Plan. Its `issues` hold everything that validation found, errors too.
        """
        now = datetime.now(timezone.utc)
        name = run_name(job.name, now)
        source = source or source_folder(job)
        places, issues = validation.places(job)
        files, file_issues = source_files(source, job) if source.is_dir() else ([], [])
        not_observed = python_start.why_not_observed(job, files)
        if files:
            files = self.source_files(job, files)
            secrets = self.secrets_read_by_the_job(job)
            files = python_start.with_python_start(files, observe=not not_observed, secrets=secrets)
        issues += file_issues
        issues += validation.check(job, source, files, self.world_size(job))
        issues += validation.check_images(job, source, places, self.world_size(job))
        issues += self.check(job, source, files)
        issues += [*model_names.check(job, self.timm_version(job)), *teachers.check(job, places)]
        try:
            channels, uploads = self.channels(job, places)
        except UserError as error:
            channels, uploads = {}, ()
            issues += error.issues
        possible = not any(issue.level == "error" for issue in issues)
        request = self.request(job, name, channels) if possible else None
        encoded = {**job.hyperparameters, **self.toolkit_hyperparameters(job, name)} if possible else {}
        return self.plan_class(
            name=name,
            planned=now.isoformat(timespec="microseconds"),
            backend=self.name,
            job=job,
            source=source,
            hosts=self.hosts(job) if possible else (),
            hyperparameters=hyperparameters.encode(encoded),
            channels=channels,
            files=tuple(files),
            issues=tuple(issues),
            uploads=uploads,
            request=request,
            price=self.price(job),
            groups=groups.shown(job, self.group_prices(job)) if possible else (),
            about={"observed": f"no: {not_observed}" if not_observed else OBSERVED, **self.about(job, request)},
            differences=self.DIFFERENCES,
            pinned={
                name: Path(places[name]).relative_to(records.store()).parts[0]
                for name, given in job.inputs.items()
                if given.run and name in places
            },
        )

    def checked(self, planned: Plan) -> Plan:
        """The plan with the issues of `check_online`; unchanged if it has errors."""
        if planned.errors:
            return planned
        issues = self.check_online(planned)
        shown = groups.shown(planned.job, self.group_prices(planned.job))
        return replace(
            planned, issues=(*planned.issues, *issues), price=self.price(planned.job), groups=shown, checked=True
        )

    @abstractmethod
    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """Issues of a job on this backend, including settings that it ignores.

        Args:
            source: the script's folder.
            files: the source files.
        """

    @abstractmethod
    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """The source files, minus those that this backend excludes, plus those that it adds."""

    @abstractmethod
    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host, with the container toolkit's command."""

    @abstractmethod
    def world_size(self, job: Job) -> int:
        """Training processes on all hosts."""

    @abstractmethod
    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        """The hyperparameters that SageMaker's SDK adds for the container toolkit."""

    @abstractmethod
    def machine(self, job: Job) -> str:
        """The hardware and software of a job, in words. Timings of different machines are not compared."""

    @abstractmethod
    def start(self, plan: Plan, folder: RunFolder, lock: int, lifeline: int | None) -> None:
        """Start a run, and return once it runs.

        Args:
            plan: without errors.
            folder: holds the records already.
            lock: file descriptor of the run's locked file, which its supervisor holds for life.
            lifeline: read end of a pipe. If the write end closes before a byte arrives, the supervisor stops the run.
                None: the run outlives the process that started it.

        Raises:
            UserError: it did not start; the record says why.
        """

    def channels(self, job: Job, places: dict[str, str]) -> tuple[dict[str, str], tuple[Upload, ...]]:
        """Channel -> its address, and the uploads. By default the local path, and no upload.

        Args:
            places: channel -> file or folder, for channels on this machine.

        Raises:
            UserError: an earlier run's model is in S3 only.
        """
        of_runs = {name: Path(places[name]) for name, given in job.inputs.items() if given.run and name in places}
        missing = [in_s3_only(name, model) for name, model in of_runs.items() if not model.exists()]
        if missing:
            raise UserError(missing)
        return places, ()

    def secrets_read_by_the_job(self, job: Job) -> dict[str, dict[str, str]]:
        """Variable -> {"secretsmanager": …} for secrets that the job's processes read themselves; others are passed to them."""
        return {}

    def request(self, job: Job, run_name: str, channels: dict[str, str]) -> dict[str, Any] | None:
        """The CreateTrainingJob request; None: the backend sends none."""
        return None

    def about(self, job: Job, request: dict[str, Any] | None) -> dict[str, str]:
        """Further lines of the printed plan, name -> text."""
        return {}

    def price(self, job: Job) -> Price | None:
        """The price ceiling; None: free."""
        return None

    def group_prices(self, job: Job) -> dict[str, float]:
        """Instance group -> US dollars an hour, where known."""
        return {}

    def check_online(self, plan: Plan) -> list[Issue]:
        """Issues found by read-only checks outside this process."""
        return []

    def timm_version(self, job: Job) -> str | None:
        """The version of timm that this kit's scripts import; None: unknown."""
        return None

    def lacks(self, module: str) -> bool:
        """Whether a Python module is known to be missing."""
        return False

    def hosts_share_a_machine(self) -> bool:
        """Whether all hosts of a run share one machine's cores."""
        return self.on_this_machine

    def gpus_here(self, job: Job) -> int:
        """GPUs of this machine that a job's hosts may share; 0 if they train on its CPUs or elsewhere."""
        return 0

    def why_not_resumed(self, job: Mapping[str, Any], folder: RunFolder) -> Issue | None:
        """Why a run cannot be resumed; None if it left a checkpoint, or may have.

        Args:
            job: the job's settings by key.
        """
        if folder.left_checkpoints():
            return None
        return Issue(
            key="run",
            found=f"{folder.name} left no checkpoint",
            fix=f"launcher replay {folder.name} starts from the beginning",
        )

    def shared_checkpoints(self, job: Job) -> str:
        """Where all runs of a job keep their checkpoints, so that a new run resumes by itself; "" if each has its own."""
        return ""

    def upload(self, plan: Plan) -> None:
        """Upload a plan's data and code, before its estimator is fitted.

        Raises:
            UserError: the backend uploads nothing, the code has changed since it was planned, or AWS refuses.
        """
        raise mistake("--on", f"a plan for {self.name} uploads nothing", "use plan(job, on='aws')")


def in_s3_only(channel: str, model: Path) -> Issue:
    """The issue of a channel that names an earlier run whose model was not fetched."""
    run = RunFolder(model.parent)
    address = str(run.read(run.outcome).get("model_uri"))
    fix = f"aws s3 cp {address} {shlex.quote(str(model))}"
    if not address.endswith(".tar.gz"):
        fix = f"aws s3 cp --recursive {address} FOLDER, and write {{folder: FOLDER}}"
    return Issue(key=f"inputs.{channel}", found=f"the model of {run.name} is in S3 only: {address}", fix=fix)
