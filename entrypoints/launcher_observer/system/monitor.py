"""The system monitor: one process a host that samples cores, memory, disks, network and GPUs in SageMaker Debugger's own format.

    python -m launcher_observer.system.monitor OUTPUT_FOLDER --node algo-1 --interval-ms 500 --parent PID

It is a process of its own, so that it neither takes the training's Python lock nor waits for it, and it can fail without harm:
whatever goes wrong is named once, on standard error. It ends with the process that started it, however that one ends.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher_observer.contract import node_name
from launcher_observer.system.host_samples import HostSamples, Key
from launcher_observer.system.nvml import Gpus

FOLDER = "profiler-output"
"""Below the host's output folder: what SageMaker's profiler readers take as the root."""

INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds that SageMaker allows:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ProfilerConfig.html (ProfilingIntervalInMilliseconds)"""

DEFAULT_INTERVAL = 500
"""SageMaker's own."""

FULL_RATE_BYTES = 256 * 2**20
"""So much is written at the full rate, and as much again at half of it, at a quarter … On the largest hosts (96 cores, 8 GPUs,
500 ms) each halving lasts twice as long as the one before, the first 80 min; 28 days, SageMaker's longest job, make 2.5 GB."""

FREE_BYTES = 2**30
"""Nothing is written where the disk has no more left than that: it is the checkpoints' and the model's."""

LONGEST_SLEEP = 1.0
"""Seconds until it looks again whether its parent lives."""

END_SECONDS = 5.0
"""For a monitor's end, which may still be starting."""

SHORTEST_SAMPLE = 0.05
"""Seconds; the kernel counts a core's time in hundredths."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def system_monitor(output: Path, local_rank: int, *, wanted: bool = True) -> Iterator[None]:
    """Sample this host while the body runs, from its first process alone.

    Args:
        output: the host's output folder.
        local_rank: this process's number on its host.
        wanted: false: nothing is sampled.
    """
    if local_rank != 0 or not wanted:
        yield
        return
    interval, why = interval_ms()
    print(f"system metrics every {interval} ms ({why}) in {output / FOLDER}", flush=True)
    command = [
        sys.executable,
        "-S",
        "-m",
        "launcher_observer.system.monitor",
        str(output.absolute()),
        "--node",
        node_name(),
    ]
    command += ["--interval-ms", str(interval), "--parent", str(os.getpid())]
    process = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],  # where it finds its own package
            start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError as error:
        print(f"no system metrics: {error}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a monitor to end, which first samples a run that was too short for a sample; kill it where it does not."""
    try:
        process.communicate(b"end\n", timeout=END_SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        process.kill()  # it holds nothing back: each sample is one write
        process.communicate()


def interval_ms(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Milliseconds between two samples, and why: as the job's profiling section says, which SageMaker hands on in a file."""
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
        return DEFAULT_INTERVAL, f"{interval} in {file.name} is none of {', '.join(map(str, INTERVALS))}"
    return interval, f"as {file.name} says"


class Writer:
    """Samples as JSON lines, a file a minute: system/incremental/YYYYMMDDHH/<second of the minute's begin>.algo-N.json, in UTC."""

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
            OSError: it could not be written; the next one is tried again.
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
    """Names each kind of error once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, what: str, error: Exception) -> None:
        if what not in self._reported:
            self._reported.add(what)
            with contextlib.suppress(OSError):  # nobody reads the log any more
                sys.stderr.write(f"system monitor: {what}: {error or type(error).__name__}\n")
                sys.stderr.flush()


def open_gpus(errors: Errors) -> Gpus | None:
    """The GPUs; None where this machine has no driver for any."""
    try:
        return Gpus()
    except OSError as error:
        if Path("/dev/nvidiactl").exists():  # there are GPUs, and a reason to wonder
            errors.report("no GPU metrics", error)
    except Exception as error:  # an older driver lacks a function
        errors.report("no GPU metrics", error)
    return None


def sample_until_the_end(output: Path, node: str, interval: float, parent: int) -> None:
    """Sample every `interval` seconds until standard input has something to say or process `parent` is no longer this one's parent."""
    errors, host = Errors(), HostSamples()
    gpus, writer = open_gpus(errors), Writer(output / FOLDER, node)
    with contextlib.suppress(Exception):
        host.look(time.monotonic())
    due, ending = time.monotonic() + interval, False
    while True:
        while not ending and (left := due - time.monotonic()) > 0:
            ending = bool(select.select([sys.stdin], [], [], min(left, LONGEST_SLEEP))[0])
            if os.getppid() != parent:
                return
        if ending:
            if writer.written:
                return
            time.sleep(SHORTEST_SAMPLE)
        values: dict[Key, float] = {}
        try:
            values |= host.look(time.monotonic())
        except Exception as error:  # a kernel's file that looks otherwise: what else there is goes on
            errors.report("no metrics of the cores, memory, disks and network", error)
        if gpus is not None:
            try:
                values |= gpus.look()
                for what, words in gpus.refused.items():
                    errors.report(f"no {what}", OSError(words))
            except Exception as error:
                errors.report("GPU metrics end", error)
                gpus = None
        try:
            writer.write(time.time(), values)
        except OSError as error:
            errors.report("not written", error)
        if ending:
            return
        due = max(due + slowed(interval, writer.written), time.monotonic())  # after a machine's sleep, go on from now


def slowed(interval: float, written: int) -> float:
    """Seconds between two samples, by the bytes written: doubled with each FULL_RATE_BYTES."""
    return interval * 2.0 ** (written // FULL_RATE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == options.parent:  # else it died before this
        sample_until_the_end(options.output, options.node, options.interval_ms / 1000, options.parent)


if __name__ == "__main__":
    main()
