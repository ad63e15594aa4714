"""Where the host's time goes: a thread samples the training thread's Python stack."""

from __future__ import annotations

import _thread
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from launcher_observer.addresses import address, is_users, line_of, package

INTERVAL, LATER, MANY = 0.05, 0.2, 500
"""Seconds between two samples at first; later, after MANY samples: the lines are known by then."""

MAX_LINES = 50
"""That are recorded."""

MODULE_CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})
"""Functions of torch/nn/modules/module.py through which every module is called."""


class Seen(NamedTuple):
    """Where the thread was."""

    file: str
    line: int
    """Of the user's code, the innermost."""
    phase: str | None
    package: str | None
    """Whose function ran; None: the user's or Python's."""
    in_model: bool
    """Whether a module of torch.nn was being called."""


class LineSampler:
    """Counts the lines of one thread, from `start` on."""

    def __init__(self, phase: Callable[[], str | None], is_over: Callable[[], bool], guarded: Callable[..., Any]):
        """
        Args:
            phase: the current one.
            is_over: whether to stop.
            guarded: calls a function and reports its error.
        """
        self._phase, self._is_over, self._guarded = phase, is_over, guarded
        self._seen: Counter[Seen] = Counter()

    def start(self, thread: int) -> None:
        """Sample this thread from now on, from a thread that `threading` does not list."""
        _thread.start_new_thread(self._guarded, (self._look, thread))

    def lines(self) -> dict[str, Any]:
        """A record's `lines`: the most frequent lines of all samples so far."""
        seen = self._seen.copy()
        lines = []
        for place, samples in seen.most_common(MAX_LINES):
            line = address(place.file, place.line)
            lines.append({"file": line.file, "line": line.line, "text": line.text, **_rest(place), "samples": samples})
        return {"samples": sum(seen.values()), "lines": lines}

    def _look(self, thread: int) -> None:
        for number in itertools.count():
            time.sleep(INTERVAL if number < MANY else LATER)
            if self._is_over():
                return
            frame = sys._current_frames().get(thread)
            if frame is not None:
                seen = _seen(frame, self._phase())
                if seen is not None:
                    self._seen[seen] += 1
            del frame  # it would keep the thread's variables alive


def _seen(frame: FrameType | None, phase: str | None) -> Seen | None:
    """Where a stack is; None if none of its frames is the user's."""
    assert frame is not None
    inner: str | None = None
    in_model = False
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            outer = frame.f_back
            while not in_model and outer is not None:
                in_model = outer.f_code.co_name in MODULE_CALLS
                outer = outer.f_back
            if phase is None and in_model:  # no batch was seen to arrive, such as the next one without a DataLoader
                phase = "forward"
            return Seen(code.co_filename, line_of(frame), phase, inner, in_model)
        inner = inner or package(code.co_filename)  # what Python's own library does is its caller's
        in_model = in_model or code.co_name in MODULE_CALLS
        frame = frame.f_back
    return None


def _rest(place: Seen) -> dict[str, Any]:
    return {"phase": place.phase, "package": place.package, "in_model": place.in_model}
