"""Backend, the interface of the places where plans run."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import hyperparameters
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.planner import validation
from launcher.planner.plan import HostPlan, Plan, Price, Upload
from launcher.planner.source_package import SourceFile, source_files, source_folder
from launcher.record.records import RunFolder


class Backend(ABC):
    """A place where plans run. It does not know what a job trains.

    Planning calls are pure: they touch neither network nor disk. Defaults fit a run on this machine that a supervisor watches.
    """

    name: ClassVar[str]
    """As the command line and the records call it."""
    on_this_machine: ClassVar[bool] = True
    """Whether hosts are on this machine: they share its cores and GPUs, and end with the terminal that started them."""
    DIFFERENCES: ClassVar[Mapping[str, str]] = {}
    """What differs from SageMaker, by the variable of the script's environment or the subject, and why. All else is the same."""
    plan_class: ClassVar[type[Plan]] = Plan

    def plan(self, job: Job) -> Plan:
        """Work a job out in full. Nothing is written, started, imported or asked over a network.

        Returns:
            A Plan; its `issues` hold everything that validation found, errors too.
        """
        now = datetime.now(timezone.utc)
        letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))  # random's seed is the user's
        name = f"{job.name}-{now:%Y%m%d-%H%M%S}-{letters}"
        source = source_folder(job)
        places, issues = validation.places(job)
        files, file_issues = source_files(source) if source.is_dir() else ([], [])
        files = self.source_files(job, files)
        issues += file_issues
        issues += validation.check(job, source, files, self.world_size(job))
        issues += self.check(job, source, files)
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
            about=self.about(job, request),
            differences=self.DIFFERENCES,
            pinned={
                name: Path(places[name]).parent.name
                for name, given in job.inputs.items()
                if given.run and name in places
            },
        )

    def checked(self, planned: Plan) -> Plan:
        """A plan with what a look online shows; as it is where it has errors."""
        if planned.errors:
            return planned
        issues = self.check_online(planned)
        return replace(planned, issues=(*planned.issues, *issues), price=self.price(planned.job), checked=True)

    @abstractmethod
    def check(self, job: Job, source: Path, files: list[SourceFile]) -> list[Issue]:
        """What is wrong with a job for this backend, and what will be ignored.

        Args:
            source: the folder that holds the script.
            files: those that will travel.
        """

    @abstractmethod
    def source_files(self, job: Job, files: list[SourceFile]) -> list[SourceFile]:
        """The files that travel: those of the source folder, less what this backend leaves out, with what it adds."""

    @abstractmethod
    def hosts(self, job: Job) -> tuple[HostPlan, ...]:
        """Each host of a job, and the command that the container toolkit starts there."""

    @abstractmethod
    def world_size(self, job: Job) -> int:
        """Training processes on all hosts."""

    @abstractmethod
    def toolkit_hyperparameters(self, job: Job, run_name: str) -> dict[str, Any]:
        """What SageMaker's SDK adds to the hyperparameters for the container toolkit."""

    @abstractmethod
    def machine(self, job: Job) -> str:
        """The hardware and software that a job computes on: timings from different ones are not compared."""

    @abstractmethod
    def start(self, plan: Plan, folder: RunFolder, lock: int, lifeline: int | None) -> None:
        """Start a run, and return when it is under way.

        Args:
            plan: without errors.
            folder: already holds the records.
            lock: the locked file of the run, which its supervisor holds as long as it lives.
            lifeline: reading end of a pipe; when its writing end closes before a byte came, the supervisor stops the run.
                None: the run outlives whoever started it.

        Raises:
            UserError: it could not be started; nothing runs, and the record says so.
        """

    def channels(self, job: Job, places: dict[str, str]) -> tuple[dict[str, str], tuple[Upload, ...]]:
        """What each channel shows, and what is uploaded for it: its place on this machine, and nothing.

        Args:
            places: the file or folder of each channel that is on this machine.
        """
        return places, ()

    def request(self, job: Job, run_name: str, channels: dict[str, str]) -> dict[str, Any] | None:
        """The CreateTrainingJob request; None where SageMaker is not asked."""
        return None

    def about(self, job: Job, request: dict[str, Any] | None) -> dict[str, str]:
        """What else the plan shows, by name."""
        return {}

    def price(self, job: Job) -> Price | None:
        """What a job costs at most; None for this machine, whose time has no price."""
        return None

    def check_online(self, plan: Plan) -> list[Issue]:
        """What a look beyond this process shows. It is read-only."""
        return []

    def lacks(self, module: str) -> bool:
        """Whether it is known that a script cannot import a Python module there."""
        return False

    def stop(self, folder: RunFolder, reason: str) -> None:
        """Ask a run to stop: its training processes get SIGTERM, and SIGKILL after the grace period. Returns at once."""
        folder.request_stop(reason)

    def refresh(self, folder: RunFolder) -> bool:
        """Bring what is new into the run's folder; whether anything was. Here the supervisor writes it.

        Raises:
            Unreachable: the far side does not answer.
        """
        return False

    def spend(self, folder: RunFolder) -> float | None:
        """US dollars so far; None where it costs nothing, or the price is not known."""
        return None

    def why_not_resumed(self, job: Job, folder: RunFolder) -> Issue | None:
        """Why a run that is over cannot be resumed; None where it left a checkpoint, or may have."""
        if folder.left_checkpoints():
            return None
        return Issue(
            key="run", found=f"{folder.name} left no checkpoint", fix=f"launcher replay {folder.name} starts it anew"
        )

    def upload(self, plan: Plan) -> None:
        """Upload a plan's data and code, for those who send its request with the estimator.

        Raises:
            UserError: there is nothing to upload to, or AWS refuses.
        """
        raise mistake("--on", f"a plan for {self.name} uploads nothing", "plan(job, on='aws')")

    def profile(self, folder: RunFolder, interval_ms: int | None) -> None:
        """Switch the system metrics of a running job.

        Args:
            interval_ms: milliseconds between two samples; None: off.

        Raises:
            UserError: they cannot be switched.
        """
        raise mistake("run", f"{folder.name} runs on {self.name}", "only SageMaker's own profiling can be switched")
