"""One host's part of the Ray cluster in which servers live and images are sent."""

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

from launcher_observer.system.host import usable_cores

from training.runtime.reporting import write_line
from training.servers.groups import Groups, address_of

ENTRYPOINTS = Path(__file__).parents[2]

SERVES = "serves"
"""The resource of a node on which servers run."""

PARTS_GB = 2.0
"""Shared memory at most, for parts that do not fit into a reply."""

SHARED_MEMORY = Path("/dev/shm")

PART_IN_REPLY_BYTES = 2**26
"""Parts up to this size are sent in the server's reply, from process to process; larger ones from store to store, by raylets, whose
processes then copy them too."""

KEPT_BYTES = 2**25, 2**29
"""In a server's process, blocks up to the first size come from the heap, and free memory up to the second stays there. Otherwise, every
buffer of a part is given back to the kernel and comes back page by page (mallopt(3))."""

LOOK_SECONDS = 0.5

STARTS = 4
"""Of a host's node in a row, at most."""

LIVED_SECONDS = 300.0
"""The end of a node that has lived this long does not count towards STARTS."""

_END_SECONDS = 20
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def require_package() -> None:
    """
    Raises:
        ValueError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "worker_type remote needs the package ray, which this image lacks: a job with two instance groups installs it "
            "from its requirements; by hand: pip install ray==2.60.0"
        )


class RayNode:
    """This host's Ray processes, in a session of their own: a stop of this process's group leaves them; they end when this process has."""

    def __init__(self, options: list[str], groups: Groups, log: Path):
        self._command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        self._groups, self._log, self._starts = groups, log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._started()

    @property
    def pid(self) -> int:
        """Of the process that keeps the others running."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the processes are gone, as when the head is gone."""
        return self._process.poll() is not None

    def keep(self) -> None:
        """Restart the processes if they have ended: on a busy host they take longer than the 30 s that Ray allows.

        Raises:
            ConnectionError: they have ended STARTS times in a row, each within LIVED_SECONDS.
        """
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._since > LIVED_SECONDS:
                self._starts = 0
            return
        ended = f"Ray's node on {self._groups.host} ended with code {code}"
        if self._starts == STARTS:
            raise ConnectionError(f"{ended}, started {STARTS} times in a row: see {self._log}")
        write_line(f"{ended}: restarting it")
        self._process = self._started()

    def end(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        self._since = time.monotonic()
        environment = dict(os.environ)
        _environment(self._groups, environment)
        if self._groups.serves:
            threshold, kept = KEPT_BYTES
            environment |= {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(kept)}
            environment["OMP_NUM_THREADS"] = "1"  # per server thread, whose teacher then sums in one order
        libc = ctypes.CDLL(None)

        def with_parent() -> None:
            libc.prctl(_PARENT_DEATH, signal.SIGTERM)

        with open(self._log, "ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=with_parent
            )


@contextlib.contextmanager
def node(groups: Groups, log: Path) -> Iterator[RayNode]:
    """This host's Ray processes, while the context lasts and this process lives. Those of the first training host are the head.

    Args:
        log: gets their output.
    """
    address = address_of(groups.host)
    head, port = groups.meeting_place
    options = ["--node-ip-address", address, "--num-gpus", "0", "--object-store-memory", str(_shared_memory())]
    options += ["--disable-usage-stats", "--block"]
    # the kernel chooses the ports: none of those that Ray would keep for itself (8265, 52365, 10002 to 19999) could be the head's
    for name in ("min-worker", "max-worker", "dashboard", "dashboard-agent-listen"):
        options += [f"--{name}-port", "0"]
    with contextlib.ExitStack() as stack:
        # one per host: hosts of one machine that start at once would take each other's sockets; a socket's path has at most
        # 107 characters, and Ray adds some 60
        place = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        options += ["--temp-dir", stack.enter_context(place)]
        if groups.is_head:
            options += ["--head", "--port", str(port), "--include-dashboard", "false"]
        else:
            options += ["--address", f"{head}:{port}"]
        if groups.serves:
            options += ["--num-cpus", str(max(1, int(usable_cores()))), "--resources", f'{{"{SERVES}": 1}}']
        else:
            options += ["--num-cpus", "0"]
        made = RayNode(options, groups, log)
        stack.callback(made.end)
        yield made


@contextlib.contextmanager
def connected(groups: Groups, own: RayNode | None, wait_seconds: float, *, talks: bool) -> Iterator[None]:
    """Connect this process to the cluster, through its own host's node.

    Args:
        own: as `node` gives it; None if another process of this host has it.
        talks: whether this process prints what servers print.

    Raises:
        TimeoutError: the node did not start in time.
        ConnectionError: it ended after every start.
    """
    _environment(groups, os.environ)
    import ray  # reads the environment

    head, port = groups.meeting_place
    until = time.monotonic() + wait_seconds
    handler = signal.getsignal(signal.SIGTERM)
    try:
        while not ray.is_initialized():
            try:
                if is_reachable(groups) is False:  # Ray would wait 40 s for it
                    raise ConnectionRefusedError("nothing listens there")
                ray.init(
                    address=f"{head}:{port}",
                    namespace=SERVES,
                    _node_ip_address=address_of(groups.host),
                    configure_logging=False,
                    log_to_driver=talks,
                )
            except Exception as error:  # the head or this host's node is not up yet: Ray says it in several ways
                ray.shutdown()
                if own is not None:
                    own.keep()
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{groups.host} could not join Ray's cluster at {head}:{port}: {error}"
                    ) from error
                time.sleep(LOOK_SECONDS)
            finally:
                signal.signal(signal.SIGTERM, handler)  # ray.init takes it over, even if it fails
        yield
    finally:
        ray.shutdown()


def is_reachable(groups: Groups) -> bool | None:
    """Whether something answers at the meeting place; None if that is unknown, as when packets are lost."""
    try:
        socket.create_connection(groups.meeting_place, timeout=5).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def wait_for_head(groups: Groups, seconds: float) -> None:
    """Wait until the first training host answers at the meeting place: Ray's node of another host ends at once without it.

    Raises:
        TimeoutError: it did not in time.
    """
    until = time.monotonic() + seconds
    while not is_reachable(groups):
        if time.monotonic() > until:
            host, port = groups.training[0], groups.port
            raise TimeoutError(
                f"{groups.host} waited {seconds / 60:g} min for {host}, port {port}, where servers and trainers meet: check first whether "
                "training failed there; otherwise the hosts' security group must pass all traffic among its own members"
            )
        time.sleep(LOOK_SECONDS)


def _environment(groups: Groups, environ: dict[str, str] | os._Environ[str]) -> None:
    """Set what Ray reads from the environment, also in processes that it starts."""
    paths = [str(ENTRYPOINTS), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call starts no cluster of its own
    environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nobody waits for what a node still makes
    environ["RAY_max_direct_call_object_size"] = str(PART_IN_REPLY_BYTES)
    environ["RAY_task_rpc_inlined_bytes_limit"] = str(PART_IN_REPLY_BYTES)
    # prevents joining another job's cluster at the same address by mistake; it keeps nobody out who knows the job
    job = environ.get("TRAINING_JOB_NAME") or environ.get("SM_HPS", "")
    environ["RAY_AUTH_MODE"] = "token"
    environ["RAY_AUTH_TOKEN"] = hashlib.sha256(f"{job} {groups.training} {groups.port}".encode()).hexdigest()


def _shared_memory() -> int:
    """Bytes of shared memory: half of what is free, at most PARTS_GB, and the 80 MB that Ray needs."""
    free = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else os.statvfs("/tmp")
    return max(80_000_000, min(int(PARTS_GB * 1e9), free.f_bavail * free.f_frsize // 2))
