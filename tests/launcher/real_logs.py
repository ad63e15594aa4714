"""Logs in the shape of real ones, and any text that is like them."""

from __future__ import annotations

import textwrap

from hypothesis import strategies as st


def lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


OUT_OF_MEMORY = lines("""
    Traceback (most recent call last):
      File "/opt/ml/code/train_kd.py", line 98, in <module>
        main(read_settings(DistillationSettings))
      File "/opt/ml/code/training/engine/loop.py", line 120, in train
        losses["loss"].backward()
    torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB (GPU 3; 39.41 GiB total capacity; 37.02 GiB already allocated; 563.50 MiB free; 37.62 GiB reserved in total by PyTorch)
""")
CHILD_FAILED = lines("""
    W1121 07:03:15.866000 32360 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 32365 closing signal SIGTERM
    E1121 07:03:15.898000 32360 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 32366) of binary: /opt/conda/bin/python3.10
    Traceback (most recent call last):
      File "<frozen runpy>", line 198, in _run_module_as_main
      File "/opt/conda/lib/python3.10/site-packages/torch/distributed/run.py", line 1142, in <module>
        main()
      File "/opt/conda/lib/python3.10/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 380, in wrapper
        return f(*args, **kwargs)
               ^^^^^^^^^^^^^^^^^^
      File "/opt/conda/lib/python3.10/site-packages/torch/distributed/launcher/api.py", line 386, in launch_agent
        raise ChildFailedError(
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    ============================================================
    train_kd.py FAILED
    ------------------------------------------------------------
    Root Cause (first observed failure):
    [0]:
      time      : 2026-11-21_07:03:15
      rank      : 1 (local_rank: 1)
      exitcode  : 1 (pid: 32366)
      traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
    ============================================================
    2026-11-21 07:03:16,220 sagemaker-training-toolkit ERROR    Reporting training FAILURE
    2026-11-21 07:03:16,220 sagemaker-training-toolkit ERROR    ExecuteUserScriptError:
    ExitCode 1
    ErrorMessage ""
    Command "torchrun --nnodes 1 --nproc_per_node 2 train_kd.py"
""")
WATCHDOG = lines("""
    [rank0]:[E1121 07:13:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.
    [rank0]:[E1121 07:13:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579.
""")
BENIGN = lines("""
    2026-11-21 06:40:02,110 sagemaker-training-toolkit INFO     Invoking user script
    algo-1:51:51 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
    algo-1:51:51 [0] NCCL INFO Call to connect returned Connection refused, retrying
    dlopen: libnccl-net.so: cannot open shared object file: No such file or directory
    /opt/conda/lib/python3.10/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 8 worker processes in total, more than the memory of this host may hold
    GPU memory: 12.3 of 39.4 GiB; host memory 61 GiB, no error
    8 processes on cuda, process group: nccl (there are GPUs)
    epoch 1/3 step 10/400 loss 2.3025 learning_rate 0.0001 images/s 812.4
    epoch 1/3 step 20/400 loss 2.1113 learning_rate 0.0002 images/s 815.0
""")

CHAINED = """
Traceback (most recent call last):
  File "s.py", line 5, in <module>
    {}["x"]
    ~~^^^^^
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "s.py", line 6, in <module>
    raise RuntimeError("bad")
RuntimeError: bad

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "s.py", line 9, in <module>
    raise OSError(28, "full")
OSError: [Errno 28] full
""".strip()

WORDS = [
    *OUT_OF_MEMORY, *CHILD_FAILED, *CHAINED.splitlines(), "Original Traceback (most recent call last):", "[rank1]: ", "{cause}", "{0}",
    "\r", "\x1b[31m", " is not authorized to perform: s3:GetObject on resource: {x}", "MemoryError", "[1,2]<stderr>:",
]  # fmt: skip
TEXTS = st.one_of(st.text(), st.sampled_from(WORDS), st.tuples(st.sampled_from(WORDS), st.text()).map("".join))
