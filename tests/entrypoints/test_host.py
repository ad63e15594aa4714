"""What this host lets a process have: cores by binding and by a container's quota."""

from __future__ import annotations

import os

import pytest
from launcher_observer.system import host
from launcher_observer.system.host import available_memory, cgroup_quotas, usable_cores

from .control_groups import groups

V1, QUOTA, PERIOD = "11:memory:/a\n4:cpu,cpuacct:{}\n1:name=systemd:/a\n", "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("own", "files", "quotas"),
    [
        ("0::/kubepods/pod1\n", {"kubepods/pod1/cpu.max": "150000 100000"}, [1.5]),
        ("0::/\n", {"cpu.max": "50000 100000"}, [0.5]),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "90000 10000"}, [4, 9]),
        ("0::/../../of/the/host\n", {"cpu.max": "300000 100000"}, [3]),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, []),
        ("0::/a\n", {"a/cpu.max": ""}, []),
        ("0::/a\n", {}, []),
        (V1.format("/docker/1"), {f"cpu/docker/1/{QUOTA}": "250000", f"cpu/docker/1/{PERIOD}": "100000"}, [2.5]),
        (V1.format("/docker/1"), {f"cpu/{QUOTA}": "200000", f"cpu/{PERIOD}": "50000"}, [4]),
        (V1.format("/docker/1"), {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}, []),
        ("1:cpuset:/a\n0::/a\n", {"cpuset/a/cpu.cfs_quota_us": "1", "cpuset/a/cpu.cfs_period_us": "1", "a/cpu.max": "200000 100000"}, [2]),
    ],
)  # fmt: skip
def test_quotas_of_containers_of_either_version_are_found_also_above_the_own_group(tmp_path, own, files, quotas):
    assert list(cgroup_quotas(**groups(tmp_path, own, **files))) == quotas


def test_where_there_are_no_control_groups_there_is_no_quota(tmp_path):
    assert list(cgroup_quotas(tmp_path / "none", tmp_path / "neither")) == []


@pytest.mark.parametrize(("bound", "quota", "cores"), [(8, None, 8), (8, 2.5, 2.5), (2, 16, 2), (1, 0.5, 0.5)])
def test_usable_cores_are_those_that_the_process_is_bound_to_or_fewer_by_its_quota(machine, bound, quota, cores):
    machine(bound, quota)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("max", 8_000_000_000),
        (16_000_000_000, 5_000_000_000),
        (13_000_000_000, 2_000_000_000),
        (64_000_000_000, 8_000_000_000),
    ],
)
def test_memory_that_a_containers_files_took_and_nobody_reads_is_there_to_be_had(tmp_path, monkeypatch, limit, left):
    monkeypatch.setattr(host, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:       64000000 kB\nMemAvailable:    7812500 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("14000000000\n")
    (tmp_path / "memory.stat").write_text("anon 9000000000\nactive_file 2000000000\ninactive_file 3000000000\n")
    assert available_memory() == left


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process is bound to cores on Linux")
def test_a_process_that_is_really_bound_to_a_core_has_one():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, before)
