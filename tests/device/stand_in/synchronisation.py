"""Where the host waits for the device: every such place is seen, and can be forbidden."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.device.stand_in import streams

ENTRYPOINTS = Path(__file__).parents[3] / "entrypoints"


@dataclass(frozen=True)
class Synchronisation:
    """One wait of the host for the device."""

    what: str
    """The operator or call that waits."""
    place: str
    """The product's innermost line, as file:line; "backward" in autograd's own thread."""
    functions: tuple[str, ...]
    """On the stack, innermost first: the product's by name, others as module.name."""


class HiddenSynchronisation(AssertionError):
    """The host waited for the device where nothing may wait."""


@dataclass
class _Watch:
    thread: int
    seen: list[Synchronisation]
    outside: frozenset[str] | None
    """Functions that may wait; None: all may, and what they do is only listed."""


_watches: list[_Watch] = []

under_way: list[Callable[[], object]] = []
"""Copies to the host that it has not waited for yet."""

_waiting = threading.RLock()
"""Of the thread that carries them out: another one that waits must not go on before they are done."""


def synchronised(what: str, until: float | None = None) -> None:
    """The stand-in calls this wherever CUDA would wait.

    Args:
        until: when the wait ends, by the host's clock. None: with the current stream's work.

    Raises:
        HiddenSynchronisation: inside `no_synchronisation`.
    """
    with _waiting:
        while under_way:
            under_way.pop(0)()
    streams.host_sleeps(streams.current().busy_until if until is None else until)
    if not _watches:
        return
    stack = [*_stack(sys._getframe(1))]
    product = [frame for frame in stack if _is_product(frame)]
    place = "backward"
    if product:
        place = f"{Path(product[0].f_code.co_filename).relative_to(ENTRYPOINTS)}:{product[0].f_lineno}"
    found = Synchronisation(what, place, tuple(_name(frame) for frame in stack))
    for watch in _watches:
        if product and threading.get_ident() != watch.thread:
            continue  # a loader's thread may wait as long as it likes
        if watch.outside is not None and not watch.outside.intersection(found.functions):
            raise HiddenSynchronisation(f"{place}: {what} waits for the device")
        watch.seen.append(found)


@contextlib.contextmanager
def observed() -> Iterator[list[Synchronisation]]:
    """Lists the waits of this thread, and of its backward passes."""
    watch = _Watch(threading.get_ident(), [], None)
    with _active(watch):
        yield watch.seen


@contextlib.contextmanager
def no_synchronisation(*, outside: Collection[str] = ()) -> Iterator[None]:
    """Forbids this thread, and its backward passes, to wait for the device.

    Args:
        outside: functions that may wait, as Synchronisation names them.

    Raises:
        HiddenSynchronisation: at the first wait; it names the product's line.
    """
    with _active(_Watch(threading.get_ident(), [], frozenset(outside))):
        yield


@contextlib.contextmanager
def _active(watch: _Watch) -> Iterator[None]:
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_product(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(ENTRYPOINTS))


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return code.co_name if _is_product(frame) else f"{Path(code.co_filename).stem}.{code.co_name}"
