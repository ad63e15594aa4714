"""Which processes train together: the process group, its ranks, and the few collectives that the scripts need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class World:
    """This process's place among all."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    """nccl, gloo, or none for a single process."""
    reason: str
    """Why that backend."""

    def __str__(self) -> str:
        processes = f"{self.size} process{'es' if self.size > 1 else ''}"
        return f"{processes} on {self.device.type}, process group: {self.backend} ({self.reason})"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor of any shape, the same on every rank; in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def average_buffers(self, model: nn.Module) -> None:
        """Give every rank the mean of the model's floating-point buffers, so that BatchNorm's running statistics agree; in place."""
        if self.size > 1:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    self.total(buffer).div_(self.size)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. A collective: every rank must call it at the same step."""
        if self.size == 1:
            return flag
        return bool(self.total(torch.tensor([float(flag)], device=self.device)).item())


@contextlib.contextmanager
def process_group(timeout_minutes: float = 10) -> Iterator[World]:
    """Join the process group that torchrun describes, and leave it at the end.

    Without torchrun's variables this process trains alone, without a group.

    Args:
        timeout_minutes: a collective that waits longer for a rank raises.
    """
    rank, size, local_rank = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible. "
            "Start one process a GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(rank, size, local_rank, device, "none", "a single process")
        return
    backend, reason = ("nccl", "there are GPUs") if cuda else ("gloo", "there is no GPU")
    if backend == "gloo" and "SM_NETWORK_INTERFACE_NAME" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["SM_NETWORK_INTERFACE_NAME"])
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    yield World(rank, size, local_rank, device, backend, reason)
    # Only after success: without it gloo may abort at interpreter exit, and after a failure it may wait for ranks that hang.
    dist.destroy_process_group()
