"""Events wait until they are reported to the clock."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from launcher_observer.events import FULL, Events


def test_no_more_wait_than_are_kept_where_nobody_settles_them():
    """As those of a model that is used when its training is over."""
    reported: list[int] = []
    events = Events(SimpleNamespace(), lambda error: reported.append(-1))
    events.at_once = False
    for number in range(FULL + 1):
        events.add(None, reported.append, number)
    assert reported == [*range(FULL)]


class Preempted(Exception):
    """What a script's own handler of a signal raises."""


def preempted(number: int, frame: object) -> None:
    raise Preempted


@pytest.mark.parametrize("hook", ["add", "settle"])
def test_an_exception_of_the_scripts_own_signal_handler_reaches_the_script(hook):
    """The signal comes while a hook runs: its exception is none of the observer's."""
    failed: list[Exception] = []
    events = Events(SimpleNamespace(), failed.append)
    events.at_once = False

    def alarmed(*_: object) -> float:
        signal.raise_signal(signal.SIGUSR1)
        return 0.0

    def broken() -> float:
        raise ValueError

    previous = signal.signal(signal.SIGUSR1, preempted)
    try:
        events.moment = alarmed if hook == "add" else None
        with pytest.raises(Preempted):
            events.add(None, alarmed, 0)
            events.settle()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert failed == []
    events.moment = broken
    events.add(None, print, 0)
    assert [type(error) for error in failed] == [ValueError]
