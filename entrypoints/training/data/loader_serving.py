"""A loader process, and the messages between it and the training process."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from training.data.batches import Images, SampleKey
from training.data.shared_ring import Ring, SlotWriter
from training.data.threads import BatchInTheMaking
from training.runtime.reporting import write_line

Collate = Callable[[list[Any], torch.Tensor], Any]


class Memory(NamedTuple):
    """The ring exists; its file descriptor follows."""

    slots: int
    slot_bytes: int


class Make(NamedTuple):
    slot: int | None
    """None: there is no ring yet, and the batch travels through the pipe."""
    draws: list[SampleKey]


class Drop(NamedTuple):
    """No batch requested so far is wanted any more; each is still answered."""


class Made(NamedTuple):
    batch: Any
    """As SlotWriter packs it."""


class Dropped(NamedTuple):
    """The answer to a dropped request."""


class Failed(NamedTuple):
    error: BaseException
    text: str
    """The stack trace."""


def serve(dataset: Images, collate: Collate, pipe: Connection) -> None:
    """Serve until the training process closes the pipe or ends."""
    os.setpgrp()  # torchrun and mpirun send SIGTERM to the training process's group, whose last steps still need batches
    # Python ends left-over processes with SIGTERM; the fork server ignores it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_the_cores()
    torch.set_num_threads(1)  # the other cores have processes of their own
    _Server(dataset, collate, pipe).run()


def leave_the_cores() -> None:
    """Let this process's threads use only CPU time that others leave (sched(7), SCHED_IDLE); if a container forbids it, they compete."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        write_line(
            f"the loader process competes with the training process for cores (SCHED_IDLE: {error.strerror}): allow the container "
            "sched_setscheduler, or keep num_workers below the cores"
        )


class _Server:
    """Two threads beside the one that makes images: one listens, and one answers in the order of the requests.

    A second image thread would wait for the GIL: on 16 cores beside an H100, 15 image threads made 6,890 images/s with one per process
    and 4,180 with two (docs/gpu.md).
    """

    def __init__(self, dataset: Images, collate: Collate, pipe: Connection):
        self._dataset, self._collate, self._pipe = dataset, collate, pipe
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data worker")
        self._ring: Ring | None = None
        self._asked: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._unanswered: deque[_Answer] = deque()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            answer = self._asked.get()
            message = answer.message()
            self._unanswered.popleft()
            try:
                self._pipe.send(message)
            except ConnectionError:
                os._exit(0)

    def _listen(self) -> None:
        try:
            while True:
                self._handle(self._pipe.recv())
        except (EOFError, ConnectionError):  # the training process has closed the pipe, or ended
            os._exit(0)  # without waiting for a file that does not come
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # else the training process would wait for an answer for ever

    def _handle(self, asked: Any) -> None:
        if isinstance(asked, Memory):
            file = reduction.recv_handle(self._pipe)
            self._ring = Ring(asked.slots, asked.slot_bytes, file)
            os.close(file)
        elif isinstance(asked, Drop):
            for answer in self._unanswered.copy():  # the other thread takes some away meanwhile
                answer.cancel()
        else:
            slot = self._ring.slot(asked.slot) if self._ring is not None and asked.slot is not None else None
            answer = _Answer(self, SlotWriter(slot), asked.draws)
            self._unanswered.append(answer)
            self._asked.put(answer)

    def begun(self, draws: list[SampleKey], memory: Any) -> BatchInTheMaking:
        return BatchInTheMaking(self._dataset, draws, self._collate, self._pool, 1, memory)


class _Answer:
    """The outcome of one requested batch."""

    def __init__(self, server: _Server, writer: SlotWriter, draws: list[SampleKey]):
        self._writer = writer
        self._batch: BatchInTheMaking | None = None
        self._failed: Failed | None = None
        try:
            self._batch = server.begun(draws, writer.empty)
        except Exception as error:  # what a dataset does first for a whole batch; it reads no file yet
            self._failed = _failed(error)

    def cancel(self) -> None:
        if self._batch is not None:
            self._batch.cancel()

    def message(self) -> Made | Dropped | Failed:
        """The answer, once nothing is written to the slot any more."""
        if self._batch is None:
            assert self._failed is not None
            return self._failed
        self._batch.settle()
        try:
            return Made(self._writer.pack(self._batch.result()))
        except CancelledError:
            return Dropped()
        except Exception as error:  # whatever a dataset raises is raised again where the batch is awaited
            return _failed(error)


def _failed(error: Exception) -> Failed:
    """An error as it is sent: itself if it can be pickled and the training process knows its class by the same name."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        travels = type(error).__module__ != "__mp_main__" and bool(pickle.loads(pickle.dumps(error)))
    except Exception:  # a third-party class may raise anything when it is pickled
        travels = False
    if not travels:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failed(error, text)
