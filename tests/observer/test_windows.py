"""How steps are put together into windows, from steps whose times are given."""

from __future__ import annotations

from launcher_observer.step import Step
from launcher_observer.timers import HostTimer
from launcher_observer.windows import Windows


def test_a_slow_step_among_quick_ones_has_a_window_of_its_own():
    written = []
    windows = Windows(
        lambda epoch, step, ended, seconds, extra: written.append((step, extra["steps"], seconds["step"]))
    )
    now = windows.since
    for number in range(1, 31):
        step = Step(number, now, now)
        now += 3.0 if number == 13 else 0.06
        step.ended = step.end = now
        windows.add(HostTimer(), step)
    windows.close()
    assert [(step, steps) for step, steps, _ in written] == [(5, 5), (12, 7), (13, 1), (22, 9), (30, 8)]
    assert [round(seconds, 3) for *_, seconds in written] == [0.06, 0.06, 3.0, 0.06, 0.06]
