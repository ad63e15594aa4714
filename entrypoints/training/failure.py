"""What went wrong, in the failure file: SageMaker shows its first 1,024 characters as FailureReason. Standard library only."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1024
"""Characters of the file that become FailureReason.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-output.html"""


@contextlib.contextmanager
def failure_file(path: Path) -> Iterator[None]:
    """Write an exception's end to the failure file and let it go on. The first process of a host to fail is the one that is heard."""
    try:
        yield
    except Exception as error:
        text = describe(error, os.environ.get("RANK", "0"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(text)
        raise


def describe(error: Exception, rank: str) -> str:
    """An exception in at most LIMIT characters: its message first, then as much of the traceback's end as fits."""
    head = f"rank {rank}: {type(error).__name__}: {_message(error)}"[: LIMIT // 2]
    lines = "".join(traceback.format_tb(error.__traceback__))
    room = LIMIT - len(head) - 1
    return head + "\n" + lines[-room:]


def _message(error: Exception) -> str:
    """What an exception says; one from a DataLoader's worker says it at the end of the traceback that it has for a message."""
    text = str(error)
    return text.rpartition(f"\n{type(error).__name__}: ")[2].strip() if "\nOriginal Traceback" in text else text
