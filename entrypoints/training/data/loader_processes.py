"""A loader that makes batches in other processes, one at a time each, so that none holds the GIL that kernel launches need.

The batches lie in a ring of slots that all processes map. The training process says which images go into which slot, so the ring also
throttles the other processes; each answers with a description of a few hundred bytes. On a GPU the ring is pinned: the device fetches a
batch from where it was decoded, with no copy in between.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch

from training.data.batches import CPU_FIELDS, EvaluationBatches, Images, SampleKey, TrainingBatches
from training.data.loader_serving import Collate, Drop, Failed, Made, Make, Memory, serve
from training.data.shared_ring import Ring, slot_bytes_for, unpack
from training.data.threads import AHEAD, CPU
from training.data.worker_processes import from_clean_server
from training.runtime import accelerator

OF_A_GPU = 2
"""Ring slots for batches that a GPU has yet to fetch, besides one for the batch in training and those for batches made ahead."""


class LoaderProcesses:
    """A sampler's batches, in its order. The processes take turns, and one makes each batch.

    Args:
        dataset, batch_sampler, collate: as ThreadedLoader takes them; the dataset and `collate` can be pickled.
        processes: how many make batches.
        pin_for: the device that gets the batches.
        zero_copy: a batch lies in the ring and is valid until the next one is requested; the processes live as long as the loader.
            Otherwise the batches are copies, pinned for a GPU, and the processes end with each iteration.
    """

    def __init__(
        self,
        dataset: Images,
        batch_sampler: TrainingBatches | EvaluationBatches,
        collate: Collate,
        processes: int,
        *,
        pin_for: torch.device = CPU,
        zero_copy: bool,
    ):
        self.batch_sampler, self.zero_copy, self._pin_for = batch_sampler, zero_copy, pin_for
        self._serve, self._count = functools.partial(serve, dataset, collate), processes
        self._context = from_clean_server()  # which gets ready meanwhile
        self._processes: _Processes | None = None
        self._iteration: Callable[[], Generator[Any, None, None] | None] = lambda: None
        """A weak reference to the latest, which may be gone."""

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        before = self._iteration()
        if before is not None:
            before.close()  # an error's stack may still hold it; its batches must not appear in this one
        iteration = self._batches(iter(self.batch_sampler))  # the epoch is fixed here, as in a DataLoader
        self._iteration = weakref.ref(iteration)
        return iteration

    def _batches(self, draws: Iterator[list[SampleKey]]) -> Generator[Any, None, None]:
        if self.zero_copy:
            if self._processes is None or self._processes.ended:
                self._processes = self._started()
            yield from self._processes.batches(draws)
            return
        processes = self._started()
        try:
            yield from processes.batches(draws)
        finally:
            processes.end()

    def _started(self) -> _Processes:
        started = [_started(self._context, self._serve) for _ in range(self._count)]
        return _Processes(started, self._pin_for, self.zero_copy)


class _Process:
    """A loader process as the training process sees it."""

    def __init__(self, process: BaseProcess, pipe: Connection):
        self.process, self.pipe = process, pipe

    def send(self, message: tuple[Any, ...]) -> None:
        with self._talking():
            self.pipe.send(message)

    def send_file(self, file: int) -> None:
        with self._talking():
            reduction.send_handle(self.pipe, file, self.process.pid)

    def answer(self) -> Any:
        with self._talking():
            return self.pipe.recv()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """
        Raises:
            RuntimeError: the process has ended.
        """
        try:
            yield
        except (EOFError, OSError) as error:
            self.process.join(10)  # its pipe closes a little before it is gone
            code = self.process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise RuntimeError(
                f"a loader process has ended ({how}): the log above says why; if it does not, the host's memory was full"
            ) from error


class _Asked(NamedTuple):
    """A requested batch that is yet to arrive."""

    process: _Process
    slot: int | None
    """None: it was requested before there was a ring."""


class _Processes:
    """All loader processes, with the ring that they share."""

    def __init__(self, processes: Sequence[_Process], pin_for: torch.device, zero_copy: bool):
        self._device, self._zero_copy = pin_for, zero_copy
        self._turns, self._processes = itertools.cycle(processes), processes
        self._ahead = AHEAD * len(processes)
        self._ring: Ring | None = None
        self._free: deque[int] = deque()
        self._fetched: deque[tuple[int, Any]] = deque()
        """Slots that a GPU fetches from, each with the event that follows its fetch."""
        self._lost: RuntimeError | None = None
        """Set once a process has ended by itself."""
        self.end = Finalize(self, _end, (processes,), exitpriority=10)
        """Also runs when the program ends, before Python waits for its processes."""

    @property
    def ended(self) -> bool:
        """Whether this process has ended them."""
        return self._processes[0].pipe.closed

    def batches(self, draws: Iterator[list[SampleKey]]) -> Iterator[Any]:
        """The batches of `draws`, in their order.

        Raises:
            RuntimeError: a process has ended.
        """
        if self._lost is not None:
            raise self._lost
        asked: deque[_Asked] = deque()
        lent: int | None = None
        try:
            while True:
                while len(asked) <= self._ahead and self._has_room(asked):
                    batch = next(draws, None)
                    if batch is None:
                        break
                    asked.append(self._ask(batch))
                if not asked:
                    return
                with self._watched():
                    description = asked[0].process.answer()
                lent = asked.popleft().slot
                if isinstance(description, Failed):
                    raise description.error from _Stack(description.text)
                assert isinstance(description, Made)
                yield self._given(description.batch, lent)
                self._give_back(lent)
                lent = None
        finally:
            # once they have ended there is nothing left to tidy up, maybe not even this module: the program ends
            if not self.ended:
                try:
                    self._drop(asked)
                finally:
                    self._give_back(lent)

    def _has_room(self, asked: Collection[_Asked]) -> bool:
        """Whether one more batch can be requested: a slot is free, or there is no ring yet and few batches are on their way.

        Args:
            asked: batches yet to arrive. If there are none, waits until the device has fetched from a slot.
        """
        while self._fetched:
            slot, event = self._fetched[0]
            if not event.query():
                if self._free or asked:
                    break
                event.synchronize()
            self._fetched.popleft()
            self._free.append(slot)
        return len(asked) <= AHEAD if self._ring is None else bool(self._free)

    def _ask(self, draws: list[SampleKey]) -> _Asked:
        asked = _Asked(next(self._turns), self._free.popleft() if self._ring is not None else None)
        with self._watched():
            asked.process.send(Make(asked.slot, draws))
        return asked

    def _given(self, packed: Any, slot: int | None) -> Any:
        """A batch as it is handed out."""
        where = self._ring.slot(slot) if self._ring is not None and slot is not None else None
        batch = unpack(packed, where, self._of_slot, lambda values: accelerator.pinned(values, self._device))
        if self._ring is None and batch is not None:  # it shows how large a slot has to be
            self._open(slot_bytes_for(batch))
        if self._zero_copy and hasattr(batch, "_asdict"):  # what is read on the CPU may be read later
            return batch._replace(**{name: getattr(batch, name).clone() for name in CPU_FIELDS if hasattr(batch, name)})
        return batch

    def _of_slot(self, values: torch.Tensor) -> torch.Tensor:
        if self._zero_copy:
            return values
        return accelerator.pinned(values, self._device) if accelerator.is_gpu(self._device) else values.clone()

    def _open(self, slot_bytes: int) -> None:
        """Make the ring; batches that were requested before still come through the pipe."""
        fetched_late = self._zero_copy and accelerator.is_gpu(self._device)
        ring = Ring(self._ahead + 1 + (OF_A_GPU if fetched_late else 0), slot_bytes)
        if fetched_late:
            unpin = weakref.finalize(ring, accelerator.pin_in_place(ring.bytes, self._device))
            unpin.atexit = False  # the driver does it, and does not wait for a kernel that hangs
        with self._watched():
            for one in self._processes:
                one.send(Memory(ring.slots, ring.slot_bytes))
                one.send_file(ring.file)
        os.close(ring.file)
        self._ring, self._free = ring, deque(range(ring.slots))

    def _give_back(self, slot: int | None) -> None:
        """Free the slot of a used batch: now, or once the device has finished the work it was given so far."""
        if slot is None:
            return
        if not (self._zero_copy and accelerator.is_gpu(self._device)):
            self._free.append(slot)
            return
        event = accelerator.module(self._device).Event(blocking=True)
        event.record()
        self._fetched.append((slot, event))

    def _drop(self, asked: deque[_Asked]) -> None:
        """Drop requested batches; their slots are free once no process works on them any more."""
        with contextlib.suppress(RuntimeError), self._watched():  # the next iteration raises it
            for one in dict.fromkeys(each.process for each in asked):
                one.send(Drop())
            while asked:
                asked[0].process.answer()
                slot = asked.popleft().slot
                if slot is not None:
                    self._free.append(slot)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Guard an exchange with a process. If one has ended, every later iteration raises that, since nobody knows which answers and slots
        of the others are left. If an interruption such as Ctrl-C comes between, all are ended, and the next iteration has new ones."""
        try:
            yield
        except RuntimeError as error:
            self._lost = error
            raise
        except BaseException:
            self.end()
            raise


def _started(context: ForkServerContext, serving: Callable[[Connection], None]) -> _Process:
    ours, theirs = context.Pipe()
    process = context.Process(target=serving, args=(theirs,), daemon=True, name="loader")
    process.start()
    theirs.close()
    return _Process(process, ours)


def _end(processes: Sequence[_Process]) -> None:
    for one in processes:
        one.pipe.close()  # which ends it
    ends = time.monotonic() + 5
    for one in processes:
        one.process.join(max(0.0, ends - time.monotonic()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join(5)  # a signal takes its time too


class _Stack(Exception):
    """The stack trace of an error in the other process, as its cause."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"
