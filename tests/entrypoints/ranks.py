"""Real ranks for tests: processes with their own environment, forked from one that has imported torch, so that each starts at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from multiprocessing.forkserver import ensure_running
from pathlib import Path

from tests.conftest import ROOT

HEAD = """
    import json, os, pathlib, signal, sys, time
    import torch
    from torch import nn
    from training.distributed.world import process_group
    from training.runtime.failure import failure_file
"""
"""What a script of a rank finds, beside `out`, a folder."""


def run_ranks(
    tmp_path: Path, text: str, *, size: int = 2, environments: list[Mapping[str, str]] | None = None
) -> list[subprocess.CompletedProcess]:
    """Runs a script's text as so many ranks to their end.

    Args:
        environments: each rank's own variables, beside the test's; None: those that torchrun would set, for all on one host.

    Returns:
        For each rank its exit code, and what it wrote.
    """
    with started_ranks(tmp_path, text, size=size, environments=environments) as processes:
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
    return [
        subprocess.CompletedProcess(
            f"rank {rank}", code, *((tmp_path / f"{name}-{rank}").read_text() for name in ("stdout", "stderr"))
        )
        for rank, code in enumerate(codes)
    ]


def from_clean_forks() -> multiprocessing.context.BaseContext:
    """Processes that start at once and hang in no lock: their parent has imported all that they need and computed nothing, so has no
    threads. The first call starts that parent: with one thread, and in the folder where it finds these tests, and not another package of
    that name."""
    # not where this module begins: that parent imports it before it finds `training`
    from training.data.worker_processes import PRELOADED

    context = multiprocessing.get_context("forkserver")
    # this module first, whose package says where the others are: what is not found is passed over
    context.set_forkserver_preload([__name__, *PRELOADED, "torch._dynamo"])
    before, folder = os.environ.get("OMP_NUM_THREADS"), Path.cwd()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    try:
        ensure_running()
    finally:
        os.chdir(folder)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


@contextlib.contextmanager
def started_ranks(
    tmp_path: Path, text: str, *, size: int = 2, environments: list[Mapping[str, str]] | None = None
) -> Iterator[list]:
    """The same while they run; who is left in the end is killed."""
    code = textwrap.dedent(HEAD) + f"out = pathlib.Path({str(tmp_path)!r})\n" + textwrap.dedent(text)
    context = from_clean_forks()
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        context.Process(target=_run, args=(code, {**common, **environment}, tmp_path, rank))
        for rank, environment in enumerate(environments or torchrun_environments(size))
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def torchrun_environments(size: int) -> list[dict[str, str]]:
    """What ranks on one host need to find each other."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


PORTS = range(16384, 20000)
"""Of which `free_port` gives some."""

_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that nobody has now, and the next one too: below those that the kernel gives to connections, of which one might take it before
    a rank listens there, and below those that runs reserve (local_hosts.reserve_port). None is given twice: of two dozen drawn by chance,
    two are the same in one of thirty runs. So each of pytest's workers draws from a slice of its own."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    each = len(PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = PORTS[number * each : (number + 1) * each]
    for port in random.SystemRandom().sample(own, each):
        if port + 1 not in own or {port - 1, port, port + 1} & _GIVEN:
            continue
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            _GIVEN.add(port)
            return port
    raise OSError(f"no free TCP port between {own[0]} and {own[-1]}")


def _run(code: str, environment: Mapping[str, str], folder: Path, rank: int) -> None:
    """A rank."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method("fork", force=True)  # for data workers, as in a script of its own
    os.environ.clear()
    os.environ.update(environment)
    if str(ROOT / "entrypoints") not in sys.path:
        sys.path.insert(0, str(ROOT / "entrypoints"))
    exec(compile(code, f"<rank {rank}>", "exec"), {"__name__": "__main__"})


QUICK = """
from training.distributed import rendezvous
rendezvous.ANNOUNCE_EVERY = 0.2
"""

TOGETHER = """
(out / os.environ["RANK"]).touch()
while not all((out / rank).exists() for rank in "01"):
    time.sleep(0.01)
"""
"""Lets two ranks begin at the same time, however busy the machine is."""
