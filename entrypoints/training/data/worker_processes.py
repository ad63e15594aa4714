"""Data worker processes that outlive a stop: SIGTERM goes to the whole process group, and the last steps still need their batches."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import torch

from training.data.workers import worker_kind
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

PRELOADED = ("training.engine.loop", "training.teacher.frozen")
"""What the server imports once for all workers: what their own first import, the script, needs."""

ENTRYPOINTS = Path(__file__).parents[2]


def in_own_group(_worker: int) -> None:
    """A worker's first act: torchrun and mpirun send SIGTERM to its parent's group, and the parent ends it itself.

    It must not ignore the signal: by it Python ends workers that are left.
    """
    os.setpgrp()
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        threading.Thread(target=_end_with, args=(trainer.sentinel,), name="trainer watch", daemon=True).start()


def _end_with(sentinel: int) -> None:
    """End this process when the one that trains is gone, by whatever signal.

    torch's own watch looks at the parent's identity, which of a worker from a server is the server, and that lives as long as a worker
    does. Both would stay, and keep the output open which the host's toolkit reads to its end: the job would go on until its longest time.
    """
    wait([sentinel])
    os._exit(1)


def begin_server(settings: TrainingSettings, device: torch.device) -> None:
    """Beside a GPU, have the server of worker processes import what they need while images are listed and models made; else they would be
    waited for before the first step, on a machine with an H100 for 9 of 18 seconds (tests/insight/h100/small.tar.xz)."""
    if accelerator.is_gpu(device) and settings.num_workers != 0 and worker_kind(settings, device) != "threads":
        from_clean_server()


def from_clean_server() -> ForkServerContext:
    """The context of workers that are no forks of this process: EFA's memory must not be forked
    (https://github.com/aws/aws-ofi-nccl/issues/69), nor CUDA's threads.

    Their server is started here, the first time, by the main thread, and stays as long as this process. SIGTERM does not end it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with _ignoring_sigterm(), _finding_entrypoints():
        ensure_running()
    return context


@contextlib.contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    """What is started meanwhile ignores SIGTERM for good: the disposition survives exec, a handler does not."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _finding_entrypoints() -> Iterator[None]:
    """What is started meanwhile finds the package `training`; Python 3.11's server does not take over sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ENTRYPOINTS), *([before] if before else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
