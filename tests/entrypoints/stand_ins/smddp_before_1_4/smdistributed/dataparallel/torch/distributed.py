"""A stand-in for SMDDP before 1.4, by gloo: functions as torch.distributed's, which knows nothing of this group.

doc/api/training/sdp_versions/v1.2.x/smd_data_parallel_pytorch.rst of https://github.com/aws/sagemaker-python-sdk
"""

import os
from datetime import timedelta

import torch.distributed as dist

_group = None


def init_process_group(*args, **kwargs):
    global _group
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, size, rank == 0, timedelta(minutes=1))
    _group = dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=1))


def is_initialized():
    return _group is not None


def get_rank(group=None):
    return _group.rank()


def get_world_size(group=None):
    return _group.size()


def all_reduce(tensor, op=None, group=None, async_op=False):
    return _finish(_group.allreduce([tensor]), async_op)


def broadcast(tensor, src=0, group=None, async_op=False):
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src, 0
    return _finish(_group.broadcast([tensor], options), async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    return _finish(_group.allgather([tensor_list], [tensor]), async_op)


def _finish(work, async_op):
    return work if async_op else work.wait() and None
