"""A run from its start to its end, which is stopped first where this process is interrupted, fails or has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.backends.interrupts import deferred, remembered
from launcher.config.issues import UserError
from launcher.planner.plan import Plan
from launcher.record import records
from launcher.runner.run import Run, start

STOP_AGAIN = 600.0
"""Seconds for which a run is asked again to stop, where SageMaker does not answer."""


def to_its_end(
    planned: Plan | Run,
    *,
    max_cost: float | None = None,
    say: Callable[[str], None],
    interrupted: Callable[[], None],
    started: Callable[[Run], None] = lambda run: None,
    until: Callable[[Run], str] = lambda run: "",
) -> Run:
    """Start a planned run and wait until it is over. An interrupt, or any other exception, stops the run first.

    Args:
        planned: or a run that is under way.
        say: takes a line when SageMaker stops answering, when it answers again, and when it does not stop the run.
        interrupted: called before an interrupt stops the run.
        started: called with the run once it has started.
        until: asked about every second: why to stop the run now; "" while it is to go on.

    Raises:
        UserError: the run cannot be started; or SageMaker did not stop it for 10 minutes, and it goes on.
    """
    trouble, why = "", ""
    run: Run | None = None
    try:
        with deferred() as came:  # inside: an interrupt may come as soon as it is over
            run = planned if isinstance(planned, Run) else start(planned, max_cost=max_cost)
            started(run)
        if came:
            raise KeyboardInterrupt
        with remembered() as came:
            while not came and run.wait(1, progress=False) not in records.OVER and not (why := until(run)):
                if run.trouble != trouble:
                    trouble = run.trouble
                    say(trouble or "AWS answers again")
        if came:
            raise KeyboardInterrupt
        if why:
            _stop(run, why, say)
    except BaseException as error:
        if run is None or (why and isinstance(error, UserError)):  # it was asked again and again
            raise
        if isinstance(error, KeyboardInterrupt):
            interrupted()
        try:
            run.stop("Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__} in the launcher")
            run.wait(150, progress=False)
        except UserError as not_stopped:  # the error that came first is raised
            say(str(not_stopped))
        raise
    if why:
        run.wait(150, progress=False)
    return run


def _stop(run: Run, why: str, say: Callable[[str], None]) -> None:
    """Ask a run to stop, again and again for STOP_AGAIN seconds where SageMaker does not answer; each reason is said once."""
    until, said = time.monotonic() + STOP_AGAIN, ""
    while True:
        try:
            return run.stop(why)
        except UserError as not_stopped:
            if time.monotonic() > until:
                raise
            if str(not_stopped) != said:
                say(said := str(not_stopped))
        if run.wait(1, progress=False) in records.OVER:
            return None
