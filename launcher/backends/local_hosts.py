"""Hosts on this machine: inherited environment, share of cores and GPUs, port, shim.

The process backend and the SageMaker emulator use it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from launcher.backends import opt_ml
from launcher.config.file_trees import walk

SHIM = Path(__file__).with_name("toolkit.py")

PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
"""The only variables that a script inherits, so that its environment is as clean as a container's."""

NO_CREDENTIALS = {
    **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"), os.devnull),
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Hides the credentials of this machine and its user from boto3 and the AWS CLI: those in ~/.aws, in ~/.boto and from EC2.
https://boto3.amazonaws.com/v1/documentation/api/latest/guide/credentials.html"""

SERVERS_PORT = "TRAINING_SERVERS_PORT"
"""The variable with the port where a job's training hosts and other hosts meet. SageMaker's hosts share no ports and leave it unset."""

NO_TORCHRUN = f"install PyTorch, which brings it, with {sys.executable} -m pip install torch"
"""How to get torchrun, which starts the processes of a distributed job."""

MAX_HOSTS = 16
"""More hosts on one machine show nothing new."""


def inherited(outer: Mapping[str, str]) -> dict[str, str]:
    """A host's inherited variables. PATH starts with this Python's folder, which holds torchrun."""
    found = {name: outer[name] for name in PASSED_ON if name in outer}
    path = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return {**found, "PATH": path}


def finds_torchrun() -> bool:
    """Whether a host would find torchrun, which starts the processes of a distributed job."""
    return shutil.which("torchrun", path=inherited(os.environ)["PATH"]) is not None


def share(rank: int | None, count: int, processes: int, others: int = 0) -> dict[str, str]:
    """One host's share of this machine as environment variables.

    Args:
        rank: the host's rank among those that train, from 0; None: it does not train, and gets no GPU.
        count: number of hosts that train.
        processes: training processes per host.
        others: number of hosts that do not train, with one process each.
    """
    given = {"GOMP_SPINCOUNT": "1000"}  # long spinning slows all threads of a busy machine
    if count * processes + others > 1:
        given["OMP_NUM_THREADS"] = str(max(1, core_count() // (count * processes + others)))
    return given | visible_gpus(gpus(), rank, count, processes)


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS


def hardware() -> str:
    """This machine's cores and GPUs in words, with their models."""
    models = _values("/proc/cpuinfo", "model name")
    gpus = [name for file in Path("/proc/driver/nvidia/gpus").glob("*/information") for name in _values(file, "Model")]
    return ", ".join([f"{core_count()} cores of {models[0] if models else platform.machine()}", *(gpus or ["no GPU"])])


def _values(file: str | Path, key: str) -> list[str]:
    """The values of `key:` lines in a kernel file; [] without the file."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def gpu_count() -> int:
    """GPUs as the toolkit counts them, without those that CUDA_VISIBLE_DEVICES hides."""
    return len(gpus())


@functools.cache
def gpus() -> tuple[str, ...]:
    """GPU indices or names, as in CUDA_VISIBLE_DEVICES."""
    indices = _every_gpu()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not indices:
        return indices
    named = [name.strip() for name in visible.split(",")]
    # as CUDA reads it: up to the first invalid name (CUDA C++ programming guide, "CUDA Environment Variables")
    known = itertools.takewhile(lambda name: name in indices or name.startswith(("GPU-", "MIG-")), named)
    return tuple(known)


def _every_gpu() -> tuple[str, ...]:
    """The indices of this machine's GPUs; () without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ()
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return tuple(str(index) for index, line in enumerate(listing.splitlines()) if line.startswith("GPU "))


def shown_gpus() -> str:
    """In words, which of this machine's GPUs CUDA_VISIBLE_DEVICES leaves; "" if all of them."""
    if gpus() == _every_gpu():
        return ""
    return f"GPUs {','.join(gpus())} alone visible" if gpus() else "no GPU visible"


def visible_gpus(gpus: tuple[str, ...], rank: int | None, count: int, processes: int) -> dict[str, str]:
    """A host's share of the GPUs; see `share`. With fewer GPUs than processes, all use the CPU.

    If no GPU is known, the script gets our own variable; without it, it would see the GPUs that our environment hides. Without
    nvidia-smi that variable may name GPUs, in unknown number, so only a host that trains alone gets them.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return {} if given is None else {"CUDA_VISIBLE_DEVICES": given if rank is not None and count == 1 else ""}
    if rank is None or len(gpus) < count * processes:
        return {"CUDA_VISIBLE_DEVICES": ""}
    share = len(gpus) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * share : (rank + 1) * share])}


def reserve_port() -> tuple[int, socket.socket]:
    """A TCP port for a run's rendezvous, and the socket that reserves it while it is open.

    The socket binds the UDP port of the same number, which only another run wants: the TCP port is torchrun's. The port is below
    Linux's range of ephemeral ports (32768 and above), so nothing else takes it first.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 12000):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket() as probe:
            reservation.bind(("127.0.0.1", port))
            probe.bind(("", port))
            return port, reservation
        reservation.close()
    raise OSError("no free TCP port between 20000 and 31999")


def servers_port(groups: int) -> tuple[dict[str, str], socket.socket | None]:
    """SERVERS_PORT with a free port, and the socket that reserves it, as in `reserve_port`; neither for fewer than two instance groups."""
    if groups < 2:
        return {}, None
    port, reservation = reserve_port()
    return {SERVERS_PORT: str(port)}, reservation


def start_shim(
    port: int, log: IO[bytes], folder: Path, environment: Mapping[str, str], *, own_opt_ml: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the container toolkit in its shim.

    Args:
        port: the rendezvous port.
        log: gets standard output and error.
        folder: the working folder, the host's /opt/ml.
        own_opt_ml: also show the folder as /opt/ml, to this host alone, if the kernel allows it.

    Returns:
        The process, and the write end of its lifeline. Closing it ends the host.
    """
    reading, writing = os.pipe()
    command = [sys.executable, str(SHIM), "--port", str(port), "--lifeline", str(reading)]
    try:
        shim = subprocess.Popen(
            opt_ml.command(folder, command) if own_opt_ml else command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[reading],
            start_new_session=True,
            cwd=folder,
            env=dict(environment),
        )
    finally:
        os.close(reading)
    return shim, writing


def merged_files(roots: Iterable[Path]) -> dict[str, Path]:
    """Relative path -> file, merged from one folder of each host. The first host's file wins."""
    files: dict[str, Path] = {}
    for root in roots:
        for place, _, names in walk(root):
            for name in sorted(names):
                file = Path(place) / name
                if file.is_file():
                    files.setdefault(file.relative_to(root).as_posix(), file)
    return files


def pack(files: Mapping[str, Path], archive: Path) -> None:
    """Pack files as a .tar.gz, with links replaced by their targets, so that the archive is complete.

    They are stored uncompressed: weights hardly shrink, and compressing takes ten times as long (tests/benchmarks/model_files.py).
    """
    with tarfile.open(archive, "w:gz", compresslevel=0, dereference=True) as tar:
        for name, file in sorted(files.items()):
            tar.add(file, name, recursive=False)
