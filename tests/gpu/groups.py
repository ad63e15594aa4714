"""Process groups without a launcher: one rank that acts as in a larger group, and two ranks on one device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from training.distributed.world import World
from training.runtime import accelerator

from tests.gpu import isolation
from tests.gpu.bench import Bench


class Alone(World):
    """Counts two ranks; the other one has the same data as this one."""

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows] * self.size)


@contextmanager
def one_rank(bench: Bench) -> Iterator[World]:
    """A group of one, NCCL's if there is a GPU, and a World that counts two ranks.

    NCCL refuses two ranks on one GPU. The kit takes its multi-rank path if its World counts more than one; every
    collective then runs in the group of one, except gathering, which counts ranks.
    """
    backend = "nccl" if bench.is_gpu else "gloo"
    accelerator.make_current(bench.device)
    _join(backend, bench.folder / "one-rank", 0, 1)
    try:
        yield Alone(0, 2, 0, bench.device, backend, "a group of one rank")
    finally:
        dist.destroy_process_group()


def two_ranks(bench: Bench, work: Callable[[World], None], seconds: float) -> None:
    """Run a function in two processes, the ranks of a gloo group on one device. This process must not have started CUDA.

    Raises:
        RuntimeError: a rank failed; the message ends with its log.
    """

    def rank(number: int) -> None:
        accelerator.make_current(bench.device)
        _join("gloo", bench.folder / "two-ranks", number, 2)
        work(World(number, 2, number, bench.device, "gloo", "NCCL refuses two ranks on one GPU"))
        dist.destroy_process_group()

    logs = [bench.folder / f"rank-{number}.log" for number in range(2)]
    ends = time.monotonic() + seconds
    pids = [isolation.start(partial(rank, number), log, own_group=False) for number, log in enumerate(logs)]
    codes = [isolation.wait(pid, ends - time.monotonic()) for pid in pids]
    if any(codes):
        failed = next(number for number, code in enumerate(codes) if code)
        raise RuntimeError(f"rank {failed} ended with {codes[failed]}; its log ends:\n{isolation.tail(logs[failed])}")


def _join(backend: str, file: Path, rank: int, size: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
