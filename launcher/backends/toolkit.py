"""A shim around AWS's container toolkit that adds four things.

    python toolkit.py --port 23456 [--lifeline FD]

1. SIGTERM reaches the training processes. The toolkit ignores it or dies of it, and torchrun's agent would treat it as a
   failure and kill its workers. The shim sends it to the workers, which can finish their step and exit cleanly.
2. The rendezvous port is an argument instead of 7777 or 29500, because many runs share a machine.
3. No process is left behind. When the toolkit ends, or the lifeline's write end closes, every process below the shim is
   killed. When the toolkit's own child is killed, its orphans are ended too: they hold the pipe that the toolkit reads.
4. A line that the script writes in pieces, as an unbuffered `print` with several arguments does, stays one line of the log.

The file runs by its path, with the toolkit's Python, and imports nothing else of this kit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import time
from asyncio.subprocess import Process
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
ORPHAN_SECONDS = 3
"""Seconds that orphans may hold the toolkit's pipe."""
LONGEST_LINE = 2**16
"""Bytes of an unfinished line to wait for, as many as the toolkit reads at once."""
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MPI = ("mpirun", "sshd")
"""The toolkit's commands for an MPI job, such as SMDDP's: on the first host and on the others."""
RANK = "OMPI_COMM_WORLD_RANK"
"""The variable that Open MPI sets for each rank. https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lifeline", type=int)
    options = parser.parse_args()
    sys.path.pop(0)  # scripts must not import from this file's folder
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    adopt_orphans()
    threading.Thread(target=pass_on_sigterm, args=(caught_signals(),), daemon=True).start()
    threading.Thread(target=end_orphans, args=(remember_processes(),), daemon=True).start()
    if options.lifeline is not None:
        threading.Thread(target=end_with_the_lifeline, args=(options.lifeline,), daemon=True).start()

    import sagemaker_pytorch_container.training
    from sagemaker_training import environment, torch_distributed, trainer

    sagemaker_pytorch_container.training.MASTER_PORT = torch_distributed.MASTER_PORT = str(options.port)
    # torchrun's default of --master_port, which the toolkit omits for one host
    os.environ["PET_MASTER_PORT"] = str(options.port)
    name_the_torch_version(sagemaker_pytorch_container.training)
    try:
        trainer.train()
    except SystemExit as ended:
        # on a full disk the toolkit cannot write why the script failed, and ends with 0
        if not ended.code and not os.path.exists(os.path.join(environment.output_dir, "success")):
            sys.exit(1)
        raise
    finally:
        kill_everything_below()


def name_the_torch_version(training: Any) -> None:
    """Set the toolkit's SM_DLC_TORCH_VERSION from the file that torch itself reads it from.

    The toolkit would import torch for it, at the cost of 2 s and hundreds of megabytes on every host.
    """
    found = importlib.util.find_spec("torch")
    file = os.path.join(os.path.dirname(found.origin), "version.py") if found is not None and found.origin else ""
    if os.path.isfile(file):
        os.environ["SM_DLC_TORCH_VERSION"] = str(runpy.run_path(file)["__version__"])
        training._set_torch_version_environment = lambda: None


def caught_signals() -> int:
    """Handle SIGTERM, and return a pipe's read end that gets the number of each signal with a handler.

    A Python handler would run only when the main thread next runs Python: not while that thread waits in a system call and the
    signal arrived just before the call, or on another thread. https://docs.python.org/3/library/signal.html
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reading


def adopt_orphans() -> None:
    """Make this process the parent of orphans below it, so that it can end them (Linux only)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_the_parent() -> None:
    """In a child: get SIGKILL when the shim dies (Linux only)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pass_on_sigterm(signals: int) -> None:
    """After SIGTERM, send it once to every training process, including those that start later."""
    import psutil

    while os.read(signals, 1) != bytes([signal.SIGTERM]):
        continue
    signalled = set()
    while True:
        for worker in training_processes(psutil.Process()):
            if worker not in signalled:
                signalled.add(worker)
                try:
                    worker.send_signal(signal.SIGTERM)
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.1)


def training_processes(toolkit: psutil.Process) -> list[psutil.Process]:
    """The processes of the script: torchrun's children, MPI's ranks, or the toolkit's own child.

    A process with its parent's command line is a fork before exec. The parent's handler would swallow its signal.
    """
    import psutil

    found: list[psutil.Process] = []
    for child in toolkit.children():
        try:
            command = child.cmdline()
            if command == toolkit.cmdline():
                continue
            if any(part.endswith(TORCHRUN) for part in command[:4]):
                found += [worker for worker in child.children() if worker.cmdline() != command]
            elif command and os.path.basename(command[0].partition(":")[0]) in MPI:
                found += ranks_below(child)
            else:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def ranks_below(process: psutil.Process) -> list[psutil.Process]:
    """The ranks of this host, below any shells, ssh and daemons.

    On SIGTERM, mpirun would kill its ranks and report a failure. When all ranks exit cleanly, it ends with 0.
    """
    import psutil

    found: list[psutil.Process] = []
    for child in process.children():
        try:
            is_rank = RANK in child.environ() and not any(part.endswith("smddprun") for part in child.cmdline()[:2])
            found += [child] if is_rank else ranks_below(child)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class WholeLines:
    """A stream read in whole lines, or up to a carriage return. The toolkit prints whatever one `read` returns as lines."""

    def __init__(self, stream: asyncio.StreamReader):
        self._stream = stream
        self._cut = b""

    async def read(self, size: int) -> bytes:
        while piece := await self._stream.read(size):
            self._cut += piece
            end = max(self._cut.rfind(b"\n"), self._cut.rfind(b"\r")) + 1
            if end or len(self._cut) > LONGEST_LINE:
                end = end or len(self._cut)
                lines, self._cut = self._cut[:end], self._cut[end:]
                return lines
        last, self._cut = self._cut, b""
        return last


def remember_processes() -> list[Process]:
    """A list that collects the asyncio processes which the toolkit starts from now on."""
    start = asyncio.create_subprocess_exec
    started: list[Process] = []

    async def start_and_remember(*command: Any, **options: Any) -> Process:
        process = await start(*command, preexec_fn=die_with_the_parent, **options)
        for name in ("stdout", "stderr"):
            stream = getattr(process, name)
            if stream is not None:
                setattr(process, name, WholeLines(stream))
        started.append(process)
        return process

    asyncio.create_subprocess_exec = start_and_remember
    return started


def end_orphans(started: list[Process]) -> None:
    """Kill the orphans of the toolkit's latest process, ORPHAN_SECONDS after its death."""
    while True:
        ended = [process for process in started if process.returncode is not None]
        time.sleep(ORPHAN_SECONDS)
        if ended and ended[-1] is started[-1]:
            kill_everything_below()


def end_with_the_lifeline(pipe: int) -> None:
    """Wait until the lifeline's write end closes, then end everything."""
    while os.read(pipe, 1):
        continue
    kill_everything_below()
    os._exit(1)


def kill_everything_below() -> None:
    """SIGKILL every process below this one. Orphans become children of this process and are found in the next round."""
    import psutil

    while True:
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        # psutil 7.2's error on Linux before 6.16, if another thread has reaped the leader of a group that still has members
        with contextlib.suppress(OSError):
            psutil.wait_procs(below, timeout=5)
        reap()


def reap() -> None:
    """Reap adopted children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
