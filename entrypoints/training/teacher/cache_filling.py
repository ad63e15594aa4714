"""Writes the answers that all ranks' teachers compute to the cache's files, while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from training.distributed.world import World
from training.runtime import accelerator
from training.teacher.pixel_records import Layout

BEHIND = 2
"""Batches that may be on their way to disk; beyond that, training waits for the oldest."""

PIECE_BYTES = 64 * 2**20
"""Limit on all ranks' answers on a device at once: tokens of 64 ranks with 128 images each are 800 MB."""

DRAW_BYTES = 8
"""Bytes of a draw's number."""

Write = Callable[[np.ndarray, np.ndarray], None]
"""Takes records without checksums, uint8 (draws, record size), and the draws' numbers, int64 (draws,)."""


class Filling:
    """Gathers a batch's packed answers from all ranks, copies them to the host, and writes their records in one thread.

    Args:
        world: the ranks that exchange them.
    """

    def __init__(self, layout: Layout, world: World):
        self._layout, self._world = layout, world
        # a new thread starts on the first GPU, where waiting for a copy would create a context of its own
        self._thread = ThreadPoolExecutor(1, "teacher cache", accelerator.make_current, (world.device,))
        self._under_way: deque[Future[None]] = deque()

    def add(
        self, packed: torch.Tensor, draws: np.ndarray, new: np.ndarray, write: Write | None, exchanged: bool
    ) -> None:
        """Queue a batch's new answers for writing.

        Args:
            packed: as the layout's `pack` returns them, on the device.
            draws: a number for each view of an image, int64 (batch,).
            new: which to write, bool (batch,).
            write: None: another process of this host writes.
            exchanged: write all ranks' answers. The call is then a collective: every rank makes it equally often, with as many images.

        Raises:
            ValueError, OSError: an earlier batch could not be written.
        """
        about = np.concatenate([new[:, None].astype(np.uint8), draws.astype("<i8")[:, None].view(np.uint8)], axis=1)
        device = packed.device
        moved = accelerator.pinned(torch.from_numpy(about), device).to(device, non_blocking=True)
        rows = torch.cat([moved, packed], dim=1)
        if not exchanged:
            self._copy(rows, write, BEHIND)
            return
        parts = rows.split(max(1, PIECE_BYTES // (self._world.size * rows.shape[1])))
        for part in parts:
            self._copy(self._world.gather_rows(part), write, BEHIND * len(parts))

    def _copy(self, rows: torch.Tensor, write: Write | None, behind: int) -> None:
        """Queue rows for writing, from a copy on the host; if `behind` are under way, wait for the oldest."""
        if write is None:
            return
        host, done, device = rows, None, rows.device
        if accelerator.is_gpu(device):
            host, done = (
                torch.empty_like(rows, device="cpu", pin_memory=True),
                accelerator.module(device).Event(blocking=True),
            )
            host.copy_(rows, non_blocking=True)
            done.record()
        while len(self._under_way) >= behind or (self._under_way and self._under_way[0].done()):
            self._under_way.popleft().result()
        self._under_way.append(self._thread.submit(self._write, host, done, write))

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            ValueError, OSError: something could not be written.
        """
        while self._under_way:
            self._under_way.popleft().result()

    def _write(self, host: torch.Tensor, done: torch.cuda.Event | None, write: Write) -> None:
        if done is not None:
            done.synchronize()
        rows = host.numpy()
        rows = rows[rows[:, 0] == 1]
        draws = np.ascontiguousarray(rows[:, 1 : 1 + DRAW_BYTES]).view("<i8")[:, 0]
        write(self._layout.encode(rows[:, 1 + DRAW_BYTES :]), draws)
