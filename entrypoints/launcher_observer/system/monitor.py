"""The system monitor: one process per host that samples cores, memory, disks, network and GPUs in SageMaker Debugger's own format.

As a separate process it neither takes the training's GIL nor waits for it, and it can fail without harm: whatever goes wrong is
reported once. `background` starts it, and decides how long it lives. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher_observer.contract import node_name
from launcher_observer.system.background import FOLDER, PRESENT, Presence, locked
from launcher_observer.system.host_samples import HostSamples, Key
from launcher_observer.system.neighbours import Neighbours
from launcher_observer.system.nvml import Gpus

INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds that SageMaker allows:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ProfilerConfig.html (ProfilingIntervalInMilliseconds)"""

DEFAULT_INTERVAL = 500
"""SageMaker's own."""

FULL_RATE_BYTES = 256 * 2**20
"""Written at the full rate, then as much again at half of it, at a quarter … On the largest hosts (96 cores, 8 GPUs, 500 ms)
each halving lasts twice as long as the one before, the first 80 min; 28 days, SageMaker's longest job, make 2.5 GB."""

FREE_BYTES = 2**30
"""Nothing is written if the disk has less left: that is for the checkpoints and the model."""

LOOK_SECONDS = 0.1
"""Between two checks whether a process of the run still lives."""

SHORTEST_SAMPLE = 0.05
"""Seconds; the kernel counts a core's time in hundredths."""

LOG = "monitor.log"
"""In FOLDER: what could not be sampled, if the monitor must not write to standard error."""


@contextlib.contextmanager
def system_monitor(output: Path, local_rank: int, *, wanted: bool = True) -> Iterator[None]:
    """Sample this host while the body runs, if this is its first process.

    Args:
        output: the host's output folder.
        local_rank: this process's rank on its host.
        wanted: if false, nothing is sampled.
    """
    presence = None
    if wanted and local_rank == 0 and not Presence.present:  # the observer's, in a script that it watches
        interval, why = interval_ms()
        print(f"system metrics every {interval} ms ({why}) in {output / FOLDER}", flush=True)
        try:
            presence = Presence(str(output), quiet=False)
        except OSError as error:
            print(f"no system metrics: {error}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if presence is not None:
            presence.leave()


def interval_ms(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Milliseconds between two samples, and why: set by the job's profiling section, which SageMaker passes on in a file."""
    file = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/profilerconfig.json")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return DEFAULT_INTERVAL, "SageMaker's own rate; a job's profiling.system_interval_ms sets another"
    try:
        said = json.loads(text).get("ProfilingIntervalInMilliseconds", DEFAULT_INTERVAL)
        interval = int(said)
    except (ValueError, TypeError, AttributeError):
        return DEFAULT_INTERVAL, f"{file} could not be read"
    if interval not in INTERVALS:
        return DEFAULT_INTERVAL, f"{interval} in {file.name} is not one of {', '.join(map(str, INTERVALS))}"
    return interval, f"as {file.name} says"


class Writer:
    """Samples as JSON lines, one file per minute: system/incremental/YYYYMMDDHH/<second of the minute's begin>.algo-N.json, in UTC."""

    def __init__(self, folder: Path, node: str):
        self._folder, self._node = folder, node
        self._minute, self._file = -1, -1
        self.written = 0
        """Bytes so far."""

    def write(self, now: float, values: Mapping[Key, float]) -> None:
        """One sample, in one write.

        Args:
            now: Unix seconds.

        Raises:
            OSError: it could not be written; the next one is still tried.
        """
        minute = int(now) // 60 * 60
        if minute != self._minute:
            self._open(minute)
        end = f',"NodeId":"{self._node}","Timestamp":{now:.6f}}}\n'
        lines = [
            f'{{"Type":"{kind}","Name":"{name}","Dimension":"{dimension}","Value":{value:.2f}{end}'
            for (kind, name, dimension), value in values.items()
        ]
        sample = "".join(lines).encode()
        written = os.write(self._file, sample)
        self.written += written
        if written < len(sample):
            raise OSError("the disk is full")

    def _open(self, minute: int) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = self._minute = -1
        folder = self._folder / "system/incremental" / time.strftime("%Y%m%d%H", time.gmtime(minute))
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES:
            raise OSError(f"{free / 2**20:.0f} MiB left on the disk; sampling needs 1 GiB")
        self._file = os.open(folder / f"{minute}.{self._node}.json", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._minute = minute


class Errors:
    """Reports each kind of error once."""

    def __init__(self, log: Path | None) -> None:
        """
        Args:
            log: the file; None: standard error.
        """
        self._log = log
        self._reported: set[str] = set()

    def report(self, what: str, error: Exception) -> None:
        if what in self._reported:
            return
        self._reported.add(what)
        line = f"system monitor: {what}: {error or type(error).__name__}\n"
        with contextlib.suppress(OSError):  # nobody reads standard error any more, or the disk is full
            if self._log is None:
                sys.stderr.write(line)
                sys.stderr.flush()
            else:
                with open(self._log, "a", encoding="utf-8") as file:
                    file.write(line)


def open_gpus(errors: Errors) -> Gpus | None:
    """The GPUs; None if this machine has no driver for any."""
    try:
        return Gpus()
    except OSError as error:
        if Path("/dev/nvidiactl").exists():  # there are GPUs, and a reason to wonder
            errors.report("no GPU metrics", error)
    except Exception as error:  # an older driver lacks a function
        errors.report("no GPU metrics", error)
    return None


def open_neighbours(starter: str, errors: Errors) -> Neighbours | None:
    """The programs outside the run; None if this process cannot tell which those are."""
    try:
        return Neighbours(starter)
    except OSError as error:
        errors.report("programs outside the run are not named", error)
        return None


def sample_while_needed(output: Path, present: int, starter: str, errors: Errors) -> None:
    """Sample until no process of the run lives on this host, or its folder has been removed.

    Args:
        output: the host's output folder.
        present: the file that they have locked.
        starter: id of the process that started the monitor.
    """
    interval, host, gpus = interval_ms()[0] / 1000, HostSamples(), open_gpus(errors)
    neighbours = open_neighbours(starter, errors)
    writer = Writer(output / FOLDER, node_name())
    with contextlib.suppress(Exception):
        host.look(time.monotonic())
    due = time.monotonic() + interval
    while True:
        alone = _alone_before(due, present)
        if alone and not writer.written:  # a run that is shorter than an interval
            time.sleep(SHORTEST_SAMPLE)
        elif alone or not (output / FOLDER / PRESENT).exists():
            return
        values: dict[Key, float] = {}
        try:
            values |= host.look(time.monotonic())
        except Exception as error:  # a kernel file in another format: the other metrics go on
            errors.report("no metrics of the cores, memory, disks and network", error)
        if neighbours is not None:
            try:
                values |= neighbours.look(time.monotonic())
            except Exception as error:
                errors.report("programs outside the run are not named", error)
                neighbours = None
        if gpus is not None:
            try:
                values |= gpus.look()
                for what, words in gpus.refused.items():
                    errors.report(f"no {what}", OSError(words))
            except Exception as error:
                errors.report("no more GPU metrics", error)
                gpus = None
        try:
            writer.write(time.time(), values)
        except OSError as error:
            errors.report("not written", error)
        if alone:
            return
        due = max(due + slowed(interval, writer.written), time.monotonic())  # after a machine's sleep, go on from now


def _alone_before(due: float, present: int) -> bool:
    """Wait until a moment; whether before it no process is present. If so, the file stays locked, so that none can join."""
    while not locked(present, fcntl.LOCK_EX):
        left = due - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, LOOK_SECONDS))
    return True


def slowed(interval: float, written: int) -> float:
    """Seconds between two samples, by the bytes written: doubled with each FULL_RATE_BYTES."""
    return interval * 2.0 ** (written // FULL_RATE_BYTES)


def _close_inherited() -> None:
    """Close the files that the first process had open, except the standard streams.

    Closing by number up to SC_OPEN_MAX may take minutes: in a container that is a billion, and before glibc 2.34 Python tries each.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # Linux alone has it
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        return
    for number in numbers:
        if number > 2:
            with contextlib.suppress(OSError):  # the list's own
                os.close(number)


def main() -> None:
    """The monitor's process: its standard input is the file that shows that it lives and holds its process id."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--starter", required=True)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    _close_inherited()
    # a stopped run's processes get it, and train on until they have saved
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.ftruncate(0, 0)
    os.write(0, f"{os.getpid()}\n".encode())
    folder = options.output / FOLDER
    present = os.open(folder / PRESENT, os.O_RDWR)
    sample_while_needed(options.output, present, options.starter, Errors(folder / LOG if options.quiet else None))
    os.close(0)  # before os._exit unlocks the other: a process that can be present then must not find this monitor
    os._exit(0)
