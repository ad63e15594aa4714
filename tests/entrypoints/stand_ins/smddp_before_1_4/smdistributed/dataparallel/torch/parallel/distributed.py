"""A stand-in for DistributedDataParallel of SMDDP before 1.4: the mean of the gradients after a backward pass outside of no_sync."""

import contextlib

import torch
from torch import nn

from smdistributed.dataparallel.torch import distributed as dist


class DistributedDataParallel(nn.Module):
    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        broadcast_buffers=True,
        process_group=None,
        bucket_cap_mb=None,
    ):
        super().__init__()
        if broadcast_buffers:
            raise ValueError("broadcast_buffers is not supported")
        self.module, self._synchronises, self._queued = module, True, False
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), 0)
            parameter.register_hook(self._queue)

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        self._synchronises = False
        try:
            yield
        finally:
            self._synchronises = True

    def _queue(self, gradient):
        if self._synchronises and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)
        return gradient

    def _average(self):
        self._queued = False
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
