"""The process group: its ranks, and the few collectives that the scripts need."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from training.distributed import collective_watch, smddp
from training.distributed.collective_watch import CollectiveWatch, Lobby
from training.distributed.rendezvous import Place, Wait, in_time, read_place, roll_call, this_host
from training.runtime import accelerator, failure
from training.runtime.environment import training_hosts

Result = TypeVar("Result")

_PIECE_BYTES = 64 * 2**20
_STORE_SECONDS = 5


@dataclass(frozen=True)
class World:
    """This process's place in the process group.

    There is one process group, and metrics go through it too, as tensors on `device`: smddp has no `new_group`, and no other
    backend may run beside it (https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-modify-sdp-pt.html).
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    """smddp, nccl, gloo, or none for a single process."""
    reason: str
    """Why that backend."""
    lobby: Lobby | None = field(default=None, repr=False)
    """Where ranks wait for rank 0 without a collective. None: they wait in their next collective."""
    collectives: ModuleType = field(default=dist, repr=False)
    """The module with all_reduce, broadcast and all_gather: torch.distributed, or smddp's own before 1.4."""
    sharing_cores: int | None = None
    """Training processes of this host that are bound to this one's cores, itself included. None: it is not bound, and shares with all."""

    def __str__(self) -> str:
        processes = f"{self.size} process{'es' if self.size > 1 else ''}"
        return f"{processes} on {self.device.type}, process group: {self.backend} ({self.reason})"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the process that writes what is written once per host."""
        return self.local_rank == 0

    @property
    def is_torch_group(self) -> bool:
        """Whether torch.distributed holds the group, as DistributedDataParallel and ZeroRedundancyOptimizer need it."""
        return self.size > 1 and self.collectives is dist

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor of any shape, the same on every rank; in place."""
        if self.size > 1:
            self.collectives.all_reduce(values)
        return values

    def all_reduce_sum_async(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start the same sum, without waiting for it. A collective.

        Returns:
            A function that gives the sum; on a GPU, later work on the device waits for it, not the host.
        """
        if self.size == 1:
            return lambda: values
        work = self.collectives.all_reduce(values, async_op=True)

        def summed() -> torch.Tensor:
            work.wait()
            return values

        return summed

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in the order of the ranks.

        Args:
            rows: (n, …) of any type and on any device, of the same shape on every rank.

        Returns:
            (size × n, …) of the same type and on the same device.
        """
        if self.size == 1:
            return rows
        if not rows.numel():  # gloo of torch 2.0 crashes on an empty tensor
            return torch.cat([rows] * self.size)
        # as bytes: gloo knows no int16, and in older versions neither bool nor bfloat16
        own = rows.reshape(-1).view(torch.uint8).to(self.device)
        pieces = [torch.empty_like(own) for _ in range(self.size)]
        self.collectives.all_gather(pieces, own)
        return torch.cat(pieces).to(rows.device).view(rows.dtype).view(-1, *rows.shape[1:])

    def on_rank_zero(self, work: Callable[[], Result]) -> Result | None:
        """The result of work that rank 0 alone does; None on the other ranks, which wait without a collective, however long it takes.

        A collective: every rank calls it equally often. Only rank 0 raises an error of the work; the others learn of it in their
        next collective.
        """
        if self.size == 1:
            return work()
        if self.lobby is None:
            return work() if self.is_first else None
        if not self.is_first:
            self.lobby.wait()
            return None
        with self.lobby.busy():
            return work()

    def hosts_alone(self, work: Callable[[], Result]) -> Result | None:
        """The result of work that the first process of each host does, all at once; None on the others. All wait for rank 0 without a
        collective, as in `on_rank_zero`; the other hosts should not take much longer than that. A collective.
        """
        found = work() if self.is_first_on_host and not self.is_first else None
        of_first = self.on_rank_zero(work)
        return of_first if self.is_first else found

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank, sent in pieces of at most 64 MiB.

        Args:
            data: rank 0's; what other ranks pass is ignored.
        """
        if self.size == 1:
            assert data is not None, "rank 0 gives the bytes"
            return data
        length = torch.tensor([len(data or b"")], device=self.device)
        self.collectives.broadcast(length, 0)
        pieces = []
        for start in range(0, int(length), _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, int(length))
            own = bytearray(data[start:end]) if self.is_first and data is not None else bytearray(end - start)
            piece = torch.frombuffer(own, dtype=torch.uint8).to(self.device)
            self.collectives.broadcast(piece, 0)
            pieces.append(piece.cpu().numpy().tobytes())
        return b"".join(pieces)

    def average_buffers(self, model: nn.Module) -> None:
        """Give every rank the mean of the model's floating-point buffers, so that BatchNorm's running statistics agree; in place."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        # in float64, whose sums are exact here, so that buffers that are equal on all ranks stay unchanged
        flat = torch.cat([buffer.detach().reshape(-1).to(self.device, torch.float64) for buffer in buffers])
        means = torch.split(self.all_reduce_sum(flat).div_(self.size), [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means):
            buffer.detach().copy_(mean.view_as(buffer))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. A collective: every rank must call it at the same step."""
        return self.any_async(flag)()

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank. A collective: every rank must call it at the same step."""
        return not self.any(not flag)

    def any_async(self, flag: bool) -> Callable[[], bool]:
        """Ask whether the flag is set on any rank, without waiting for the answer. A collective.

        Returns:
            A function that gives the answer. It waits for the ranks and the device only until they have done the work submitted
            before this call.
        """
        if self.size == 1:
            return lambda: flag
        count = torch.full((1,), float(flag), device=self.device)
        return _answer(self.collectives.all_reduce(count, async_op=True), count)


@contextlib.contextmanager
def process_group(timeout_minutes: float = 10) -> Iterator[World]:
    """Join the process group that torchrun or mpirun describes, and leave it at the end.

    If nothing describes one, this process trains alone, without a group.

    Args:
        timeout_minutes: how long ranks wait for each other to join, and later for each other in a collective.

    Raises:
        TimeoutError: not all ranks joined in time; the message names the missing ones, or what keeps them apart.
        ConnectionError: all ranks are there, but their connections failed.
        ValueError: the environment describes no group, or a rank has no GPU of its own.
    """
    place = read_place()
    device = accelerator.find(place.local_rank)
    if place.size == 1:
        yield World(0, 1, place.local_rank, device, "none", _why_alone())
        return
    backend, reason, collectives = _choose_backend(place, device)
    if accelerator.is_gpu(device):
        collective_watch.remember_collectives()
        os.environ.setdefault("FI_EFA_USE_HUGE_PAGE", "0")  # EFA's huge pages run out when processes fork:
        # https://github.com/aws/aws-ofi-nccl/issues/179
    if backend == "gloo" and "SM_NETWORK_INTERFACE_NAME" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["SM_NETWORK_INTERFACE_NAME"])
    wait = Wait(f"rank {place.rank} on {this_host()}", timeout_minutes * 60)
    store = roll_call(place, backend, wait)
    watch = CollectiveWatch(store, place.rank, place.size, timeout_minutes * 60, backend)
    lobby = Lobby(store, place.size, watch.beats)
    world = World(place.rank, place.size, place.local_rank, device, backend, reason, lobby, collectives)
    _connect(world, store, timedelta(minutes=timeout_minutes), wait)
    failure.progress.report_first = functools.partial(_report_first, store)
    watch.start()
    try:
        yield world
    except BaseException:
        watch.end()
        raise
    lobby.leave(place.rank)
    watch.stop()
    # Only after success: without it gloo may abort at interpreter exit, and after a failure it may wait for ranks that hang.
    failure.progress.report_first = None
    if backend == "gloo":
        # Destroying the group waits for gloo's threads and holds the GIL; one of them that has yet to release the last
        # collective's tensor waits for the GIL. Torch 2.0 hung there once in six times.
        time.sleep(0.1)
    if collectives is dist:
        dist.destroy_process_group()


def _why_alone() -> str:
    hosts = len(training_hosts())
    if hosts > 1:
        return f"a single process on each of {hosts} hosts, unaware of each other: set distribution to torchrun"
    return "a single process"


def _choose_backend(place: Place, device: torch.device) -> tuple[str, str, ModuleType]:
    """The backend, why that one, and where its collectives are."""
    backend, reason = ("nccl", "there are GPUs") if accelerator.is_gpu(device) else ("gloo", "there is no GPU")
    if smddp.is_asked_for():
        collectives, why = smddp.find(place)
        if collectives is not None:
            return "smddp", why, collectives
        reason += f"; smddp was requested but not used: {why}"
    return backend, reason, dist


def _connect(world: World, store: Store, timeout: timedelta, wait: Wait) -> None:
    """Form the group, and prove it by a first collective: NCCL connects the ranks only then."""

    def connect() -> None:
        accelerator.make_current(world.device)  # it is set per thread
        if world.collectives is not dist:
            world.collectives.init_process_group()
        elif world.backend == "smddp":  # in its documented form: the library is closed
            dist.init_process_group("smddp", timeout=timeout)
        else:
            group_store = PrefixStore("group", store)
            dist.init_process_group(
                world.backend, store=group_store, rank=world.rank, world_size=world.size, timeout=timeout
            )
        world.all_reduce_sum(torch.zeros(1, device=world.device)).item()  # waits for the device too

    cause = (
        "the hosts' security group must pass all traffic among its own members, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, "
        "if set, must name the network interface between them"
    )
    what = f"the {world.backend} connections among {world.size} ranks, all of which have started"
    try:
        if world.backend == "smddp":
            connect()  # a closed library that is not promised to work outside the main thread
            _prove(world)
        else:
            in_time(connect, wait, what, cause, is_heard=world.is_first)
    except RuntimeError as error:
        raise ConnectionError(
            f"{wait.who} got no {world.backend} connection to the other ranks, which have started: {error}. Check that {cause}"
        ) from error


def _prove(world: World) -> None:
    """Check that smddp does what the scripts need: no document says which types its collectives support. A collective.

    Raises:
        ValueError: it does not; the message names what, and the fix.
    """
    ranks, sums = [*range(world.size)], world.size * (world.size + 1) // 2

    def total(kind: torch.dtype) -> bool:
        return (
            world.all_reduce_sum(torch.full((3,), world.rank + 1, dtype=kind, device=world.device)).tolist()
            == [sums] * 3
        )

    asked: dict[str, Callable[[], bool]] = {
        "sum of float32": lambda: total(torch.float32),
        "sum of float64": lambda: total(torch.float64),
        "gather of int64, as bytes": lambda: world.gather_rows(torch.tensor([world.rank])).tolist() == ranks,
        "broadcast of bytes": lambda: world.broadcast_bytes(b"smddp" if world.is_first else None) == b"smddp",
        "asynchronous sum": lambda: world.any(world.rank == world.size - 1),
    }
    wrong = []
    for what, ask in asked.items():
        try:
            if not ask():
                wrong.append(f"{what}: wrong result")
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # on every rank alike
            wrong.append(f"{what}: {error}")
    if wrong:
        raise ValueError(
            f"this image's smddp cannot do what the scripts need: {'; '.join(wrong)}. Set distribution: torchrun"
        )


def _report_first(store: Store, text: str) -> str | None:
    """The report of the first rank to fail: this text, if no other failed before. None if the store does not answer."""
    answers: list[str] = []

    def ask() -> None:  # not compare_set, in which torch 2.0 crashes if the answer is shorter than two characters:
        # https://github.com/pytorch/pytorch/issues/123983
        with contextlib.suppress(RuntimeError):
            if text and store.add("failures", 1) == 1:
                store.set("first to fail", text)
            answers.append(store.get("first to fail").decode() if store.add("failures", 0) else "")

    thread = threading.Thread(target=ask, daemon=True)  # if a host has vanished, the call waits for it
    thread.start()
    thread.join(_STORE_SECONDS)
    return answers[0] if answers else None


def _answer(work: dist.Work, count: torch.Tensor) -> Callable[[], bool]:
    """A function that tells whether `count` is not zero, once the collective that sums it is done."""
    if not accelerator.is_gpu(count.device):

        def answer() -> bool:
            work.wait()
            return bool(count.item())

        return answer
    # .item() would wait for all work that the device was given until then; a copy on a stream of its own does not
    gpu, stream = accelerator.module(count.device), accelerator.side_stream(count.device, "answers")
    host, done = torch.empty(1, pin_memory=True), gpu.Event(blocking=True)
    with gpu.stream(stream):
        work.wait()
        host.copy_(count, non_blocking=True)
        done.record()
    count.record_stream(stream)

    def answer_of_device() -> bool:
        done.synchronize()
        return bool(host.item())

    return answer_of_device
