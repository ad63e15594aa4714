"""A stand-in for SMDDP 1.4 and later: the backend smddp, which is gloo here, with the real one's limits.

https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-modify-sdp-pt.html
"""

import os

import torch.distributed as dist
from torch.distributed import distributed_c10d


def make_group(store, rank, size, timeout):
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise RuntimeError("SMDDP needs mpirun")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def refuse(*args, **kwargs):
    raise RuntimeError("SMDDP does not support new_group, nor another backend beside it")


_init_process_group = dist.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    _init_process_group(backend, *args, **kwargs)
    if backend == "smddp":
        dist.new_group = distributed_c10d.new_group = refuse


dist.init_process_group = init_process_group
dist.Backend.register_backend("smddp", make_group)
