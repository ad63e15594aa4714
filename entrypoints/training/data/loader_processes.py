"""A loader whose batches one process makes, by threads, beside the training process: it holds no lock that launching kernels needs.

Its batches lie in a ring of slots that both processes map. The training process says which images are to go to which slot, so the ring is
also what holds the other one back; the answer is a description of a few hundred bytes. On a GPU the ring is pinned: the device fetches a
batch from where a thread decoded it, and no copy is made in between.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from training.data.batches import STAYING, EvaluationBatches, Images, SampleKey, TrainingBatches
from training.data.loader_serving import Collate, Drop, Failed, Made, Make, Memory, serve
from training.data.shared_ring import Ring, slot_bytes_for, unpack
from training.data.threads import AHEAD, CPU
from training.data.worker_processes import from_clean_server
from training.runtime import accelerator

SLOTS, OF_A_GPU = AHEAD + 1, 2
"""Of the ring: for batches that are made ahead and the one that trains; and for those that a GPU has yet to fetch."""


class LoaderProcess:
    """The batches of a sampler, in its order.

    Args:
        dataset, batch_sampler, collate: as ThreadedLoader takes them; the dataset and `collate` can be pickled.
        threads: of the process.
        pin_for: the device that gets the batches.
        lends: a batch lies in the ring, and is valid until the next one is asked for; the process lives as long as the loader. Otherwise
            the batches are copies, pinned for a GPU, and the process ends with each iteration.
    """

    def __init__(
        self,
        dataset: Images,
        batch_sampler: TrainingBatches | EvaluationBatches,
        collate: Collate,
        threads: int,
        *,
        pin_for: torch.device = CPU,
        lends: bool,
    ):
        self.batch_sampler, self.lends, self._pin_for = batch_sampler, lends, pin_for
        self._serve = functools.partial(serve, dataset, collate, threads)
        self._context = from_clean_server()  # which gets ready meanwhile
        self._process: _Process | None = None
        self._iteration: Callable[[], Generator[Any, None, None] | None] = lambda: None
        """A reference to the latest, which may be gone."""

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        before = self._iteration()
        if before is not None:
            before.close()  # an error's stack may still hold it; its batches are not to come in this one
        iteration = self._batches(iter(self.batch_sampler))  # which epoch it is, is settled here, as in a DataLoader
        self._iteration = weakref.ref(iteration)
        return iteration

    def _batches(self, draws: Iterator[list[SampleKey]]) -> Generator[Any, None, None]:
        if self.lends:
            if self._process is None or self._process.is_closed:
                self._process = self._started()
            yield from self._process.batches(draws)
            return
        process = self._started()
        try:
            yield from process.batches(draws)
        finally:
            process.end()

    def _started(self) -> _Process:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=self._serve, args=(theirs,), daemon=True, name="loader")
        process.start()
        theirs.close()
        return _Process(process, ours, self._pin_for, self.lends)


class _Process:
    """The process, as the training process sees it."""

    def __init__(self, process: BaseProcess, pipe: Connection, pin_for: torch.device, lends: bool):
        self._process, self._pipe, self._device, self._lends = process, pipe, pin_for, lends
        self._ring: Ring | None = None
        self._free: deque[int] = deque()
        self._fetched: deque[tuple[int, Any]] = deque()
        """Slots that a GPU fetches from, each with the event behind which it has."""
        self.end = Finalize(self, _end, (process, pipe), exitpriority=10)
        """Also when the program ends, before Python waits for its processes."""

    @property
    def is_closed(self) -> bool:
        """Whether it was ended from here."""
        return self._pipe.closed

    def batches(self, draws: Iterator[list[SampleKey]]) -> Iterator[Any]:
        """Those of some draws, in their order."""
        asked: deque[int | None] = deque()
        lent: int | None = None
        try:
            while True:
                while len(asked) <= AHEAD and self._has_room(wait=not asked):
                    batch = next(draws, None)
                    if batch is None:
                        break
                    asked.append(self._ask(batch))
                if not asked:
                    return
                description = self._answer()
                lent = asked.popleft()
                if isinstance(description, Failed):
                    raise description.error from _Stack(description.text)
                assert isinstance(description, Made)
                yield self._given(description.batch, lent)
                self._give_back(lent)
                lent = None
        finally:
            # once closed there is nothing left to tidy up, maybe not even this module: the program ends
            if not self.is_closed:
                try:
                    self._drop(asked)
                finally:
                    self._give_back(lent)

    def _has_room(self, *, wait: bool) -> bool:
        """Whether a batch can be asked for: a slot is free, or there is no ring yet.

        Args:
            wait: until the device has fetched from one.
        """
        while self._fetched:
            slot, event = self._fetched[0]
            if not event.query():
                if self._free or not wait:
                    break
                event.synchronize()
            self._fetched.popleft()
            self._free.append(slot)
        return self._ring is None or bool(self._free)

    def _ask(self, draws: list[SampleKey]) -> int | None:
        slot = self._free.popleft() if self._ring is not None else None
        self._send(Make(slot, draws))
        return slot

    def _given(self, packed: Any, slot: int | None) -> Any:
        """A batch as it is handed out."""
        where = self._ring.slot(slot) if self._ring is not None and slot is not None else None
        batch = unpack(packed, where, self._of_slot, lambda values: accelerator.pinned(values, self._device))
        if self._ring is None and batch is not None:  # it shows how large a slot has to be
            self._open(slot_bytes_for(batch))
        if self._lends and hasattr(batch, "_asdict"):  # what is read on the CPU may be read later
            return batch._replace(**{name: getattr(batch, name).clone() for name in STAYING if hasattr(batch, name)})
        return batch

    def _of_slot(self, values: torch.Tensor) -> torch.Tensor:
        if self._lends:
            return values
        return accelerator.pinned(values, self._device) if accelerator.is_gpu(self._device) else values.clone()

    def _open(self, slot_bytes: int) -> None:
        """Make the ring; batches that were asked for before still come by themselves."""
        fetched_late = self._lends and accelerator.is_gpu(self._device)
        ring = Ring(SLOTS + OF_A_GPU if fetched_late else SLOTS, slot_bytes)
        if fetched_late:
            unpin = weakref.finalize(ring, accelerator.pin_in_place(ring.bytes, self._device))
            unpin.atexit = False  # the driver does it, and does not wait for a kernel that hangs
        self._send(Memory(ring.slots, ring.slot_bytes))
        with self._talking():
            reduction.send_handle(self._pipe, ring.file, self._process.pid)
        os.close(ring.file)
        self._ring, self._free = ring, deque(range(ring.slots))

    def _give_back(self, slot: int | None) -> None:
        """A slot whose batch is used: free, or when the device has done what it was given until now."""
        if slot is None:
            return
        if not (self._lends and accelerator.is_gpu(self._device)):
            self._free.append(slot)
            return
        event = accelerator.module(self._device).Event(blocking=True)
        event.record()
        self._fetched.append((slot, event))

    def _drop(self, asked: deque[int | None]) -> None:
        """What is asked for and not wanted: its slots are free when no thread works on them any more."""
        with contextlib.suppress(RuntimeError):  # it has ended: the next call that needs it raises this
            if asked:
                self._send(Drop())
            while asked:
                self._answer()
                slot = asked.popleft()
                if slot is not None:
                    self._free.append(slot)

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._talking():
            self._pipe.send(message)

    def _answer(self) -> Any:
        with self._talking():
            return self._pipe.recv()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """
        Raises:
            RuntimeError: the process has ended.
        """
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join(1)
            code = self._process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise RuntimeError(
                f"the loader process has ended ({how}): see the log above for its reason; where there is none, the host's memory was full"
            ) from error
        except BaseException:  # such as Ctrl-C: nobody knows which answers are still to come
            self.end()
            raise


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()  # by which it ends
    process.join(5)
    if process.is_alive():
        process.kill()


class _Stack(Exception):
    """The stack of an error in the other process, as its cause."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"
