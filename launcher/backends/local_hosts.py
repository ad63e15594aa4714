"""Hosts on this machine: what they inherit, their share of cores and GPUs, their port, and the shim that stands for each.

The process backend and the emulator of SageMaker's far side start their hosts alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

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
"""What of this shell's environment the script sees. A container has a clean one, so what is missing there is missing here."""

MAX_HOSTS = 16
"""More hosts than that say nothing new on one machine."""


def inherited(outer: Mapping[str, str]) -> dict[str, str]:
    """What a host's environment takes of the one around it; torchrun lies beside this Python."""
    found = {name: outer[name] for name in PASSED_ON if name in outer}
    path = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return {**found, "PATH": path}


def share(index: int, count: int, processes: int) -> dict[str, str]:
    """One host's share of this machine as environment variables.

    Args:
        index: which host, from 0.
        count: hosts.
        processes: training processes on each.
    """
    given = {"GOMP_SPINCOUNT": "1000"}  # this machine has other work too, beside which threads that spin for long crawl
    if count * processes > 1:
        given["OMP_NUM_THREADS"] = str(max(1, core_count() // (count * processes)))
    return given | visible_gpus(gpus(), index, count, processes)


def core_count() -> int:
    """Cores that this process, and what it starts, may use."""
    return len(os.sched_getaffinity(0))


def hardware() -> str:
    """This machine's cores and GPUs, with their models."""
    models = _values("/proc/cpuinfo", "model name")
    gpus = [name for file in Path("/proc/driver/nvidia/gpus").glob("*/information") for name in _values(file, "Model")]
    return ", ".join([f"{core_count()} cores of {models[0] if models else platform.machine()}", *(gpus or ["no GPU"])])


def _values(file: str | Path, key: str) -> list[str]:
    """What stands behind `key:` in the lines of a file of the kernel's; [] where there is no such file."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def gpu_count() -> int:
    """GPUs that this shell may use: as the toolkit counts them, less those that CUDA_VISIBLE_DEVICES hides."""
    return len(gpus())


@functools.cache
def gpus() -> tuple[str, ...]:
    """Their numbers or names, as CUDA_VISIBLE_DEVICES takes them."""
    if shutil.which("nvidia-smi") is None:
        return ()
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    numbers = tuple(str(number) for number, line in enumerate(listing.splitlines()) if line.startswith("GPU "))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return numbers if visible is None else tuple(name for name in visible.split(",") if name.strip())


def visible_gpus(gpus: tuple[str, ...], index: int, count: int, processes: int) -> dict[str, str]:
    """A host's share of this machine's GPUs; none where they are fewer than the processes, which then take the CPU."""
    if not gpus:
        return {}
    if len(gpus) < count * processes:
        return {"CUDA_VISIBLE_DEVICES": ""}
    share = len(gpus) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])}


def reserve_port() -> tuple[int, IO[bytes]]:
    """A TCP port for a run's rendezvous, and the lock that keeps other runs from it until it is closed.

    It lies below the range that the kernel hands out by itself (32768 and above on Linux), so that nothing takes it by
    chance in the seconds before torchrun binds it.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 12000):
        lock = open(Path(tempfile.gettempdir()) / f"launcher-port-{port}-{os.getuid()}.lock", "wb")  # noqa: SIM115 - held
        with contextlib.suppress(OSError), socket.socket() as probe:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.bind(("", port))
            return port, lock
        lock.close()
    raise OSError("no free TCP port between 20000 and 31999")


def start_shim(
    port: int, log: IO[bytes], folder: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the container toolkit behind its shim.

    Args:
        port: of the job's rendezvous.
        log: gets standard output and error.
        folder: the working folder, the host's /opt/ml.

    Returns:
        The process; and the writing end of its lifeline, which must stay open as long as the host shall live.
    """
    reading, writing = os.pipe()
    try:
        shim = subprocess.Popen(
            [sys.executable, str(SHIM), "--port", str(port), "--lifeline", str(reading)],
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
    """What several hosts left in the same folder, by relative path; where two left the same name, the first host's counts."""
    files: dict[str, Path] = {}
    for root in roots:
        for place, _, names in os.walk(root, followlinks=True):
            for name in sorted(names):
                file = Path(place) / name
                if file.is_file():
                    files.setdefault(file.relative_to(root).as_posix(), file)
    return files


def pack(files: Mapping[str, Path], archive: Path) -> None:
    """Files as a .tar.gz; a link is packed as what it points to: the archive must be whole elsewhere too."""
    with tarfile.open(archive, "w:gz", compresslevel=1, dereference=True) as tar:
        for name, file in sorted(files.items()):
            tar.add(file, name, recursive=False)
