"""The training hosts' side of the cluster: starts and finds servers, sends requests and receives answers."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from training.data.batches import SampleKey
from training.servers.actor import About, Answer, ImageServer, Open, Part, PartFailed, ServerFailed
from training.servers.ray_node import SERVES

THREADS = 4
"""Per server; more would wait for Python's lock."""

AT_MOST = 32
"""Servers that a training process asks if there are many: 128 threads."""

PREFIX = "images/"

FIRST_BACK_OFF, LONGEST_BACK_OFF = 10.0, 120.0
"""Seconds until a server that did not start is started again, doubled with each further try; and at most."""

LOOK_SECONDS = 2.0
"""Between two polls of the list of hosts."""


class Placement:
    """Starts servers on every host that joins, as many as it has cores for. One process of the job holds it.

    Ray restarts a server whose process died; one that could not open its images, or lost its host, is restarted here.
    """

    def __init__(self, open_images: Open, log: Callable[[str], None]):
        self._open, self._log, self._ended = open_images, log, threading.Event()
        self._handles: dict[str, ActorHandle[Any]] = {}  # a server lives as long as a handle refers to it
        self._tries: dict[str, int] = {}
        self._next: dict[str, float] = {}
        self._thread = threading.Thread(target=self._look, name="server placement", daemon=True)

    def __enter__(self) -> Placement:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        last = ""
        while not self._ended.is_set():
            try:
                there = {*ray.util.list_named_actors()}
                for one in ray.nodes():
                    if one["Alive"] and SERVES in one["Resources"]:
                        self._start_missing(one, there)
            except Exception as error:  # the head does not answer, or not as ever: the next look tells more
                if _why(error) != last:
                    self._log(f"looking for serving hosts failed: {_why(error)}")
                last = _why(error)
            self._ended.wait(LOOK_SECONDS)

    def _start_missing(self, one: Mapping[str, Any], there: set[str]) -> None:
        """Start a host's missing servers."""
        now = time.monotonic()
        for index, (name, threads) in enumerate(servers_of(one)):
            if name in there or now < self._next.get(name, 0.0):
                continue
            self._tries[name] = self._tries.get(name, 0) + 1
            self._next[name] = now + min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2 ** (self._tries[name] - 1))
            actor: Any = ray.remote(ImageServer)
            self._handles[name] = actor.options(
                name=name,
                get_if_exists=True,
                num_cpus=threads,
                max_concurrency=threads,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(one["NodeID"], soft=False),
            ).remote(self._open, index)


def servers_of(one: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The servers of a host, as Ray describes it: each one's name and threads, THREADS at most, one thread per core."""
    cores = int(one["Resources"].get("CPU", 1))
    count = math.ceil(cores / THREADS)
    each = [cores // count + (index < cores % count) for index in range(count)]
    return [
        (f"{PREFIX}{one['NodeManagerAddress']}/{index}/{threads}/{one['NodeID'][:8]}", threads)
        for index, threads in enumerate(each)
    ]


def share(names: Sequence[str], rank: int, size: int) -> list[str]:
    """The servers that one of `size` training processes asks: all if few, else AT_MOST or more, so that each has a process that asks it.

    Each process may hold a connection to each of its servers: 1,024 processes and all of 2,048 servers would have two million.
    """
    count = max(AT_MOST, math.ceil(len(names) / size))
    if len(names) <= count:
        return [*names]
    ordered, first = sorted(names), rank * len(names) // size
    return [ordered[(first + step) % len(ordered)] for step in range(count)]


class RayServers:
    """The servers as a training process sees them. Tickets are Ray's object references."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._handles: dict[str, ActorHandle[Any]] = {}
        self.part = 1.0
        """This process's share of all servers' threads."""

    def names(self) -> Mapping[str, int] | None:
        """This process's share of the servers that were started and may live, with each one's threads. None: the head does not answer."""
        with contextlib.suppress(ray.exceptions.RayError):
            found = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
            threads = {name: int(name.split("/")[3]) for name in found}
            asked = {name: threads[name] for name in share(found, self._rank, self._size)}
            self.part = sum(asked.values()) / sum(threads.values()) if threads else 1.0
            return asked
        return None

    def about(self, server: str) -> Any:
        """A ticket for a server's description of itself. It asks whoever has that name now, which may be another server than before."""
        self._handles.pop(server, None)
        return self._handle(server).about.remote()

    def ask(self, server: str, draws: Sequence[SampleKey]) -> Any:
        """A ticket for a part of a batch.

        Raises:
            ServerFailed: there is no such server any more.
        """
        return self._handle(server).make.remote([*draws])

    def teach(self, server: str, images: np.ndarray) -> Any:
        """A ticket for the teacher's logits of images, uint8 (batch, channels, height, width).

        Raises:
            ServerFailed: there is no such server any more.
        """
        return self._handle(server).teach.remote(images)

    def done(self, tickets: Sequence[Any], seconds: float) -> list[Any]:
        """Tickets that can be redeemed, as soon as there is one; none when the time is over."""
        if not tickets:
            return []
        done, _ = ray.wait([*tickets], num_returns=1, timeout=seconds)
        if not done:
            return []
        return list(ray.wait([*tickets], num_returns=len(tickets), timeout=0)[0])

    def redeem(self, ticket: Any) -> Part | About | Answer:
        """The answer to a request. Its arrays are read-only; those of a large part stay in shared memory while anything refers to them.

        Raises:
            PartFailed: the request failed on the server; the cause is an instance of what was raised there.
            ServerFailed: the server died.
        """
        try:
            found: Part | About | Answer = ray.get(ticket)
        except ray.exceptions.RayTaskError as error:
            raise PartFailed(_why(error)) from error
        except ray.exceptions.RayError as error:
            raise ServerFailed(_why(error)) from error
        return found

    def _handle(self, server: str) -> ActorHandle[Any]:
        if server not in self._handles:
            try:
                self._handles[server] = ray.get_actor(server)
            except (ValueError, ray.exceptions.RayError) as error:
                raise ServerFailed(_why(error)) from error
        return self._handles[server]


def _why(error: Exception) -> str:
    """The last line of an error; those before it are Ray's own stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
