"""Why a run is slow: the diagnosis of one run, with or without a probe, or of two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from launcher import backends
from launcher.config.issues import mistake
from launcher.insight import diagnose as insight
from launcher.runner.run import probed

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis

Log = Callable[[str], None]


@overload
def diagnose(
    source: str | Path,
    *,
    probe: bool = False,
    overrides: Sequence[str] = (),
    on: str = backends.DEFAULT,
    log: Log = ...,
) -> Diagnosis: ...
@overload
def diagnose(source: str | Path, after: str | Path) -> Comparison: ...
@overload
def diagnose(
    source: str | Path,
    after: str | Path | None,
    *,
    probe: bool = False,
    overrides: Sequence[str] = (),
    on: str = backends.DEFAULT,
    log: Log = ...,
) -> Diagnosis | Comparison: ...
def diagnose(
    source: str | Path,
    after: str | Path | None = None,
    *,
    probe: bool = False,
    overrides: Sequence[str] = (),
    on: str = backends.DEFAULT,
    log: Log = lambda text: None,
) -> Diagnosis | Comparison:
    """Explain where a run's time goes.

    >>> diagnosis = launcher.diagnose("quickstart-teacher")
    >>> diagnosis.save_html("why.html").name
    'why.html'

    Args:
        source: a run's name; a job's, for its latest run, or its latest completed one if the latest failed, or was stopped before its
            first step; a run's folder; or system metrics in Debugger's format: a folder or s3:// prefix profiler-output.
        after: the run after a change, to compare with.
        probe: also run its job again on this machine for up to two minutes, to measure what observation cannot separate.
        overrides: for the probe, `key=value` texts, for example inputs.train={folder: data/train} if the data were elsewhere.
        on: the probe's backend: process or docker.
        log: called with lines for people: the probe's, and that a job's latest run was passed over.

    Returns:
        The diagnosis, or with `after` a comparison. Printing shows it, as does a notebook; `save_html` writes a page. If the
        probe fails or is interrupted, the diagnosis says so.

    Raises:
        UserError: nothing was measured there, numpy is not installed, or the probe cannot start.
    """
    if after is not None and probe:
        raise mistake("--probe", f"two runs: {source} and {after}", "probe one of them")
    first = insight.chosen(str(source), log)
    if after is not None:
        return insight.compare(first, insight.chosen(str(after), log))
    return probed(first, overrides, on=on, log=log) if probe else insight.diagnose(first)
