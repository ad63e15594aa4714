"""What the system monitor costs: CPU time as a share of one core, on this machine and for a host of 96 cores.

    python tests/benchmarks/monitor_cost.py [--seconds 20]

The first table is the real process beside an idle one: its CPU time from /proc after its start (the start is listed separately).
The second calls what a sample calls, on a copy of this machine's /proc in which `stat` has 96 cores: it does not include the
kernel's time to write its files for N cores, nor the driver's for its GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "entrypoints"))

from launcher_observer.system.background import FOLDER, MONITOR, Presence  # noqa: E402
from launcher_observer.system.host_samples import HostSamples  # noqa: E402
from launcher_observer.system.monitor import INTERVALS, Writer  # noqa: E402

TICK = 1 / os.sysconf("SC_CLK_TCK")
CORES, SAMPLES, ROUNDS = 96, 400, 3


def cpu_seconds(pid: int) -> float:
    """User and system, proc(5); if there is one, the scheduler's own count, which has no ticks."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) * TICK


def real(interval: int, seconds: float, folder: Path) -> tuple[float, float, int]:
    """CPU seconds of the start, share of a core after it, and number of samples."""
    config = folder / "opt/ml/input/config"
    config.mkdir(parents=True)
    (config / "profilerconfig.json").write_text(json.dumps({"ProfilingIntervalInMilliseconds": interval}))
    os.environ["SAGEMAKER_BASE_DIR"] = str(folder / "opt/ml")
    presence = Presence(str(folder), quiet=False)
    time.sleep(1)
    monitor = int((folder / FOLDER / MONITOR).read_text())
    start, began = cpu_seconds(monitor), time.monotonic()
    time.sleep(seconds)
    share = (cpu_seconds(monitor) - start) / (time.monotonic() - began)
    presence.leave()
    files = list(folder.rglob("*.algo-1.json"))
    return start, share, sum(file.read_text().count("MemoryUsedPercent") for file in files)


def large_host(folder: Path) -> Path:
    """The sampled part of this machine's /proc, with many cores."""
    for name in ("meminfo", "diskstats", "net/dev", "self/cgroup", "pressure/cpu", "pressure/io", "pressure/memory"):
        if Path("/proc", name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/proc", name), folder / name)
    lines = Path("/proc/stat").read_text().splitlines()
    core = next(line for line in lines if line.startswith("cpu0 ")).removeprefix("cpu0 ")
    rest = [line for line in lines if not line.startswith("cpu")]
    (folder / "stat").write_text("\n".join([lines[0], *(f"cpu{number} {core}" for number in range(CORES)), *rest]))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    print(f"this machine, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    print("| interval ms | samples | CPU ms of the start | % of a core |")
    print("| ----------: | ------: | ------------------: | ----------: |")
    for interval in INTERVALS[:4]:
        with tempfile.TemporaryDirectory() as folder:
            start, share, samples = real(interval, options.seconds, Path(folder))
        print(f"| {interval:11} | {samples:7} | {1000 * start:19.0f} | {100 * share:11.2f} |")
    with tempfile.TemporaryDirectory() as temporary:
        host = HostSamples(large_host(Path(temporary)))
        writer = Writer(Path(temporary) / "out", "algo-1")
        rounds = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            for _ in range(SAMPLES):
                writer.write(time.time(), host.look(time.monotonic()))
            rounds.append((time.thread_time() - began) / SAMPLES)
        milliseconds = 1000 * statistics.median(rounds)
        size = writer.written / (ROUNDS * SAMPLES)
    print(f"\n{CORES} cores: {milliseconds:.2f} ms of CPU and {size / 1000:.1f} kB a sample\n")
    print("| interval ms | % of a core | MB an hour |\n| ----------: | ----------: | ---------: |")
    for interval in INTERVALS[:4]:
        print(f"| {interval:11} | {100 * milliseconds / interval:11.2f} | {size * 3.6 / interval:10.0f} |")


if __name__ == "__main__":
    main()
