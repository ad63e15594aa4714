"""Signals deferred until an action is complete, and signals that are not lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class _Noted:
    numbers: tuple[signal.Signals, ...]
    """The signals to note, each of which would raise KeyboardInterrupt."""
    came: list[int]

    def note(self) -> None:
        """From now on, only note the signals."""
        for number in self.numbers:
            signal.signal(number, lambda number, _frame: self.came.append(number))

    def interrupt(self, only: tuple[signal.Signals, ...]) -> None:
        """From now on, note these signals and raise KeyboardInterrupt."""

        def note_and_raise(number: int, frame: FrameType | None) -> None:
            self.came.append(number)
            signal.default_int_handler(number, frame)

        for number in only:
            signal.signal(number, note_and_raise)

    def restore(self) -> None:
        for number in self.numbers:
            signal.signal(number, signal.default_int_handler)


def _interrupted() -> bool:
    """Whether signals interrupt this thread."""
    return threading.current_thread() is threading.main_thread()


def _interrupting() -> tuple[signal.Signals, ...]:
    """The signals that raise KeyboardInterrupt in this thread."""
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _interrupted() else ()
    return tuple(one for one in every if signal.getsignal(one) is signal.default_int_handler)


_now: list[_Noted] = []
"""One entry per active `deferred`, the innermost last."""


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Note the signals that would interrupt this process, and go on: a half-finished start would leave a run that nothing stops.

    Yields:
        The numbers of the signals that came, those within `interruptible` too. Within another `deferred`, it is that one's list.
    """
    outer = _deferring()
    noted = _Noted(_interrupting(), outer[0].came if outer else [])
    _now.append(noted)
    noted.note()
    try:
        yield noted.came
    finally:
        noted.restore()
        _now.remove(noted)


def _deferring() -> list[_Noted]:
    """The innermost active `deferred` of this thread that notes signals; [] if there is none."""
    return [one for one in _now if one.numbers and _interrupted()][-1:]


@contextlib.contextmanager
def interruptible(*only: signal.Signals) -> Iterator[None]:
    """Allow interrupts within `deferred` after all, for example during an upload, which takes long and starts nothing.

    Args:
        only: the signals that may interrupt; none: all that are deferred.

    Raises:
        KeyboardInterrupt: one of them came, now or before.
    """
    noted = _deferring()
    try:
        for one in noted:
            numbers = tuple(number for number in one.numbers if not only or number in only)
            one.interrupt(numbers)
            if any(number in numbers for number in one.came):
                raise KeyboardInterrupt
        yield
    finally:
        for one in noted:
            one.note()


@contextlib.contextmanager
def remembered() -> Iterator[list[int]]:
    """Note the signals that interrupt this process, and still raise KeyboardInterrupt.

    Python drops an exception raised in a callback, such as an import lock's: a loop that must end on an interrupt checks the numbers.

    Yields:
        The numbers of the signals that came.
    """
    came: list[int] = []

    def note_and_raise(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    numbers = _interrupting()
    for number in numbers:
        signal.signal(number, note_and_raise)
    try:
        yield came
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
