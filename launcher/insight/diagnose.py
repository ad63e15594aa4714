"""Reads and explains a run's measurements. NumPy is imported only when needed, not with the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.issues import UserError, mistake
from launcher.record import records
from launcher.record.records import DamagedRecord, RunFolder

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis
    from launcher.insight.measurements import Measurements
    from launcher.insight.probe import Probe


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A run's speed and model, from its steps; None: not measured."""

    step_seconds: float | None
    """Of a usual step."""
    images_per_second: float | None
    """In usual steps, over all processes."""
    steps: int
    """Number of the last step."""
    model: str | None
    """The trained model's class, if the script was observed."""
    parameters: int | None


def diagnose(source: str) -> Diagnosis:
    """The diagnosis of a run, given its name or folder, or of system metrics in Debugger's format.

    Raises:
        UserError: nothing was measured there, or numpy is not installed.
    """
    with numpy_needed("diagnose"):
        from launcher.insight.diagnosis import Diagnosis
        from launcher.insight.measurements import read
    found = read(source)
    return Diagnosis(replace(found, facts={**found.facts, **_end(source)}))


def _end(source: str) -> dict[str, object]:
    """Facts about how a source's run ended: its state, also if its supervisor was killed, and run_seconds; {} if it goes on, or if
    the source is no run."""
    if source.startswith("s3://"):
        return {}
    folder = RunFolder(Path(source).absolute())
    if folder.path.is_dir() and not folder.plan.is_file():
        return {}
    run = folder if folder.path.is_dir() else records.find(source)
    state, seconds = run.state(), run.read(run.outcome).get("seconds")
    return {"state": state, "run_seconds": seconds} if state in records.OVER else {}


def chosen(source: str, log: Callable[[str], None]) -> str:
    """The source; for a job's name the folder of the run to diagnose. That is the latest, unless it failed, or was stopped before its
    first step, and an earlier one completed.

    Args:
        log: receives a line if it is not the latest.
    """
    if source.startswith("s3://") or Path(source).is_dir():
        return source
    latest = records.find(source)
    try:
        state = latest.state()
    except DamagedRecord:
        return source
    if latest.name == source or not (state == records.FAILED or (state == records.STOPPED and speed(latest) is None)):
        return source
    try:
        completed = records.find(source, completed=True)
    except UserError:  # there is none
        return source
    log(f"{source}: {completed.name}, its latest completed run; {latest.name} is {state}: launcher show {latest.name}")
    return str(completed.path)


def with_probe(observed: Measurements, probe: Probe | str) -> Diagnosis:
    """The diagnosis with a probe's measurements, or with why it has none."""
    from launcher.insight.diagnosis import Diagnosis

    return Diagnosis(observed, probe)


def compare(before: str, after: str) -> Comparison:
    """Two diagnoses side by side.

    Raises:
        UserError: nothing was measured in one of them, or numpy is not installed.
    """
    first, second = diagnose(before), diagnose(after)
    from launcher.insight.comparison import Comparison

    return Comparison(first, second)


def speed(run: RunFolder) -> Speed | None:
    """A run's speed, from its steps; None if no step was recorded, or numpy is not installed."""
    try:
        from launcher.insight.evidence import Evidence
        from launcher.insight.measurements import read_steps
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return None
    found = read_steps(run)
    if found is None or not found.ranks:
        return None
    evidence = Evidence(found)
    seconds, batch = evidence.step_seconds, found.settings.get("global_batch_size")
    model = found.script.trained_model if found.script else None
    return Speed(
        step_seconds=seconds,
        images_per_second=batch / seconds if seconds and isinstance(batch, int) else None,
        steps=int(found.ranks[0].step[-1]),
        model=(model.values.get("class") or None) if model else None,
        parameters=model.values.get("parameters") if model else None,
    )


@contextmanager
def numpy_needed(by: str) -> Iterator[None]:
    """Turn the error of a missing numpy into a UserError.

    Args:
        by: what needs numpy; the error names it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise mistake(by, "not installed: numpy", "pip install numpy; the extra `local` brings it") from None
