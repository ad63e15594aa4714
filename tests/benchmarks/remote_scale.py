"""A thousand GPUs and five hundred servers, extrapolated from the cost of one head, one server and one trainer here."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from engine import table
from remote_hosts import START_SECONDS, TRAINER_CORE, TRAINERS, Child
from training.servers.groups import Groups
from training.servers.parts import PART
from training.servers.pool import MAX_BYTES, QUEUED, look_seconds
from training.servers.ray_node import connected, node

HOSTS, GPUS, SERVERS = 128, 8, 512
"""Training hosts, processes per host, and servers of the extrapolated cluster."""

FEW, MANY = 4, 24
"""Servers that the head is measured with. What grows with their number is extrapolated from these two."""

CALLS, REPEATS = 1000, 5
"""Lookups whose CPU time is measured at once, since the kernel counts it in hundredths of a second; and repeats, for a median."""

SETTLE_SECONDS = 20
"""How long the head is busy after a server's start."""


@dataclass(frozen=True)
class Head:
    """The cost of a number of servers, without a single image."""

    servers: int
    call_ms: float
    """CPU of the head's process for one training process's lookup of the servers."""
    own_call_ms: float
    """CPU of the training process, for the same."""
    memory_mb: float
    """Of the training process once it has asked all its servers."""


def head(pipe: Connection, port: int, log: Path) -> None:
    """A head with idle servers beside it: measured with FEW, then with MANY."""
    groups = Groups(TRAINERS[0], TRAINERS[:1], (), port)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(node(groups, log))
        stack.enter_context(connected(groups, process, START_SECONDS, talks=False))
        import ray  # read its settings just now
        from training.servers.cluster import PREFIX, RayServers

        parent = psutil.Process(process.pid)
        (gcs,) = [one for one in parent.children(recursive=True) if one.name() == "gcs_server"]
        servers, handles = RayServers(0, 1), []
        for count in (FEW, MANY):
            actor: Any = ray.remote(Idle)
            handles += [
                actor.options(name=f"{PREFIX}{TRAINERS[0]}/{number}/4/{number:08x}", num_cpus=0).remote()
                for number in range(len(handles), count)
            ]
            ray.get([one.about.remote() for one in handles])
            pipe.send(_measured(servers, gcs, count))


class Idle:
    """A server without images."""

    def about(self) -> None:
        return None


def _measured(servers: Any, gcs: psutil.Process, count: int) -> Head:
    assert len(servers.names()) == count
    time.sleep(SETTLE_SECONDS)
    looks = [_looked(servers, gcs) for _ in range(REPEATS)]
    call, own = (1000 * statistics.median(column) / CALLS for column in zip(*looks))
    return Head(count, call, own, psutil.Process().memory_info().rss / 1e6)


def _looked(servers: Any, gcs: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the head's process and of this one for CALLS lookups, without the head's at rest."""
    before, at = _cpu(gcs), time.perf_counter()
    time.sleep(2)
    rest = (_cpu(gcs) - before) / (time.perf_counter() - at)
    before, own, at = _cpu(gcs), time.process_time(), time.perf_counter()
    for _ in range(CALLS):
        servers.names()
    seconds = time.perf_counter() - at
    return _cpu(gcs) - before - rest * seconds, time.process_time() - own


def _cpu(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def of_head(port: int, folder: Path) -> tuple[Head, Head]:
    """The head with few servers and with many."""
    child = Child(TRAINER_CORE, head, port, folder / "ray-head.log")
    try:
        return child.answer(), child.answer()
    finally:
        child.end()


def reckoned(few: Head, many: Head, *, server_ms: float, trainer_ms: float, host_ms: float, kilobytes: float) -> str:
    """The cluster of HOSTS x GPUS training processes and SERVERS servers, as a table.

    Args:
        server_ms: CPU milliseconds of a server's thread per image; trainer_ms: of a training process; host_ms: of Ray's own processes
            on a training host.
        kilobytes: of an image in transit.
    """
    from training.servers.cluster import THREADS, share  # imports Ray, which reads its settings then

    processes, names = HOSTS * GPUS, [f"server {number:04}" for number in range(SERVERS)]
    asked = [len(share(names, rank, processes)) for rank in range(processes)]
    images = SERVERS * THREADS * 1000 / server_ms
    looks = processes / look_seconds(processes)
    call = _at(few.call_ms, many.call_ms)
    window = min(MAX_BYTES / 1e6, asked[0] * (THREADS + QUEUED) * PART * kilobytes / 1000)
    connections = asked[0] * max(0.0, (many.memory_mb - few.memory_mb) / (MANY - FEW))
    gigabits = images * kilobytes * 8 / 1e6
    rows = [("", "reckoned", "from")]
    rows += [
        ("images/s that the servers make", f"{images:,.0f}", f"{THREADS} threads each, {server_ms:.2f} ms an image"),
        ("images/s for each GPU", f"{images / processes:,.0f}", ""),
        ("servers that a training process asks", f"{asked[0]}", "AT_MOST"),
        ("training processes that ask a server", f"{sum(asked) / SERVERS:.0f}", ""),
        ("connections in all", f"{sum(asked):,}", f"{processes * SERVERS:,} if each asked all"),
        ("Gbit/s that a training host receives", f"{gigabits / HOSTS:.1f}", f"{kilobytes:.0f} kB an image"),
        ("Gbit/s that a server sends", f"{gigabits / SERVERS:.2f}", f"{THREADS} cores"),
        (
            "cores of a training host for receiving",
            f"{images / HOSTS * (trainer_ms + host_ms) / 1000:.1f}",
            f"{trainer_ms:.3f} ms an image in its process, {host_ms:.3f} in Ray's",
        ),
        (
            "MB of a training process for batches",
            f"{window:,.0f}",
            f"{asked[0]} servers kept busy; {MAX_BYTES / 1e6:,.0f} at most",
        ),
        ("MB of a training process for connections", f"{connections:,.0f}", f"{FEW} and {MANY} servers"),
        (
            "looks a second that the head answers",
            f"{looks:.0f}",
            f"one of each process in {look_seconds(processes):.0f} s",
        ),
        (
            "of one of the head's cores, for that",
            f"{looks * call / 10:.0f} %",
            f"{call:.2f} ms a look at {SERVERS} servers",
        ),
    ]
    return table(rows)


def _at(few: float, many: float) -> float:
    """A figure at SERVERS, on the line through the two measured."""
    return few + (many - few) / (MANY - FEW) * (SERVERS - FEW)
