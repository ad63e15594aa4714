"""What older versions of torch lack, for the tests that need it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

fp16_on_cpu = pytest.mark.skipif(
    torch.__version__ < "2.3", reason="torch before 2.3 has no gradient scaler for the CPU, and fp16 is refused there"
)

compiling = pytest.mark.skipif(
    sys.version_info >= (3, 11) and torch.__version__ < "2.1",
    reason="torch 2.0 compiles on Python 3.10 and no newer one",
)


def gloo_adds_bf16() -> bool:
    """Whether gloo can; where it cannot, gradient_compression is refused, as test_data_parallel.py shows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    finally:
        dist.destroy_process_group()
    return True
