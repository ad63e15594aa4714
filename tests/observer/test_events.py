"""Events wait until they are reported to the clock."""

from __future__ import annotations

from types import SimpleNamespace

from launcher_observer.events import FULL, Events


def test_no_more_wait_than_are_kept_where_nobody_settles_them():
    """As those of a model that is used when its training is over."""
    reported: list[int] = []
    events = Events(SimpleNamespace(), lambda error: reported.append(-1))
    events.at_once = False
    for number in range(FULL + 1):
        events.add(None, reported.append, number)
    assert reported == [*range(FULL)]
