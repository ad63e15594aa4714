"""How long reading system metrics takes, and how much memory: an hour of a large host, and a week of several, thinned.

    python tests/benchmarks/reading.py [--minutes 60] [--week]

It writes files as SageMaker's agent does for a host with 96 cores and 8 GPUs at 500 ms (one file per minute, 218 lines per sample) and
reads them with `launcher.insight.measurements.read` in its own process, beside smdebug's method: line by line.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORES, GPUS, INTERVAL = 96, 8, 0.5
BEGIN = 1_795_000_020
ROUNDS = 3

SERIES = [
    *(
        ("cpu", f"cpu{core}", dimension)
        for core in range(CORES)
        for dimension in ("CPUUtilization", "I/OWaitPercentage")
    ),
    *(
        ("gpu", f"gpu{gpu}", dimension)
        for gpu in range(GPUS)
        for dimension in ("GPUUtilization", "GPUMemoryUtilization")
    ),
    ("memory", "MemoryUsedPercent", ""),
    *(("i/o", name, "") for name in ("IOPS", "ReadThroughputInBytesPerSecond", "WriteThroughputInBytesPerSecond")),
    *(
        ("network", f"{way}BytesPerSecond", kind)
        for way in ("Receive", "Transmit")
        for kind in ("Algorithm", "Platform")
    ),
]

READ = """
import json, resource, sys, time
from launcher.insight.measurements import read
began = time.perf_counter()
found = read(sys.argv[1])
seconds = time.perf_counter() - began
kinds = [host.cores | {f"wait {k}": v for k, v in host.io_wait.items()} | host.gpus for host in found.hosts.values()]
print(json.dumps({"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "series": sum(map(len, kinds)), "samples": len(next(iter(kinds[0].values())).times), "reported": found.sampled}))
"""

LINE_BY_LINE = """
import json, pathlib, resource, sys, time
began, series = time.perf_counter(), {}
for file in sorted(pathlib.Path(sys.argv[1]).rglob("*.json")):
    for line in open(file):
        event = json.loads(line)
        series.setdefault((event["NodeId"], event["Name"], event["Dimension"]), []).append((event["Timestamp"], event["Value"]))
print(json.dumps({"seconds": time.perf_counter() - began, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "series": len(series), "samples": len(next(iter(series.values()))), "reported": None}))
"""


def write(folder: Path, minutes: int, hosts: int = 1) -> tuple[int, int]:
    """Write `minutes` of `hosts` hosts; returns lines and bytes. Minutes share numbers and differ in their times."""
    source = random.Random(0)
    values = [[f"{source.uniform(0, 100):.2f}" for _ in SERIES] for _ in range(int(60 / INTERVAL))]
    lines = size = 0
    for host in range(1, hosts + 1):
        for minute in range(BEGIN, BEGIN + 60 * minutes, 60):
            text = "".join(
                f'{{"Type":"{kind}","Name":"{name}","Dimension":"{dimension}","Value":{value},'
                f'"NodeId":"algo-{host}","Timestamp":{minute + index * INTERVAL:.6f}}}\n'
                for index, row in enumerate(values)
                for (kind, name, dimension), value in zip(SERIES, row)
            )
            place = folder / "system/incremental" / time.strftime("%Y%m%d%H", time.gmtime(minute))
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{minute}.algo-{host}.json").write_text(text)
            lines, size = lines + len(SERIES) * len(values), size + len(text)
    return lines, size


def measured(code: str, folder: Path) -> dict:
    """The output of one of the programs above, run in its own process."""
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument(
        "--week", action="store_true", help="also a week of 4 hosts, 128 GB as they count: links to the hour"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "profiler-output"
        lines, size = write(folder, options.minutes)
        print(f"{options.minutes} minutes of {CORES} cores and {GPUS} GPUs: {lines:,} lines, {size / 1e6:.0f} MB\n")
        print(f"| {'reader':<22} | seconds | lines a second | peak MiB |")
        print(f"| {'-' * 22} | ------: | -------------: | -------: |")
        found: dict[str, list[dict]] = {"read": [], "json.loads of each line": []}
        for _ in range(ROUNDS):
            for name, code in zip(found, (READ, LINE_BY_LINE)):
                found[name].append(measured(code, folder))
        for name, runs in found.items():
            seconds, mib = (statistics.median(run[what] for run in runs) for what in ("seconds", "mib"))
            print(f"| {name:<22} | {seconds:7.1f} | {lines / seconds:14,.0f} | {mib:8.0f} |")
        if options.week:
            week = link_a_week(folder, Path(temporary) / "week/profiler-output")
            run = measured(READ, week)
            print(f"\na week of 4 such hosts: {run['seconds']:.1f} s, peak {run['mib']:.0f} MiB; {run['reported']}")
        shutil.rmtree(folder)


def link_a_week(hour: Path, week: Path) -> Path:
    """4 hosts × 7 days of minutes, all of them the same files."""
    minutes = sorted(hour.rglob("*.json"))
    for host in range(1, 5):
        for number in range(7 * 24 * 60):
            minute = BEGIN + 60 * number
            place = week / "system/incremental" / time.strftime("%Y%m%d%H", time.gmtime(minute))
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{minute}.algo-{host}.json").hardlink_to(minutes[number % len(minutes)])
    return week


if __name__ == "__main__":
    main()
