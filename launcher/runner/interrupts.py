"""Signals that wait until an action is complete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Note the signals that would interrupt this process, and go on: half a start would leave a run that nothing stops.

    Yields:
        The numbers of the signals that came.
    """
    came: list[int] = []
    ours = threading.current_thread() is threading.main_thread()  # no other thread is interrupted
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if ours}
    noted = {number: given for number, given in before.items() if given is signal.default_int_handler}
    for number in noted:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield came
    finally:
        for number, given in noted.items():
            signal.signal(number, given)
