"""A run from start to end; it is stopped first if this process is interrupted, fails or has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from launcher.backends.interrupts import deferred, remembered
from launcher.config.issues import UserError
from launcher.record import records

STOP_AGAIN = 600.0
"""Seconds for which a stop request is repeated while SageMaker does not answer."""


class Stoppable(Protocol):
    """What is needed from a Run."""

    trouble: str

    def wait(self, timeout: float | None = None, *, progress: bool = True) -> str: ...
    def stop(self, reason: str = ...) -> None: ...


AnyRun = TypeVar("AnyRun", bound=Stoppable)


def run_to_completion(
    begin: Callable[[], AnyRun],
    *,
    log: Callable[[str], None],
    interrupted: Callable[[], None],
    started: Callable[[AnyRun], None] = lambda run: None,
    until: Callable[[AnyRun], str] = lambda run: "",
) -> AnyRun:
    """Start a run and wait until it is over. An interrupt, or any other exception, stops the run first.

    Args:
        begin: starts the run, or returns one that is under way.
        log: called with a line when SageMaker stops answering, when it answers again, and when it does not stop the run.
        interrupted: called before an interrupt stops the run.
        started: called with the run once it has started.
        until: called about every second: why to stop the run now; "" while it may go on.

    Raises:
        UserError: the run cannot be started; or SageMaker did not stop it for 10 minutes, and it goes on.
    """
    trouble, why = "", ""
    run: AnyRun | None = None
    try:
        with deferred() as came:  # inside: an interrupt may come as soon as it is over
            run = begin()
            started(run)
        if came:
            raise KeyboardInterrupt
        with remembered() as came:
            while not came and run.wait(1, progress=False) not in records.OVER and not (why := until(run)):
                if run.trouble != trouble:
                    trouble = run.trouble
                    log(trouble or "AWS answers again")
        if came:
            raise KeyboardInterrupt
        if why:
            _stop(run, why, log)
    except BaseException as error:
        if run is None or (why and isinstance(error, UserError)):  # it was asked again and again
            raise
        if isinstance(error, KeyboardInterrupt):
            interrupted()
        try:
            run.stop("Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__} in the launcher")
            run.wait(150, progress=False)
        except UserError as not_stopped:  # the error that came first is raised
            log(str(not_stopped))
        raise
    if why:
        run.wait(150, progress=False)
    return run


def _stop(run: Stoppable, why: str, log: Callable[[str], None]) -> None:
    """Ask a run to stop, repeatedly for STOP_AGAIN seconds while SageMaker does not answer; each reason is said once."""
    until, said = time.monotonic() + STOP_AGAIN, ""
    while True:
        try:
            return run.stop(why)
        except UserError as not_stopped:
            if time.monotonic() > until:
                raise
            if str(not_stopped) != said:
                log(said := str(not_stopped))
        if run.wait(1, progress=False) in records.OVER:
            return None
