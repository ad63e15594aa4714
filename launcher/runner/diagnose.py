"""Why a run is slow: the diagnosis of one run, with or without a probe, or of two runs side by side."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from launcher import backends
from launcher.config.issues import mistake
from launcher.insight import diagnose as insight
from launcher.runner import probe as probes
from launcher.runner.run import Run
from launcher.runner.to_its_end import to_its_end

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis

Say = Callable[[str], None]


@overload
def diagnose(
    source: str | Path,
    *,
    probe: bool = False,
    overrides: Sequence[str] = (),
    on: str = backends.DEFAULT,
    say: Say = ...,
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
    say: Say = ...,
) -> Diagnosis | Comparison: ...
def diagnose(
    source: str | Path,
    after: str | Path | None = None,
    *,
    probe: bool = False,
    overrides: Sequence[str] = (),
    on: str = backends.DEFAULT,
    say: Say = lambda text: None,
) -> Diagnosis | Comparison:
    """Explain where a run's time goes.

    >>> diagnosis = launcher.diagnose("quickstart-teacher")
    >>> diagnosis.save_html("why.html").name
    'why.html'

    Args:
        source: a run's name, its folder, or system metrics in Debugger's format: a folder or s3:// prefix profiler-output.
        after: the run after a change, to compare with.
        probe: also run its job again on this machine for up to two minutes, to measure what observation cannot separate.
        overrides: for the probe, `key=value` texts, for example inputs.train={folder: data/train} if the data were elsewhere.
        on: the probe's backend: process or docker.
        say: takes the probe's lines for people.

    Returns:
        The diagnosis, or with `after` a comparison. Printing shows it, as does a notebook; `save_html` writes a page. If the
        probe fails or is interrupted, the diagnosis says so.

    Raises:
        UserError: nothing was measured there, numpy is not installed, or the probe cannot start.
    """
    if after is None:
        return _probed(str(source), overrides, on, say) if probe else insight.diagnose(str(source))
    if probe:
        raise mistake("--probe", f"two runs: {source} and {after}", "probe one of them")
    return insight.compare(str(source), str(after))


def _probed(source: str, overrides: Sequence[str], on: str, say: Say) -> Diagnosis:
    """With a probe: the run's job again on this machine, for two minutes at most."""
    planned, observed = probes.planned(source, overrides, on=on), insight.diagnose(source).measurements

    def started(run: Run) -> None:
        say(f"probing for at most two minutes: run {run.name}")

    def until(run: Run) -> str:
        return f"not over after {probes.LONGEST:g} s" if time.monotonic() - began > probes.LONGEST else ""

    began = time.monotonic()
    try:
        interrupted = functools.partial(say, "stopping the probe")
        run = to_its_end(planned, say=say, interrupted=interrupted, started=started, until=until)
    except KeyboardInterrupt:
        return insight.with_probe(observed, probes.INTERRUPTED)
    say(f"probed in {time.monotonic() - began:.0f} s")
    return insight.with_probe(observed, probes.read(run.folder, run.outcome()))
