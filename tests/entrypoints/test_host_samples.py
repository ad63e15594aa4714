"""What a look at a host's files says of its cores, disks, network and limits: on made-up files of either cgroup version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launcher_observer.system.host_samples import HostSamples

STAT = "cpu  0 0 0 0\ncpu0 {0} 0 0 {1} {2} 0 0 0 9 0\ncpu1 100 0 0 100 0 0 0 0 0 0\nctxt {3}\nprocs_running 7\n"
DISKS = """\
   7       0 loop0 900 0 900 0 900 0 900 0 0 0 0
 259       0 nvme0n1 {0} 0 {1} 0 {2} 0 {3} 0 0 0 0
 259       1 nvme0n1p1 {0} 0 {1} 0 {2} 0 {3} 0 0 0 0
   8       0 sda 1 0 8 0 1 0 8 0 0 0 0
   8       1 sda1 1 0 8 0 1 0 8 0 0 0 0
"""
NETWORK = "Inter-|\n face |\n    lo: 5 {0} 0 0 0 0 0 0 {0} 0\n  eth0:{0} 1 0 0 0 0 0 0 {1} 1 0\n"


def machine(proc: Path, busy, idle, waiting, switches, disk, network, pressure) -> None:
    """A machine's files at one moment."""
    texts = {
        "stat": STAT.format(busy, idle, waiting, switches),
        "meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  250 kB\nBuffers: 0 kB\n",
        "diskstats": DISKS.format(*disk),
        "net/dev": NETWORK.format(*network),
        "pressure/cpu": f"some avg10=1 avg60=0 avg300=0 total={pressure}\nfull avg10=0 total=0\n",
        "self/cgroup": "0::/job\n" if (proc / "v2").exists() else "4:memory:/job\n1:cpu,cpuacct:/job/inner\n",
    }
    for name, text in texts.items():
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text(text)


def cgroup(place: Path, **files: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_values_are_rates_and_shares_since_the_last_look(tmp_path, version, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    cgroup(groups)
    if version == 2:
        cgroup(proc, v2="")
        cgroup(groups, cgroup__controllers="cpu memory")
        cgroup(groups / "job", cpu__max="150000 100000", memory__max="512000", memory__current="384000")
        cgroup(groups / "job", memory__stat="anon 1\ninactive_file 128000\n")
        counted = groups / "job"
    else:
        cgroup(groups / "cpu/job/inner", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
        cgroup(groups / "cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
        cgroup(groups / "memory/job", memory__limit_in_bytes="512000", memory__usage_in_bytes="384000")
        cgroup(groups / "memory/job", memory__stat="inactive_file 0\ntotal_inactive_file 128000\n")
        counted = groups / "cpu/job"
    cgroup(counted, cpu__stat="nr_periods 10\nnr_throttled 2\n")
    machine(proc, 100, 100, 0, 1000, (10, 100, 20, 200), (1000, 2000), 10**6)
    host = HostSamples(proc, groups)
    host.look(50.0)
    cgroup(counted, cpu__stat="nr_periods 14\nnr_throttled 3\n")
    machine(proc, 160, 130, 10, 1500, (40, 120, 40, 240), (6000, 2000), 10**6 + 250_000)
    values = host.look(50.5)
    assert values["cpu", "cpu0", "CPUUtilization"] == pytest.approx(70)  # 60 computing and 10 waiting of 100
    assert values["cpu", "cpu0", "I/OWaitPercentage"] == pytest.approx(10)
    assert values["cpu", "cpu1", "CPUUtilization"] == 0
    assert values["i/o", "IOPS", ""] == (30 + 20) / 0.5
    assert values["i/o", "ReadThroughputInBytesPerSecond", ""] == 20 * 512 / 0.5
    assert values["i/o", "WriteThroughputInBytesPerSecond", ""] == 40 * 512 / 0.5
    assert values["network", "ReceiveBytesPerSecond", "Algorithm"] == 5000 / 0.5
    assert values["network", "TransmitBytesPerSecond", "Algorithm"] == 0
    assert values["tasks", "RunnableTasks", ""] == 7 and values["tasks", "ContextSwitchesPerSecond", ""] == 1000
    assert values["pressure", "CPUPressurePercent", ""] == pytest.approx(50)
    assert values["cgroup", "CPUThrottledPercent", ""] == 25
    assert values["cgroup", "UsableCores", ""] == 1.5
    assert values["cgroup", "MemoryLimitBytes", ""] == 512_000
    assert values["memory", "MemoryUsedPercent", ""] == 50


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    machine(tmp_path / "proc", 1, 1, 1, 1, (1, 1, 1, 1), (1, 1), 1)
    values = HostSamples(tmp_path / "proc", tmp_path / "none").look(1.0)
    assert values["cgroup", "UsableCores", ""] == 3 and values["memory", "MemoryUsedPercent", ""] == 75
    assert not {("cgroup", "CPUThrottledPercent", ""), ("cgroup", "MemoryLimitBytes", "")} & set(values)
