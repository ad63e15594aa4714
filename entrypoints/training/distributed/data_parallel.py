"""Data-parallel training of a model: wrapping, gradient accumulation and gradient exchange."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.distributed import smddp
from training.distributed.world import World
from training.runtime import accelerator

_BUFFERS_IN_FORWARD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""The name of DDP's argument, since torch 2.14 and before."""


def distribute(
    model: nn.Module,
    world: World,
    *,
    static_graph: bool = False,
    gradient_compression: Literal["none", "bf16"] = "none",
) -> nn.Module:
    """The trainable model on this rank's device, wrapped for data-parallel training if there are several ranks. A collective.

    Every rank begins with rank 0's parameters and buffers. From then on each rank updates its own buffers from its own images,
    and `World.average_buffers` averages them where they are used, for evaluation and export. So no forward pass begins with a
    wait for rank 0's buffers, and BatchNorm's statistics come from all ranks' images, not from rank 0's alone.

    Args:
        static_graph: every step uses the same parameters in the same way. DDP then orders its reductions once; a model that
            breaks this promise trains wrongly.
        gradient_compression: bf16 halves the bytes sent, and rounds the gradients to 8 bits of mantissa.

    Raises:
        ValueError: this process group cannot do what is asked for.
    """
    model = model.to(world.device)
    if world.size == 1:
        return model
    _check(world, static_graph, gradient_compression)
    for buffer in model.buffers():
        _take_first(buffer, world)
    if not world.is_torch_group:
        return smddp.older_data_parallel(model)
    kind = StaticGraphDataParallel if static_graph else DistributedDataParallel
    buffers: dict[str, Any] = {_BUFFERS_IN_FORWARD: False}
    wrapped = kind(
        model,
        device_ids=[world.device.index] if accelerator.is_gpu(world.device) else None,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        **buffers,
    )
    if gradient_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def synchronise(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """The context for one micro-batch's forward and backward pass: gradients accumulate, and are exchanged with the last one alone.

    Args:
        model: as `distribute` gave it.
        last: whether this is the optimizer step's last micro-batch.
    """
    no_sync: Callable[[], AbstractContextManager[None]] | None = getattr(model, "no_sync", None)
    if last or no_sync is None:  # a single process, or smddp before 1.2.2, which exchanges every time
        return contextlib.nullcontext()
    return no_sync()


class StaticGraphDataParallel(DistributedDataParallel):
    """DDP with a static graph whose first step may accumulate gradients.

    DDP learns the graph from the first passes that exchange gradients, and a pass in `no_sync` before that fails
    (`expect_autograd_hooks_ INTERNAL ASSERT`: https://github.com/pytorch/pytorch/issues/143580, in torch 2.0 and 2.14 alike). So
    the first passes exchange. The accumulated sums stay the same: averaging over ranks what is already an average changes nothing.
    """

    passes_to_learn = 2
    """torch 2.0 needs a second one."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.passes_to_learn:
            self.passes_to_learn -= 1
            yield
        else:
            with super().no_sync():
                yield


def _check(world: World, static_graph: bool, gradient_compression: str) -> None:
    if static_graph and not world.is_torch_group:
        raise ValueError(
            "static_graph: smddp before 1.4 does not support it; set it to false, or take an image with a newer smddp"
        )
    if gradient_compression == "none":
        return
    if world.backend == "smddp":
        raise ValueError(
            f"gradient_compression: {gradient_compression} does not work with smddp, which sends gradients uncompressed; "
            "set it to none, or the job's distribution to torchrun"
        )
    try:
        world.all_reduce_sum(torch.ones(1, dtype=torch.bfloat16, device=world.device))
    except RuntimeError as error:  # in older versions gloo has no bf16, and says so on every rank before it sends:
        # https://github.com/pytorch/pytorch/issues/111131
        raise ValueError(
            f"gradient_compression: {world.backend} of torch {torch.__version__} cannot sum bf16 ({error}); set it to none"
        ) from error


def _take_first(buffer: torch.Tensor, world: World) -> None:
    """Overwrite a buffer with rank 0's values; as bytes, because gloo does not know every type."""
    if buffer.numel():
        data = buffer.detach().contiguous().view(-1).view(torch.uint8)
        world.collectives.broadcast(data, 0)
        buffer.detach().copy_(data.view(buffer.dtype).view(buffer.shape))
