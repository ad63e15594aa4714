"""How the processes of a run find each other: a roll call that says whom it waits for, and fails with the cause instead of hanging."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from training.runtime.environment import training_hosts
from training.runtime.reporting import write_line

ANNOUNCE_EVERY = 30.0
"""Seconds between log lines that say who is waited for."""

TOOLKIT_PORT = "7777"
"""MASTER_PORT as AWS's container toolkit sets it (sagemaker_pytorch_container/training.py of sagemaker-pytorch-training 3.0.0)."""

_POLL_SECONDS = 0.1
_LINGER_SECONDS = 5
_MPI_NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}
"""torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html) and Open MPI's for the same."""

_calls = itertools.count()
T = TypeVar("T")


class Place(NamedTuple):
    """What a launcher sets for a process."""

    rank: int
    size: int
    local_rank: int
    launcher: str
    """torchrun, mpirun, environment (the same variables, set by something else), or none."""


class Wait:
    """A wait with a deadline, which logs now and then what it waits for."""

    def __init__(self, who: str, seconds: float):
        """
        Args:
            who: the one that waits, for the log.
        """
        self.who, self._seconds, self._started, self._announce = who, seconds, time.monotonic(), ANNOUNCE_EVERY

    @property
    def left(self) -> float:
        """Seconds until the end; below 0 afterwards."""
        return self._seconds - (time.monotonic() - self._started)

    @property
    def limit(self) -> str:
        """The whole wait, for the log."""
        return f"{self._seconds / 60:g} min" if self._seconds >= 60 else f"{self._seconds:g} s"

    def pause(self, what: Callable[[], str], is_heard: bool = True) -> None:
        """Sleep briefly; every ANNOUNCE_EVERY seconds print `who: waiting 30 s for what`, if this process is to be heard."""
        elapsed = time.monotonic() - self._started
        if elapsed >= self._announce:
            self._announce += ANNOUNCE_EVERY
            if is_heard:
                write_line(f"{self.who}: waiting {elapsed:.0f} s for {what()}")
        time.sleep(min(_POLL_SECONDS, 0.005 + elapsed / 10))  # most roll calls are over at once


def read_place(environ: MutableMapping[str, str] = os.environ) -> Place:
    """This process's place among all, as torchrun or mpirun set it; rank 0 of 1 in a plain shell.

    Under mpirun, variables that torch and smddp look for are added to the environment if they are missing.

    Raises:
        ValueError: some of the variables are set, and some are not.
    """
    found = {name: environ.get(name, environ.get(mpi_name)) for name, mpi_name in _MPI_NAMES.items()}
    if found["WORLD_SIZE"] in (None, "1") and found["RANK"] in (None, "0"):
        return Place(0, 1, int(found["LOCAL_RANK"] or 0), "none")
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"the environment has {', '.join(sorted(set(found) - set(missing)))} but no {', '.join(missing)}: "
            "start the script with torchrun or mpirun, which set all of them, or set none to train in one process"
        )
    rank, size, local_rank = (int(value or 0) for value in found.values())
    if not 0 <= rank < size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE {size}: ranks count from 0 to {size - 1}, each once")
    if "TORCHELASTIC_RUN_ID" in environ:
        return Place(rank, size, local_rank, "torchrun")
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return Place(rank, size, local_rank, "environment")
    hosts = training_hosts(environ)  # mpirun's rank 0 is on the first of them
    all_here = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    lacking = {
        **found,
        "MASTER_ADDR": hosts[0] if hosts else "127.0.0.1" if all_here else None,
        "MASTER_PORT": TOOLKIT_PORT,
    }
    for name, value in lacking.items():
        if value is not None:
            environ.setdefault(name, value)
    return Place(rank, size, local_rank, "mpirun")


def roll_call(place: Place, backend: str, wait: Wait) -> Store:
    """Wait until every rank is there.

    Every rank enters its number and host in a store that torchrun's agent keeps, or else rank 0. Rank 0 logs who is missing; if
    rank 0 itself is missing, the others do.

    Args:
        backend: the one that this rank is going to use; all must want the same.

    Returns:
        The store, for the process group that comes next.

    Raises:
        TimeoutError: the wait is over; the message says who was missing, or why rank 0 could not be reached.
        ConnectionError: rank 0 has ended meanwhile.
        ValueError: the ranks do not fit together, or nothing says where they meet.
    """
    host, port, by_agent = _meeting_place(place)
    store = _open_store(place, host, port, by_agent, wait)
    # a separate prefix for every start of the workers and every call in a process: an agent's store outlives them
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"roll call {restart}.{next(_calls)}", store)
    kind = f"{backend} of {place.size}"
    try:
        _enter(store, place.rank, kind)
        while store.add("entered", 0) < place.size:
            if wait.left <= 0:
                raise TimeoutError(
                    f"after {wait.limit} still missing: {_absent(store, place.size)}. Their own logs say why: they failed, "
                    "were killed, or have yet to start. If they only need longer, raise process_group_minutes"
                )
            wait.pause(lambda: _absent(store, place.size), is_heard=place.rank == 0 or not store.add(_entered(0), 0))
        if store.add(kind, 0) < place.size:
            kinds = _kinds(store, place.size)
            _leave_last(store, place)
            raise ValueError(f"the ranks do not match: {kinds}. Give every host the same image, devices and command")
    except RuntimeError as error:  # torch's, when the store is gone
        raise ConnectionError(
            f"rank 0 ended while {wait.who} waited for all of {place.size} ranks; its own log says why ({error})"
        ) from error
    if place.launcher == "environment":  # torchrun and mpirun say it themselves
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(store.add(f"host {this_host()}", 0)))
    return store


def in_time(action: Callable[[], T], wait: Wait, what: str, cause: str, *, is_heard: bool = True) -> T:
    """Run one of torch's blocking calls in a thread, so that the wait for it is logged and has a deadline.

    Args:
        what: what is waited for.
        cause: why it may not come, for the error's message.

    Raises:
        TimeoutError: the wait is over; the call goes on in its thread, which does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        if wait.left <= 0:
            raise TimeoutError(f"after {wait.limit} {wait.who} still waits for {what}: {cause}")
        wait.pause(lambda: what, is_heard=is_heard)
    if errors:
        raise errors[0]
    return results[0]


def this_host() -> str:
    """This host's name in the job."""
    return os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


def _meeting_place(place: Place) -> tuple[str, int, bool]:
    """Where the store of the roll call listens: host, port, and whether torchrun's agent keeps it."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ValueError(
            f"{place.size} processes, but MASTER_ADDR is {host!r} and MASTER_PORT {port!r}: give rank 0's host name and a free "
            "port there, or start the script with torchrun, which sets them"
        )
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # smddp's own start may take MASTER_PORT itself
    return host, int(port) + (place.launcher == "mpirun"), by_agent


def _open_store(place: Place, host: str, port: int, by_agent: bool, wait: Wait) -> Store:
    """The store of the roll call; rank 0 makes it if no agent did."""
    makes_it = place.rank == 0 and not by_agent
    if not makes_it:
        _reach(host, port, wait)

    def connect() -> Store:
        limit = timedelta(seconds=max(wait.left, 1))
        store: Store = dist.TCPStore(host, port, None, makes_it, limit, False)
        return store

    try:
        return in_time(
            connect,
            wait,
            f"the store at {host}:{port}",
            "MASTER_ADDR is not rank 0's own host, or another program listens there",
        )
    except RuntimeError as error:
        raise ConnectionError(
            f"{wait.who} could not open the store at {host}:{port}: {error}. Another run may hold the port: "
            "end it, or set another MASTER_PORT"
        ) from error


def _reach(host: str, port: int, wait: Wait) -> None:
    """Wait until somebody listens there; torch's own attempt would say neither whom it waits for nor why."""
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5, max(wait.left, 0.1))).close()
            return
        except OSError as error:
            cause = _why_unreachable(host, error)
        if wait.left <= 0:
            raise TimeoutError(f"after {wait.limit} {wait.who} has not reached rank 0 at {host}:{port}: {cause}")
        wait.pause(lambda: f"rank 0 at {host}:{port}: {cause}")  # noqa: B023 (called at once)


def _why_unreachable(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host} cannot be resolved, because that host is not up, or MASTER_ADDR is wrong"
    if isinstance(error, ConnectionRefusedError):
        return "the host answers but nothing listens yet, because rank 0 is still starting or has ended: see its log"
    return (
        f"no answer ({error}), because that host is down, or a firewall blocks it: let the security group pass all traffic "
        "among its own members"
    )


def _entered(rank: int) -> str:
    """The key that counts a rank's entry."""
    return f"rank {rank}"


def _enter(store: Store, rank: int, kind: str) -> None:
    """Register this rank. Counters are read by adding 0, which never blocks in any version of torch."""
    host = this_host()
    entry = f"process {os.getpid()} on {host}: {kind}"
    first = store.compare_set(f"entry {rank}", "", entry).decode()
    if first != entry:
        raise ValueError(f"two processes have rank {rank}, this one and {first}: give each host its own --node_rank")
    for key in (f"host {host}", kind, _entered(rank), "entered"):
        store.add(key, 1)


def _absent(store: Store, size: int) -> str:
    """Who has not entered, for the log."""
    absent = [rank for rank in range(size) if not store.add(_entered(rank), 0)]
    silent = [host for host in training_hosts() if not store.add(f"host {host}", 0)]
    return f"{_ranks(absent)} (of {size})" + (f", and anyone from {', '.join(silent)}" if silent else "")


def _leave_last(store: Store, place: Place) -> None:
    """On rank 0, which may keep the store: let the others read it before this process fails, but not forever."""
    store.add("read", 1)
    end = time.monotonic() + _LINGER_SECONDS
    while place.rank == 0 and store.add("read", 0) < place.size and time.monotonic() < end:
        time.sleep(0.01)


def _kinds(store: Store, size: int) -> str:
    """Which ranks use which backend and size, for the log."""
    kinds: dict[str, list[int]] = {}
    for rank in range(size):
        if store.add(_entered(rank), 0):
            kinds.setdefault(store.get(f"entry {rank}").decode().partition(": ")[2], []).append(rank)
    return "; ".join(f"{_ranks(ranks)} on {kind}" for kind, ranks in kinds.items())


def _ranks(ranks: Iterable[int]) -> str:
    """[0, 2, 3, 4] as `ranks 0, 2-4`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"ranks {text}" if len(runs) > 1 or "-" in text else f"rank {text}"
