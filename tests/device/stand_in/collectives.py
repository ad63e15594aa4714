"""NCCL for `gpu` tensors: gloo works on their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device.stand_in import streams
from tests.device.stand_in.kernels import on_host, uses_in


class StandInGroup(dist.ProcessGroup):
    """A process group for tensors of the device alone, as NCCL's is."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        return "nccl"


class _Work(dist.Work):
    """A collective that is done, of which streams know nothing before they wait."""

    def __init__(self, tensors: Any, clock: streams.Clock, until: float):
        super().__init__()
        self._tensors, self._clock, self._until = tensors, clock, until

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        streams.current().wait(self._clock, self._until)
        return True

    def get_future(self) -> torch.futures.Future:
        """DDP goes on with these tensors, on the stream that asks."""
        self.wait()
        done = torch.futures.Future()
        done.set_result(self._tensors)
        return done


@functools.cache
def _queue() -> streams.Queue:
    """NCCL's own stream."""
    return streams.Queue()


def _collective(name: str) -> Callable[..., dist.Work]:
    def call(self: StandInGroup, tensors: Any, *rest: Any) -> dist.Work:
        queue = _queue()
        queue.wait(streams.current().now(), streams.current().busy_until)
        used = [*uses_in((tensors, *rest))]
        streams.submitted(name, used, used, queue)
        for uses in used:
            uses.recorded.add(queue.number)  # as ProcessGroupNCCL does
        getattr(self._gloo, name)(_down(tensors), *map(_down, rest)).wait()
        return _Work(tensors, queue.now(), queue.busy_until)

    return call


for _name in ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce"):
    setattr(StandInGroup, _name, _collective(_name))


def register() -> None:
    """Have `nccl` mean this group."""
    dist.Backend.register_backend("stand_in", StandInGroup, devices=["gpu"])
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, **options: begin({"nccl": "stand_in"}.get(backend, backend), **options)


def _down(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "gpu":
            raise ValueError("Tensors must be CUDA and dense")
        return on_host(value)
    return [_down(item) for item in value] if isinstance(value, list) else value
