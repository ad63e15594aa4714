"""Hosts of a job with servers, each on one core of this machine: the benchmarks' requests to them, and their processes' cost."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from engine import ALONE
from training.data.batches import SampleKey
from training.data.views import open_data, open_elsewhere
from training.servers.actor import Opened, made
from training.servers.groups import Groups
from training.servers.pool import Pool
from training.servers.ray_node import connected, node, wait_for_head
from training.servers.stream import Stream
from training.settings.scripts import LabelledImageSettings

TRAINER_CORE, SERVER_CORE = 0, 1

TRAINERS, SERVER = ("127.0.0.1", "127.0.0.3"), "127.0.0.2"

BATCH = 64

PREFETCHED = 8
"""Batches taken before a clock starts: more than are in flight to this one trainer."""

START_SECONDS = 150.0

FORKED = multiprocessing.get_context("fork")


def settings_of(size: int) -> LabelledImageSettings:
    """Views as large jobs have them: a random crop, flipped or not."""
    return LabelledImageSettings(image_size=size, global_batch_size=BATCH, min_crop_area=0.4, horizontal_flip=True)


def groups_of(host: str, port: int) -> Groups:
    return Groups(host, TRAINERS, (SERVER,), port)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one host's processes."""

    process: float = 0.0
    """Of the trainer, or of the servers themselves."""
    raylet: float = 0.0
    rest: float = 0.0
    """Of Ray's other processes."""

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.process - other.process, self.raylet - other.raylet, self.rest - other.rest)

    @property
    def ray(self) -> float:
        return self.raylet + self.rest


def cost_of(node_process: int) -> Cost:
    """CPU time of a host node's processes so far; its servers are `process`."""
    seconds = {"process": 0.0, "raylet": 0.0, "rest": 0.0}
    parent = psutil.Process(node_process)
    for one in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            command, times = one.cmdline(), one.cpu_times()
            is_server = bool(command) and command[0].startswith("ray::ImageServer")
            kind = "process" if is_server else "raylet" if one.name() == "raylet" else "rest"
            seconds[kind] += times.user + times.system
    return Cost(**seconds)


@dataclass(frozen=True)
class Measured:
    """A flow of images over a while."""

    images: int
    wall: float
    """Seconds."""
    cpu: float
    """Seconds of the process that took them."""
    trainer: Cost = Cost()
    """Of Ray's processes at that host."""
    server: Cost = Cost()

    @property
    def speed(self) -> float:
        return self.images / self.wall


class Child:
    """A process on one core that answers one request after another."""

    def __init__(self, core: int, work: Callable[..., None], *arguments: Any):
        self._pipe, theirs = FORKED.Pipe()
        self._process = FORKED.Process(target=_on_core, args=(core, work, theirs, *arguments), daemon=True)
        self._process.start()

    def ask(self, *question: Any) -> Any:
        self.send(*question)
        return self.answer()

    def send(self, *question: Any) -> None:
        self._pipe.send(question)

    def answer(self) -> Any:
        return self._pipe.recv()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(60)


def _on_core(core: int, work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    work(pipe, *arguments)


def serving_host(pipe: Connection, port: int, data: Path) -> None:
    """A host that serves. Its first answer is its node's process."""
    wait_for_head(groups_of(SERVER, port), START_SECONDS)
    os.environ["SM_CHANNEL_TRAIN"] = str(data / "train")
    with node(groups_of(SERVER, port), data.parent / "ray-server.log") as process:
        pipe.send(process.pid)
        pipe.recv()


def alone(pipe: Connection, data: Path, size: int) -> None:
    """The same images without servers, one after the other in one thread."""
    opened = opened_from(data, size)
    draws = endless(len(opened.images))
    while (question := pipe.recv()) is not None:
        kind, count = question[:2]
        if kind == "digest":
            pipe.send(digest(made(opened, one).fields for one in some(len(opened.images), count, *question[2:])))
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        for one in itertools.islice(draws, count):
            made(opened, one)
        pipe.send(Measured(count * BATCH, time.perf_counter() - wall, time.process_time() - cpu))


def trainer(pipe: Connection, host: str, port: int, data: Path, size: int) -> None:
    """A trainer's host, without the training. The first message to it is the process of the server's node."""
    groups, opened = groups_of(host, port), opened_from(data, size)
    with contextlib.ExitStack() as stack:
        if not groups.is_head:
            wait_for_head(groups, START_SECONDS)
        process = stack.enter_context(node(groups, data.parent / f"ray-{host}.log"))
        stack.enter_context(connected(groups, process, START_SECONDS, talks=False))
        from training.servers.cluster import Placement, RayServers  # imports Ray, which read its settings just now

        if groups.is_head:
            stack.enter_context(Placement(partial(open_elsewhere, settings_of(size), 3, None), print))
        (server,) = pipe.recv()
        said: list[str] = []
        pool = Pool(
            RayServers(TRAINERS.index(host), len(TRAINERS)),
            opened,
            go_on=False,
            patience=START_SECONDS,
            first_patience=START_SECONDS,
            threads=1,
            device=ALONE.device,
            processes=1,
            log=said.append,
        )
        batches: Iterator[Any] | None = None
        while (question := pipe.recv()) is not None:
            kind, count = question[:2]
            if kind == "flow":
                batches = batches or iter(Stream(pool, endless(len(opened.images))))
                for _ in range(PREFETCHED):
                    next(batches)
                pipe.send(_flow(batches, count, process.pid, server))
            elif kind == "epoch":
                if batches is not None:
                    batches.close()
                    batches = None
                wall = time.perf_counter()
                proof = digest(Stream(pool, some(len(opened.images), count, *question[2:])))
                pipe.send((proof, time.perf_counter() - wall))
            elif kind == "rest":
                before = cost_of(process.pid), cost_of(server), time.process_time(), time.perf_counter()
                time.sleep(count)
                after = cost_of(process.pid), cost_of(server), time.process_time(), time.perf_counter()
                pipe.send(_between(0, before, after))
        assert pool.counts.alone == 0 and pool.counts.failures == 0 and not said, f"{pool.counts} {said}"


def _flow(batches: Iterator[Any], count: int, own: int, server: int) -> Measured:
    before = cost_of(own), cost_of(server), time.process_time(), time.perf_counter()
    images = sum(len(next(batches).images) for _ in range(count))
    wall, cpu = time.perf_counter(), time.process_time()
    return _between(images, before, (cost_of(own), cost_of(server), cpu, wall))


def _between(images: int, before: tuple[Cost, Cost, float, float], after: tuple[Cost, Cost, float, float]) -> Measured:
    return Measured(images, after[3] - before[3], after[2] - before[2], after[0] - before[0], after[1] - before[1])


def bare_socket(pipe: Connection, port: int, size: int, *, sends: bool) -> None:
    """One end of a TCP connection that carries batches and nothing else: the minimum cost of any transport between hosts."""
    if sends:
        with socket.create_server((SERVER, port)) as listener:
            pipe.send(None)
            connection, _ = listener.accept()
    else:
        pipe.recv()
        connection = socket.create_connection((SERVER, port))
    ready = np.zeros((BATCH, 3, size, size), np.uint8)
    with connection:
        while (question := pipe.recv()) is not None:
            _, count = question
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                if sends:
                    connection.sendall(ready.data)
                else:
                    left = np.empty_like(ready).data.cast("B")  # each batch has its own memory
                    while left:
                        left = left[connection.recv_into(left) :]
            pipe.send(Measured(count * BATCH, time.perf_counter() - wall, time.process_time() - cpu))


def opened_from(data: Path, size: int) -> Opened:
    found = open_data(data / "train", data / "validation", settings_of(size), 3)
    return Opened(found.training, found.collate_training)


def endless(images: int) -> Iterator[list[SampleKey]]:
    """Batches of one epoch after another."""
    for view in itertools.count(1):
        yield from (
            [(view, index) for index in range(first, first + BATCH)] for first in range(0, images - BATCH + 1, BATCH)
        )


def some(images: int, count: int, view: int = 1) -> Iterator[list[SampleKey]]:
    """`count` batches, from view `view` on."""
    return itertools.islice(([(each + view - 1, index) for each, index in draws] for draws in endless(images)), count)


def digest(batches: Iterator[Any]) -> str:
    """Of the bytes of all tensors of all batches, in their order."""
    found = hashlib.sha256()
    for batch in batches:
        for field in batch:
            found.update(np.ascontiguousarray(field))
    return found.hexdigest()
