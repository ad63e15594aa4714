"""How steps are put together into windows, from steps whose times are given."""

from __future__ import annotations

import pytest
from launcher_observer import windows as windows_module
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


def test_a_step_counts_once_the_moments_of_all_its_phases_have_passed():
    """Its own end may lie in a stream beside the model's, in which its next batch was asked for."""

    class Late(HostTimer):
        passed = False

        def has_completed(self, moment: float) -> bool:
            return self.passed or moment != now + 0.5

        def seconds(self, begin: float, end: float) -> float:
            assert self.has_completed(begin) and self.has_completed(end), "CUDA's events raise where one has not"
            return super().seconds(begin, end)

    written, timer = [], Late()
    windows = Windows(lambda epoch, step, ended, seconds, extra: written.append(seconds))
    now = windows.since
    step = Step(1, now, now)
    step.phases.append(("backward", now, now + 0.5))
    step.ended = step.end = now + 0.6
    windows.add(timer, step)
    assert not written
    timer.passed = True
    windows.close()
    assert [round(seconds["backward"], 3) for seconds in written] == [0.5]


class Watched:
    """Windows of steps of 60 ms beside workers whose CPU time is given, on a device that may be behind."""

    def __init__(self, monkeypatch, *, behind: bool = False):
        self.used, self.written, self.timer, self.behind = 0.0, [], HostTimer(), behind
        monkeypatch.setattr(windows_module, "worker_cpu_seconds", lambda: self.used)
        monkeypatch.setattr(self.timer, "has_completed", lambda moment: not self.behind)
        self.windows = Windows(lambda *what: self.written.append(what[-1].get("worker_cpu_seconds")))
        self.now = self.windows.since

    def step(self, number: int, cpu: float = 0.0) -> None:
        """One more is over, and its workers then use CPU seconds."""
        step = Step(number, self.now, self.now)
        self.now += 0.06
        step.ended = step.end = self.now
        self.windows.add(self.timer, step)
        self.used += cpu


@pytest.mark.parametrize("waits", [False, True], ids=["counted", "its moments have not passed"])
def test_the_workers_of_an_evaluation_are_none_of_trainings(monkeypatch, waits):
    """A window that an evaluation lies in says nothing of them; the next one counts from its own beginning."""
    watched = Watched(monkeypatch, behind=waits)
    for number in range(1, 9):
        watched.step(number, cpu=0.1)
        if number == 7:  # in the middle of a window
            watched.used += 120.0
            watched.windows.resume(evaluated=True)
    watched.behind = False
    watched.windows.close()
    assert watched.written == ([None, 0.0] if waits else [pytest.approx(0.08), None])
    watched.used += 120.0
    watched.windows.resume(evaluated=True)  # between two windows
    for number in range(9, 12):
        watched.step(number, cpu=0.1)
    watched.windows.close()
    assert watched.written[2] == pytest.approx(0.1)


def test_a_step_that_is_counted_in_an_evaluation_says_nothing_of_its_workers(monkeypatch):
    """On a device that is behind: its moments pass when the evaluation's workers have begun."""
    watched = Watched(monkeypatch)
    for number in range(1, 6):
        watched.behind = number == 5  # the window's last
        watched.step(number)
    watched.used, watched.behind = 100.0, False
    watched.windows.fold(evaluates=True)
    assert watched.written == [None]
