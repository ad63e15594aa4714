"""Reads and explains a run's measurements. NumPy is imported only when needed, not with the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.config.issues import mistake
from launcher.record.records import RunFolder

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
    return Diagnosis(read(source))


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
