"""A study's trial on remote hosts: if the study is killed, the trial keeps running and is billed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.issues import UserError
from launcher.record import records
from launcher.runner.run import Run
from launcher.runner.run_to_completion import run_to_completion
from launcher.study.question import Trial


@dataclass(frozen=True)
class RunningTrial:
    """Records the trial in a file beside the table, so that the same command finds it again.

    Args:
        table: the study's.
        conditions: as in TrialTable.
    """

    table: Path
    conditions: Mapping[str, str]

    @property
    def file(self) -> Path:
        return self.table.with_name(f".{self.table.name}.running")

    def write(self, trial: Trial, run: Run) -> None:
        """Record a started trial, unless its hosts are on this machine: these end with the study."""
        if not run.on_this_machine:
            kept = {"key": _texts(trial), "run": run.name, "conditions": dict(self.conditions)}
            records.write_atomically(self.file, json.dumps(kept))

    def over(self) -> None:
        """Forget the trial."""
        self.file.unlink(missing_ok=True)

    def left(self, trials: Sequence[Trial], log: Callable[[str], None]) -> tuple[Trial, Run] | None:
        """The trial that a killed study left, with its run, finished or still running; None: none that counts.

        One that is still running but no longer a trial of this study is stopped.

        Args:
            trials: of the study. One that is already in the table was over before the kill.

        Raises:
            UserError: SageMaker does not answer, or refuses to stop it.
        """
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            name = kept["run"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        try:
            run = Run(records.find(name))
        except UserError:
            log(
                f"{name}, which was left running, is not in {records.store()}: removed, or in another store (LAUNCHER_RUNS)"
            )
            return None
        try:
            key = kept["key"] if kept["conditions"] == self.conditions else None
        except (KeyError, TypeError):
            return None
        trial = next((one for one in trials if _texts(one) == key), None)
        if run.state in records.OVER:
            return (trial, run) if trial is not None and run.state == records.COMPLETED else None
        if run.state == records.STOPPING:  # by Ctrl-C: it runs again once its hosts are free
            log(f"waiting for {run.name}, which was stopped")
            run.stop("its study was interrupted")  # the first request may not have reached SageMaker
            run_to_completion(lambda: run, log=log, interrupted=lambda: None)
            return None
        if trial is not None:
            log(f"{run.name}, which was left running, goes on as {trial}")
            return trial, run
        log(f"stopping {run.name}, which was left running: it is no longer a trial of this study")
        run.stop("its study was interrupted")
        return None


@contextlib.contextmanager
def stopped_on_error(left: tuple[Trial, Run] | None, log: Callable[[str], None]) -> Iterator[None]:
    """Stop a trial that was left running if an error or an interrupt keeps the study from following it."""
    try:
        yield
    except BaseException:
        if left is not None and left[1].state not in records.OVER:
            log(f"stopping {left[1].name}, which was left running")
            try:
                left[1].stop("its study was interrupted")
            except UserError as not_stopped:  # the error that came first is raised
                log(str(not_stopped))
        raise


def _texts(trial: Trial) -> dict[str, str]:
    return {name: str(value) for name, value in trial.key.items()}
