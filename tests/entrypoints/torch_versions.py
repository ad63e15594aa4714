"""What older versions of torch lack, for the tests that need it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.entrypoints.ranks import run_ranks

fp16_on_cpu = pytest.mark.skipif(
    torch.__version__ < "2.3", reason="torch before 2.3 has no gradient scaler for the CPU, and fp16 is refused there"
)

compiling = pytest.mark.skipif(
    sys.version_info >= (3, 11) and torch.__version__ < "2.1",
    reason="torch 2.0 compiles on Python 3.10 and no newer one",
)


def gloo_adds_bf16(tmp_path: Path) -> bool:
    """Whether gloo can; where it cannot, gradient_compression is refused, as test_data_parallel.py shows.

    Asked in a process of its own that does not leave its group, because there torch 2.0 hangs now and then.
    """
    [done] = run_ranks(
        tmp_path,
        """
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1, dtype=torch.bfloat16))
        os._exit(0)
        """,
        environments=[{}],
    )
    return done.returncode == 0
