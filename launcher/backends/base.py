"""Backend, the interface of the places where plans run, and the values that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from launcher.config.issues import Issue, mistake
from launcher.config.job import Job
from launcher.planner.source_package import SourceFile
from launcher.record.records import RunFolder

if TYPE_CHECKING:
    from launcher.planner.plan import Plan


@dataclass(frozen=True)
class HostPlan:
    """One host of a run."""

    name: str
    """algo-1, algo-2 …, as SageMaker calls them; the run folder's names too."""
    address: str
    """What SM_CURRENT_HOST says."""
    command: tuple[str, ...]
    """What the container toolkit will start there; `<free port>` stands for the one that the run picks."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the backend sets for the toolkit, beside the SM_* that the toolkit makes of the job."""
    group: str = ""
    """The instance group, where there are several."""


@dataclass(frozen=True)
class Upload:
    """Data of this machine that a run uploads before it starts."""

    source: Path
    """A file or a folder."""
    target: str
    """The s3:// address: of the object for a file, of the prefix (it ends with /) for a folder."""
    files: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Price:
    """What all hosts of a job cost together."""

    per_hour: float | None
    """US dollars an hour of the whole cluster, on demand; None: not known."""
    ceiling: float | None
    """US dollars at most: max_hours of the cluster, and the warm pool's time after it; None: not known."""
    text: str
    """The same for people, with where the price comes from; or what to do to know it."""

    def to_dict(self) -> dict[str, Any]:
        return {"usd_per_hour": self.per_hour, "ceiling_usd": self.ceiling, "text": self.text}


class Unreachable(Exception):
    """The far side of a run cannot be asked just now: no network, no valid credentials, too many requests. The run goes on."""

    def __init__(self, found: str, fix: str):
        super().__init__(f"{found}; {fix}")


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

    def about(self, job: Job) -> dict[str, str]:
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
