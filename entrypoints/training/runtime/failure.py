"""What went wrong, in the failure file: SageMaker shows its first 1,024 characters as FailureReason. Standard library only."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PENDING = "(written before the process ended)\n"
"""Ends a text that an exception's text may replace."""

LIMIT = 1024
"""Characters of the file that become FailureReason.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-output.html"""


@dataclass
class Progress:
    """How far this process has come, for its failure report."""

    step: int | None = None
    """Optimizer steps done; None before training."""
    report_first: Callable[[str], str | None] | None = None
    """Tells the other ranks why this one fails, unless one failed before, and returns the first one's report: empty if that rank
    knew no reason, None if nobody answers. Without it this process trains alone."""
    doing: str = ""
    """The phase that this process is in."""
    changes: int = 0
    """Grows with every sign of progress."""
    alone: bool = False
    """Whether this process works alone while the others wait without a collective, however long it takes."""
    out_of_memory: str | None = None
    """What to change if the GPU's memory is full, from what was predicted."""
    file: Path | None = None
    """The failure file."""
    pending_failure: str = ""
    """What the file says of a failure that is yet to come."""

    def enter(self, doing: str) -> None:
        """A phase begins."""
        self.doing = doing
        self.changes += 1


progress = Progress()


class Cause(NamedTuple):
    """A known kind of failure."""

    pattern: str
    """A regular expression that finds it in an exception's type and message."""
    text: str
    """What it is, and what to do."""


OTHER_RANK = Cause(
    r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting \d+ ?ms|collective operation timeout"
    r"|NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|NCCL communicator (was|has been) aborted|DistBackendError"
    r"|Some NCCL operations have failed or timed out|[Ww]atchdog caught collective|[Gg]loo\b",
    "another rank ended without a message, or is late: see which host's log ends first. A process is killed if its host's memory "
    "is full; one that is busy alone for long needs a larger process_group_minutes",
)
"""What torch.distributed raises if the fault is not this rank's own."""

GPU_FULL = Cause(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|\bOutOfMemoryError\b",
    "the GPU's memory is full. Set batch_size_per_device to auto or lower, precision to bf16, zero to true",
)

CAUSES = (
    GPU_FULL,
    Cause(
        r"shared memory|killed by signal: Bus error|/dev/shm",
        "/dev/shm is too small for the data workers. Set worker_type to loader, which needs none, or lower num_workers; in docker, raise "
        "--shm-size",
    ),
    Cause(
        r"DataLoader worker .*(exited unexpectedly|killed by signal)|loader process has ended|can't allocate memory|Cannot allocate memory|"
        r"\bMemoryError\b",
        "the host's memory is full, or a data worker crashed. Lower num_workers, or take an instance type with more memory",
    ),
    Cause(
        r"\bFloatingPointError\b|\bloss\b.{0,40}\b(nan|inf|not finite)\b",
        "training has diverged. Lower learning_rate, raise warmup_fraction, set max_grad_norm, or set precision to bf16 instead of fp16",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded", "the disk is full. Raise volume_gb, or keep fewer checkpoints"
    ),
    Cause(
        r"device-side assert|Target -?\d+ is out of bounds",
        "a label is outside the model's classes. Run once on the CPU to see where",
    ),
)
"""In the order in which they are looked for; the settings they name are those of training.settings.scripts."""


@contextlib.contextmanager
def failure_file(path: Path) -> Iterator[None]:
    """Write an exception to the failure file and re-raise it. Of a host's processes only the first one to fail writes.

    A process that native code ends, by SIGABRT or SIGSEGV, prints its Python stack to standard error.
    """
    progress.file = path
    if not faulthandler.is_enabled():
        faulthandler.enable()
    try:
        yield
    except Exception as error:
        text = describe(error, os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if _is_pending(path):
            path.unlink(missing_ok=True)
        _write_first(path, text)
        raise


def record_pending_failure(text: str) -> None:
    """Record a failure that will end this process silently. If an exception is raised after all, it takes its place."""
    progress.pending_failure = f"{text}\n{_where()}\n"[: LIMIT - len(PENDING)] + PENDING
    sys.stderr.write(progress.pending_failure)
    sys.stderr.flush()
    if progress.file is not None:
        _write_first(progress.file, progress.pending_failure)


def clear_pending_failure() -> None:
    """Remove the pending failure of this process, because it goes on."""
    pending_failure, progress.pending_failure = progress.pending_failure, ""
    file = progress.file
    if pending_failure and file is not None:
        with contextlib.suppress(OSError):
            if file.read_text(encoding="utf-8") == pending_failure:
                file.unlink()


def _write_first(path: Path, text: str) -> None:
    """Write the text unless a process of this host already did. If that fails no file is left: an empty one would silence the others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115  # whether it is new decides what is done about a failure
    except OSError:
        return
    try:
        with file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)


def _is_pending(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8").endswith(PENDING)
    except OSError:
        return False


def describe(error: Exception, rank: str) -> str:
    """A failure in at most LIMIT characters.

    Its type and message; the known cause with its fix, or the other rank that failed before; host, step and memory; as much of
    the traceback's end as fits.
    """
    head = f"rank {rank}: {type(error).__name__}: {_message(error)}"
    where = f"{_host()}, {_steps()}"
    own_cause = next((cause.text for cause in CAUSES if re.search(cause.pattern, head)), None)
    if own_cause is GPU_FULL.text and progress.out_of_memory:
        own_cause = f"the GPU's memory is full. {progress.out_of_memory}"
    # torch raises these as RuntimeErrors; a connection to S3 that breaks is none
    from_another = own_cause is None and isinstance(error, RuntimeError) and re.search(OTHER_RANK.pattern, head)
    reported = (
        progress.report_first("" if from_another else f"{head[: LIMIT // 4]} ({where})")
        if progress.report_first
        else ""
    )
    cause = _other_rank(reported) if from_another else own_cause
    if from_another and not reported and progress.pending_failure:
        cause = progress.pending_failure.partition("cause: ")[2].partition("\n")[0]
    lines = [head, *([f"cause: {cause}"] if cause else []), _where()]
    text = "\n".join(line[: LIMIT // 2] for line in lines) + "\n"
    frames = "".join(traceback.format_tb(error.__traceback__))
    return (text + frames[-max(LIMIT - len(text), 1) :])[:LIMIT]


def _other_rank(reported: str | None) -> str:
    """Why another rank's fault shows here, from the report of the first one to fail."""
    if reported is None:
        return "rank 0, which records the first failure, has ended too: see its host's log"
    return f"the first to fail was {reported}" if reported else OTHER_RANK.text


def _host() -> str:
    return os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


def _where() -> str:
    return f"{_host()}, {_steps()}, {_memory()}"


def _steps() -> str:
    return "before training" if progress.step is None else f"after step {progress.step}"


def _memory() -> str:
    """This process's memory, and its GPU's if it uses one, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    text = f"process memory at most {peak / 2**30:.1f} GiB"
    with contextlib.suppress(Exception):  # no torch, or half of it; or a broken device, which answers nothing
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            now, most, reserved = cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()
            gib = [number / 2**30 for number in (now, most, reserved, cuda.mem_get_info()[1])]
            text += ", GPU memory {:.1f} GiB, at most {:.1f}, reserved {:.1f} of {:.1f}".format(*gib)
    return text


def _message(error: Exception) -> str:
    """An exception's message; one from a DataLoader's worker has it at the end of the traceback that it carries as message."""
    text = str(error)
    if "\nOriginal Traceback" not in text:
        return text
    return re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", text)[-1].strip()
