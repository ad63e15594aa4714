"""A run's measurements read and explained. Numpy is imported when it is asked for, not with the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.config.issues import mistake

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis
    from launcher.insight.measurements import Measurements
    from launcher.insight.probe import Probe


def diagnose(source: str) -> Diagnosis:
    """The diagnosis of a run by its name or folder, or of system metrics in Debugger's format.

    Raises:
        UserError: nothing was measured there, or numpy is not installed.
    """
    with _numpy():
        from launcher.insight.diagnosis import Diagnosis
        from launcher.insight.measurements import read
    return Diagnosis(read(source))


def with_probe(observed: Measurements, probe: Probe | str) -> Diagnosis:
    """The diagnosis with what a probe measured, or with why it could not."""
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


@contextmanager
def _numpy() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise mistake("diagnose", "not installed: numpy", "pip install numpy; the extra `local` brings it") from None
