"""One host's part of the Ray cluster in which servers live and images travel."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from launcher_observer.system.host import usable_cores

from training.servers.groups import Groups, address_of

ENTRYPOINTS = Path(__file__).parents[2]

SERVES = "serves"
"""The resource of a node on which servers run."""

PARTS_GB = 2.0
"""Of shared memory at most, for parts of batches on their way."""

SHARED_MEMORY = Path("/dev/shm")

PART_IN_REPLY_BYTES = 2**26
"""A part up to this size travels in the server's reply, from process to process; a larger one from store to store, by raylets, whose
processes then copy it too."""

KEPT_BYTES = 2**25, 2**29
"""Of a server's process: blocks up to the first size come from the heap, and free memory up to the second stays there. Without it, every
buffer of a part is given back to the kernel and comes back page by page (mallopt(3))."""

_END_SECONDS = 20
_LOOK_SECONDS = 1.0
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def require_package() -> None:
    """
    Raises:
        ValueError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "worker_type remote needs the package ray, which this image lacks: a job with two instance groups gets it by "
            "its requirements; by hand: pip install ray==2.60.0"
        )


@contextlib.contextmanager
def node(groups: Groups, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this host, as long as the context lasts or this process lives. Those of the first training host are the head.

    Args:
        log: gets what they print.

    Returns:
        The process that keeps the others; it has ended where the cluster has.
    """
    address = address_of(groups.host)
    head, port = groups.meeting_place
    options = ["--node-ip-address", address, "--num-gpus", "0", "--object-store-memory", str(_shared_memory())]
    options += ["--disable-usage-stats", "--block"]
    with contextlib.ExitStack() as stack:
        if groups.is_head:
            # a socket's path has at most 107 characters, and Ray adds some 60
            place = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
            )
            options += ["--head", "--port", str(port), "--temp-dir", place, "--include-dashboard", "false"]
        else:
            options += ["--address", f"{head}:{port}"]
        if groups.serves:
            options += ["--num-cpus", str(max(1, int(usable_cores()))), "--resources", f'{{"{SERVES}": 1}}']
        else:
            options += ["--num-cpus", "0"]
        log.parent.mkdir(parents=True, exist_ok=True)
        output = stack.enter_context(open(log, "ab"))
        process = _started([sys.executable, "-m", "ray.scripts.scripts", "start", *options], groups, output)
        try:
            yield process
        finally:
            _end(process)


@contextlib.contextmanager
def connected(
    groups: Groups, process: subprocess.Popen[bytes] | None, wait_seconds: float, *, talks: bool
) -> Iterator[None]:
    """This process as a member of the cluster, through its own host's node.

    Args:
        process: as `node` gives it; None where another process of this host has it.
        talks: whether this process prints what servers print.

    Raises:
        TimeoutError: the node did not start in time.
        ConnectionError: it ended.
    """
    _environment(groups, os.environ)
    import ray  # reads the environment

    head, port = groups.meeting_place
    until = time.monotonic() + wait_seconds
    handler = signal.getsignal(signal.SIGTERM)
    while True:
        try:
            ray.init(
                address=f"{head}:{port}",
                namespace=SERVES,
                _node_ip_address=address_of(groups.host),
                configure_logging=False,
                log_to_driver=talks,
            )
            break
        except (ConnectionError, RuntimeError, OSError) as error:
            if process is not None and process.poll() is not None:
                raise ConnectionError(f"Ray's node on {groups.host} ended with code {process.returncode}") from error
            if time.monotonic() > until:
                raise TimeoutError(f"{groups.host} could not join Ray's cluster at {head}:{port}: {error}") from error
            time.sleep(0.5)
    signal.signal(signal.SIGTERM, handler)  # ray.init takes it over
    try:
        yield
    finally:
        ray.shutdown()


def is_reachable(groups: Groups) -> bool | None:
    """Whether something answers at the meeting place; None where that could not be found out, as where packets are lost."""
    try:
        socket.create_connection(groups.meeting_place, timeout=5).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def wait_for_head(groups: Groups, seconds: float) -> None:
    """Until something answers at the meeting place, without which no other host's node starts.

    Raises:
        TimeoutError: nothing did.
    """
    until = time.monotonic() + seconds
    while not is_reachable(groups):
        if time.monotonic() > until:
            host, port = groups.training[0], groups.port
            raise TimeoutError(
                f"{groups.host} waited {seconds / 60:g} min for {host}, port {port}, where servers and trainers meet: the hosts' "
                "security group must pass all traffic among its own members"
            )
        time.sleep(_LOOK_SECONDS)


def _started(command: list[str], groups: Groups, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that a stop of this process's group leaves it; it ends when its parent has."""
    environment = dict(os.environ)
    _environment(groups, environment)
    if groups.serves:
        threshold, kept = KEPT_BYTES
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(kept)}
    libc = ctypes.CDLL(None)

    def with_parent() -> None:
        libc.prctl(_PARENT_DEATH, signal.SIGTERM)

    return subprocess.Popen(
        command, stdout=output, stderr=output, env=environment, start_new_session=True, preexec_fn=with_parent
    )


def _environment(groups: Groups, environ: dict[str, str] | os._Environ[str]) -> None:
    """What Ray reads from the environment, in processes that it starts too."""
    paths = [str(ENTRYPOINTS), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nobody waits for what a node still makes
    environ["RAY_max_direct_call_object_size"] = str(PART_IN_REPLY_BYTES)
    environ["RAY_task_rpc_inlined_bytes_limit"] = str(PART_IN_REPLY_BYTES)
    # another job's cluster at the same address is not joined by mistake; it keeps nobody out who knows the job
    job = environ.get("TRAINING_JOB_NAME") or environ.get("SM_HPS", "")
    environ["RAY_AUTH_MODE"] = "token"
    environ["RAY_AUTH_TOKEN"] = hashlib.sha256(f"{job} {groups.training} {groups.port}".encode()).hexdigest()


def _shared_memory() -> int:
    """Bytes for parts on their way: half of what is free, at most PARTS_GB."""
    free = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else os.statvfs("/tmp")
    return max(80_000_000, min(int(PARTS_GB * 1e9), free.f_bavail * free.f_frsize // 2))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
