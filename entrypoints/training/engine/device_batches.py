"""Moves a loader's batches to the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from training.data.batches import CPU_FIELDS
from training.distributed.world import World
from training.measure.timeline import Timeline
from training.runtime import accelerator


def on_device(batches: Iterator[Any], world: World, timeline: Timeline, copy_stream: bool = False) -> Iterator[Any]:
    """The loader's batches, NamedTuples, with their tensors on this rank's device, except those in CPU_FIELDS.

    Args:
        copy_stream: copy them on the stream COPIES, while the step before still runs. Where the GPU is the bottleneck, the host is ahead
            of it anyway, so no batch has to be prefetched.
    """
    side = None
    if copy_stream and accelerator.is_gpu(world.device):
        side = accelerator.SideStream(world.device, accelerator.COPIES)
    try:
        while True:
            with timeline.phase("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            with timeline.phase("host_to_device"):
                copy = partial(_copied, batch, world.device)
                moved = side.run(copy) if side else copy()
            yield batch._replace(**moved)
            del batch, moved
    finally:
        if side is not None:
            side.finish()


def _copied(batch: Any, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: value.to(device, non_blocking=True) for name, value in batch._asdict().items() if name not in CPU_FIELDS
    }
