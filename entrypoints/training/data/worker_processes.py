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
"""Modules that the fork server imports once for all workers: those that their own first import, the script, needs."""

ENTRYPOINTS = Path(__file__).parents[2]


def in_own_group(_worker: int) -> None:
    """Start a worker in its own process group: torchrun and mpirun send SIGTERM to its parent's, and the parent ends it itself.

    It must not ignore the signal, by which Python ends left-over workers.
    """
    os.setpgrp()
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        threading.Thread(target=_end_with, args=(trainer.sentinel,), name="trainer watch", daemon=True).start()


def _end_with(sentinel: int) -> None:
    """End this process when the training process is gone, whatever signal ended it.

    torch's own watchdog checks the parent's PID. A worker from the fork server has the server as its parent, which lives as long as a
    worker does. Both would stay and keep the output open that the host's toolkit reads to its end: the job would run to its time limit.
    """
    wait([sentinel])
    os._exit(1)


def begin_server(settings: TrainingSettings, device: torch.device) -> None:
    """Beside a GPU, have the fork server import what workers need while images are listed and models made; else the first step would wait
    for that, on a machine with an H100 for 9 of 18 seconds (tests/insight/h100/small.tar.xz)."""
    if accelerator.is_gpu(device) and settings.num_workers != 0 and worker_kind(settings, device) != "threads":
        from_clean_server()


def from_clean_server() -> ForkServerContext:
    """The context of workers that are not forks of this process: EFA's memory must not be forked
    (https://github.com/aws/aws-ofi-nccl/issues/69), nor CUDA's threads.

    The first call, by the main thread, starts their server, which lives as long as this process. SIGTERM does not end it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with _ignoring_sigterm(), _finding_entrypoints():
        ensure_running()
    return context


@contextlib.contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    """Processes started meanwhile ignore SIGTERM for good: the disposition survives exec, a handler does not."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _finding_entrypoints() -> Iterator[None]:
    """Processes started meanwhile find the package `training`; Python 3.11's fork server does not take over sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ENTRYPOINTS), *([before] if before else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
