"""NCCL for `gpu` tensors: gloo works on their memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from tests.device.stand_in.kernels import on_host


class StandInGroup(dist.ProcessGroup):
    """A process group for tensors of the device alone, as NCCL's is."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        return "nccl"


def _collective(name: str) -> Callable[..., dist.Work]:
    def call(self: StandInGroup, tensors: Any, *rest: Any) -> dist.Work:
        getattr(self._gloo, name)(_down(tensors), *map(_down, rest)).wait()
        done = torch.futures.Future()
        done.set_result(tensors)  # DDP goes on with these
        return _create_work_from_future(done)

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
