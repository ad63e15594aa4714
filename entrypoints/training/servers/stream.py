"""Batches of one iteration, in order, made ahead by a thread that sends requests to servers and receives their parts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from training.data.batches import SampleKey
from training.runtime import accelerator
from training.servers.actor import Part
from training.servers.parts import PendingBatch, PendingPart
from training.servers.pool import Pool

TURN_SECONDS = 0.05
"""Between two checks for late parts, waiting parts and servers when nothing arrives."""


class Stream:
    """Iterates over batches, NamedTuples of tensors, in the order of the draws; errors are raised there.

    Args:
        pool: whose servers are asked.
    """

    def __init__(self, pool: Pool, draws: Iterator[list[SampleKey]]):
        self._pool, self._draws = pool, draws
        self._batches: deque[PendingBatch] = deque()
        self._here: dict[Future[Part], PendingPart] = {}
        self._drawn = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._own = ThreadPoolExecutor(pool.threads, thread_name_prefix="data worker")
        self._thread = threading.Thread(target=self._run, name="server pool", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        try:
            while (batch := self._next()) is not None:
                yield batch.whole()
        finally:
            self.close()

    def close(self) -> None:
        """End the thread; what servers still make is dropped. Also called at the end of an iteration."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._own.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> PendingBatch | None:
        """The next batch when it is whole; None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._next_is_there() or self._is_over())
            if self._error is not None:
                raise self._error
            if not self._next_is_there():
                return None
            self._changed.notify_all()
            return self._batches.popleft()

    def _next_is_there(self) -> bool:
        return bool(self._batches) and self._batches[0].missing == 0

    def _is_over(self) -> bool:
        return self._closed or (self._drawn and not self._batches)

    def _run(self) -> None:
        try:
            accelerator.make_current(self._pool.device)  # the current device is per thread
            while not self._is_over():
                started = time.thread_time()
                self._turn()
                self._pool.counts.receiving_seconds += time.thread_time() - started
        except BaseException as error:  # raised where the batches are taken
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._pool.forget()

    def _turn(self) -> None:
        pool = self._pool
        pool.look()
        self._refill()
        pool.assign()
        for part in pool.receive(0 if self._here else TURN_SECONDS):
            self._make_here(part)  # a broken image fails here too, with its own error; a server's trouble does not
        pool.hurry()
        if pool.is_without_servers():
            while pool.waiting and len(self._here) < 2 * pool.threads:
                self._make_here(pool.waiting.popleft())
        made = wait([*self._here], timeout=TURN_SECONDS, return_when=FIRST_COMPLETED).done if self._here else ()
        for future in made:
            pool.made_here(self._here.pop(future), future.result())
        with self._changed:
            if self._next_is_there():
                self._changed.notify_all()
            if not self._closed and not self._here and not pool.is_asking():
                self._changed.wait(TURN_SECONDS)

    def _make_here(self, part: PendingPart) -> None:
        if not part.there:
            self._here[self._own.submit(self._pool.make_here, part.draws)] = part

    def _refill(self) -> None:
        with self._changed:
            while not self._drawn and len(self._batches) < self._pool.window():
                draws = next(self._draws, None)
                if draws is None:
                    self._drawn = True
                    self._changed.notify_all()
                    return
                batch = PendingBatch(draws, self._pool.device)
                self._batches.append(batch)
                self._pool.ask_for(batch)
