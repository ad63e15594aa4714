"""Records which ranks have not reached a collective, before NCCL's watchdog ends the process by SIGABRT and nothing can be written.

A thread of each rank reports to the store where its rank is. A rank that has been stuck for most of the timeout logs its stack, asks
where the others are, and writes what it finds to the failure file. It takes that back if training goes on after all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from training.distributed.rendezvous import this_host
from training.runtime import failure
from training.runtime.metrics import PAUSES, PHASES

PATIENCE = 0.75
"""Share of a collective's timeout after which a stuck rank asks where the others are."""

SILENT_BEATS = 3
"""A rank that misses this many beats is considered gone."""

WAITING, LEAVING = "waiting for rank 0", "waiting for the other ranks to end"
"""Phases in which a rank polls the store."""

OUTSIDE = {"", "data_wait", WAITING, LEAVING}
"""Phases of ours without a collective; start-up and the end have no phase."""

ORDER = (*PAUSES, *(phase.name for phase in PHASES if not phase.inside))
"""Phases from one optimizer step to the next."""

SILENCE = 120
"""A rank that sends no beat for this many seconds is no longer waited for; a living one sends one at least every 15 s."""

FLIGHT_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000"}
"""Makes NCCL's process group remember its last collectives (TORCH_FR_… is the newer name; torch 2.14 knows both): without it only our
own phases have names."""

CAUSES = {
    "data_wait": "it is waiting for input: a storage read hangs, or data workers were killed. See its host's log",
    "checkpoint": "it is writing a checkpoint: raise process_group_minutes, or checkpoint_every",
    LEAVING: "it has finished: the ranks did not call the same collectives",
    "evaluate": "it takes longer to evaluate than the others: its share of the images is larger, or its storage slower",
}
"""Why a rank may be late, by its phase."""


@dataclass(frozen=True)
class Beat:
    """Where a rank is."""

    host: str
    step: int | None
    """Optimizer steps done; None before training."""
    doing: str
    """The phase that it is in."""
    still: float
    """Seconds since its last sign of progress."""
    collective: str | None = None
    """The one that it waits for, from NCCL's flight recorder."""
    number: int | None = None
    """That collective's number, counted from the group's first."""

    def place(self) -> str:
        """For people: `in data_wait after step 41`."""
        return f"in {self.doing or 'start-up'} {'before training' if self.step is None else f'after step {self.step}'}"


class CollectiveWatch:
    """Watches one rank from a thread of its own.

    Args:
        store: that of the roll call.
        timeout: seconds after which a collective ends the process.
        backend: of the process group.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, backend: str):
        self._store, self._rank, self._size, self._timeout = PrefixStore("watch", store), rank, size, timeout
        self._backend = backend
        self._interval = min(15.0, timeout / 20)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collective watch", daemon=True)
        self._changes, self._since, self._reported, self._stack_printed = -1, time.monotonic(), False, False
        self._counted: tuple[float, dict[int, int]] | None = None
        """When the ranks' beats were counted, and their counts, once this rank is stuck."""

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def beats(self, rank: int) -> int:
        """How many beats of a rank were heard."""
        return self._store.add(f"beats {rank}", 0)

    def end(self) -> None:
        """Stop watching, because something failed."""
        self._ended.set()

    def stop(self) -> None:
        """Stop watching, and take back what proved to be no failure."""
        self.end()
        self._thread.join(2 * self._interval)
        failure.clear_pending_failure()

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, with rank 0, which reports its own failure
            while not self._ended.wait(self._interval):
                self._look()

    def _look(self) -> None:
        progress, now = failure.progress, time.monotonic()
        if progress.changes != self._changes:
            self._changes, self._since, self._counted, self._stack_printed = progress.changes, now, None, False
            if self._reported:
                self._reported = False
                failure.clear_pending_failure()
        beat = self._beat(now - self._since)
        self._store.set(str(self._rank), json.dumps(asdict(beat)))
        self._store.add(f"beats {self._rank}", 1)
        in_one = beat.collective is not None or beat.doing not in OUTSIDE
        if beat.still < PATIENCE * self._timeout or progress.alone:
            return
        if not self._stack_printed:
            self._stack_printed = True  # in its own thread: reading source files may hang, and so may a full pipe
            threading.Thread(target=_print_stack, args=(self._rank, beat), name="stack", daemon=True).start()
        if self._reported or not in_one:
            return
        if self._counted is None:
            self._counted = now, self._counts()
        counted, counts = self._counted
        if now - counted >= SILENT_BEATS * self._interval:
            silent = {rank for rank, count in self._counts().items() if count == counts[rank] and rank != self._rank}
            self._reported = True
            failure.record_pending_failure(
                explain(self._rank, beat, self._others(), silent, self._timeout, self._backend)
            )

    def _beat(self, still: float) -> Beat:
        progress = failure.progress
        name, number = pending_collective() if still > self._interval else (None, None)
        return Beat(this_host(), progress.step, progress.doing, still, name, number)

    def _counts(self) -> dict[int, int]:
        return {rank: self.beats(rank) for rank in range(self._size)}

    def _others(self) -> dict[int, Beat]:
        there = [rank for rank, count in self._counts().items() if count and rank != self._rank]
        return {rank: Beat(**json.loads(self._store.get(str(rank)))) for rank in there}


class Lobby:
    """Where the ranks wait for what rank 0 does alone: they poll the store, and no collective times out meanwhile.

    Args:
        store: that of the roll call. It may live in rank 0's process, and end with it.
        size: ranks in the job.
        beats: counts a rank's signs of life.
    """

    def __init__(self, store: Store, size: int, beats: Callable[[int], int]):
        self._store, self._size, self._beats, self._waits = PrefixStore("lobby", store), size, beats, 0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """On rank 0: the others wait until the body ends, even if it fails."""
        key = self._next()
        failure.progress.alone = True
        try:
            yield
        finally:
            failure.progress.alone = False
            self._store.add(key, 1)

    def wait(self) -> None:
        """On the other ranks: wait until rank 0 is done.

        Raises:
            ConnectionError: rank 0 gives no sign of life any more.
        """
        if not self._poll({0: self._next()}, WAITING):
            raise ConnectionError(
                f"rank 0, which works alone, has given no sign of life for {SILENCE} s: see its host's log"
            )

    def leave(self, rank: int) -> None:
        """At the end of a rank: rank 0, whose process may hold the store, stays until the others have left, or are silent."""
        with contextlib.suppress(RuntimeError):  # the store is gone; whoever held it reports why
            if rank == 0:
                self._poll({other: f"left {other}" for other in range(1, self._size)}, LEAVING)
            else:
                self._store.add(f"left {rank}", 1)

    def _poll(self, keys: dict[int, str], phase: str) -> bool:
        """Wait until each of some ranks has set its key; False as soon as those that have not are silent."""
        beats, heard, pause = -1, time.monotonic(), 0.01
        while missing := [rank for rank, key in keys.items() if not self._store.add(key, 0)]:
            failure.progress.enter(phase)
            now = sum(map(self._beats, missing))
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > SILENCE:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        return True

    def _next(self) -> str:
        self._waits += 1
        return f"wait {self._waits}"


def _print_stack(rank: int, beat: Beat) -> None:
    """Print where a rank is stuck: its phase, and the stack of its main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  no line: the thread has ended"
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        print(
            f"rank {rank} has been stuck {beat.place()} for {beat.still / 60:.1f} min; its main thread is at\n{lines}",
            file=sys.stderr,
            flush=True,
        )


def explain(rank: int, own: Beat, others: Mapping[int, Beat], silent: set[int], timeout: float, backend: str) -> str:
    """Which collective a rank waits for, who has not arrived, and why, in two lines.

    Args:
        others: beats of the ranks that were ever heard.
        silent: ranks whose beats have stopped.
        timeout: seconds.
        backend: of the process group.
    """
    end = "NCCL's watchdog ends the process with SIGABRT" if backend == "nccl" else "it fails"
    waits = (
        f"{own.collective} (collective number {own.number})"
        if own.collective
        else f"the collective of {own.doing or 'start-up'}"
    )
    head = f"rank {rank}: {own.still / 60:.1f} min in {waits}, {own.place()}; after {timeout / 60:.3g} min (process_group_minutes) {end}"
    if silent:
        gone = _some([_silent(one, others.get(one)) for one in sorted(silent)])
        return f"{head}\ncause: {gone}: it was killed, perhaps because its host's memory is full, or its host is gone. See that host's log"
    late = [one for one, beat in sorted(others.items()) if _behind(beat, own)]
    if late:
        doing = others[late[0]].doing
        why = CAUSES.get(doing, "it is busy alone, or took a different path through the script")
        where = _some([f"rank {one} ({others[one].host}) is {others[one].place()}" for one in late])
        return f"{head}\ncause: {where} and has not arrived: {why}"
    return (
        f"{head}\ncause: all ranks arrived: the connections between them are broken. Let the security group pass all traffic among its own "
        "members; NCCL_DEBUG=INFO shows more"
    )


def pending_collective() -> tuple[str | None, int | None]:
    """This process's oldest unfinished collective, from NCCL's flight recorder: its name with the number of values, and its place in
    the order; (None, None) if there is none on record."""
    with contextlib.suppress(Exception):  # not every build of torch has the function, and its format is torch's own
        from torch._C import _distributed_c10d

        text = _distributed_c10d._dump_nccl_trace_json(True, True)  # type: ignore[attr-defined]  # its stubs lack it
        dumped = json.loads(text)
        return oldest(dumped.get("entries", []))
    return None, None


def oldest(entries: list[dict[str, Any]]) -> tuple[str | None, int | None]:
    """The first entry of a flight recorder that is not completed; as `pending_collective`."""
    open_ones = [entry for entry in entries if entry.get("state") != "completed"]
    if not open_ones:
        return None, None
    first = min(open_ones, key=lambda entry: entry["collective_seq_id"])
    values = 0
    for shape in first.get("input_sizes") or []:
        count = 1
        for side in shape:
            count *= side
        values += count
    name = str(first.get("profiling_name", "a collective")).removeprefix("nccl:")
    return f"{name} of {values:,} values", int(first["collective_seq_id"])


def remember_collectives() -> None:
    """Switch NCCL's flight recorder on, unless the environment already says otherwise; call it before the process group exists."""
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)


def _behind(beat: Beat, own: Beat) -> bool:
    """Whether a rank has not reached the collective that this one is in."""
    if beat.number is not None and own.number is not None:
        return beat.number < own.number
    return _order(beat) < _order(own)


def _order(beat: Beat) -> tuple[int, int]:
    """How far a rank has come: steps done, then the place of its phase in a step."""
    place = ORDER.index(beat.doing) if beat.doing in ORDER else -1
    return -1 if beat.step is None else beat.step, place


def _silent(rank: int, beat: Beat | None) -> str:
    if beat is None:
        return f"rank {rank} was never heard from"
    return f"rank {rank} ({beat.host}) gives no sign of life, last heard from {beat.place()}"


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
