"""What a host is doing, from the kernel's files: its cores, memory, disks, network and limits. Standard library only.

The names are those that SageMaker's own agent writes (Type, Name, Dimension); metrics that it has no name for have their own Type.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from launcher_observer.system.host import cgroup_quotas

SECTOR = 512
"""Bytes; /proc/diskstats counts in these, whatever the disk's own are: https://docs.kernel.org/admin-guide/iostats.html"""

NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
"""Block devices that lie in memory or on other devices, whose bytes would count twice."""

NOT_NETWORK = ("lo", "docker", "br-", "veth", "virbr", "ifb", "tun", "tap")
"""Interfaces within this machine."""

Key = tuple[str, str, str]
"""Type, Name, Dimension."""

LIMITS_SECONDS = 10.0
"""Between two reads of the cgroup's limits, which seldom change."""

IDLE, IO_WAIT, COUNTED = 3, 4, 8
"""Of a core's times in /proc/stat, proc(5): user nice system idle iowait irq softirq steal; guest time is in user's already."""


class Cgroup(NamedTuple):
    """Files of one control group, version 1 or 2: https://docs.kernel.org/admin-guide/cgroup-v2.html"""

    cpu: Path
    memory: Path
    version: int


class HostSamples:
    """Values since the last look. Rates and percentages are over that time; what this machine does not report is left out."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        """
        Args:
            proc, cgroups: where they are mounted.
        """
        self._proc, self._cgroups = proc, cgroups
        self._groups = list(_own_groups(proc, cgroups))
        self._before: dict[str, float] = {}
        self._cores: dict[str, list[int]] = {}
        self._affinity = len(os.sched_getaffinity(0))
        self._limits: tuple[float, int | None] = (self._affinity, None)
        self._limits_until = float("-inf")

    def look(self, now: float) -> dict[Key, float]:
        """The values since the last call; those of the first call are of no use.

        Args:
            now: seconds of any steady clock.
        """
        seconds = now - self._before.get("now", now)
        self._before["now"] = now
        values = dict(self._core_values(seconds))
        if now >= self._limits_until:
            cores = min([self._affinity, *cgroup_quotas(self._cgroups, self._proc / "self/cgroup")])
            self._limits, self._limits_until = (cores, self._memory_limit()), now + LIMITS_SECONDS
        usable_cores, memory_limit = self._limits
        values |= self._memory_value(memory_limit)
        values |= self._rates("i/o", "", self._disk_counts(), seconds)
        values |= self._rates("network", "Algorithm", self._network_counts(), seconds)
        values |= self._pressures(seconds)
        throttled = self._throttled_percent()
        if throttled is not None:
            values["cgroup", "CPUThrottledPercent", ""] = throttled
        values["cgroup", "UsableCores", ""] = usable_cores
        if memory_limit is not None:
            values["cgroup", "MemoryLimitBytes", ""] = memory_limit
        return values

    def _core_values(self, seconds: float) -> Iterator[tuple[Key, float]]:
        """Each core's share of time not idle, and waiting for a disk: as with SageMaker's agent, the first includes the second.
        Also how many tasks were ready to run, and the rate of context switches."""
        tasks: dict[str, float] = {}
        for line in (self._proc / "stat").read_bytes().split(b"\n"):
            if line.startswith(b"cpu") and line[3:4] != b" ":
                fields = line.split()
                name, times = fields[0].decode(), [int(field) for field in fields[1 : COUNTED + 1]]
                before = self._cores.get(name, times)
                self._cores[name] = times
                total = sum(times) - sum(before)
                if total > 0:
                    busy = 100 - 100 * (times[IDLE] - before[IDLE]) / total
                    waiting = 100 * (times[IO_WAIT] - before[IO_WAIT]) / total  # proc(5): it may decrease
                else:
                    busy = waiting = 0.0
                yield ("cpu", name, "CPUUtilization"), min(100.0, max(0.0, busy))
                yield ("cpu", name, "I/OWaitPercentage"), min(100.0, max(0.0, waiting))
            elif line.startswith((b"ctxt ", b"procs_running ")):
                counter, count = line.split()
                tasks[counter.decode()] = int(count)
        if "procs_running" in tasks:
            yield ("tasks", "RunnableTasks", ""), tasks["procs_running"]
        if "ctxt" in tasks:
            yield ("tasks", "ContextSwitchesPerSecond", ""), self._rate("ctxt", tasks["ctxt"], seconds)

    def _memory_value(self, limit: int | None) -> dict[Key, float]:
        """Used share of the machine's memory, or of the container's if that has less. Reclaimable memory is not used."""
        if limit is not None:
            for group in self._groups:
                used = _number(group.memory / ("memory.current" if group.version == 2 else "memory.usage_in_bytes"))
                if used is not None:
                    name = "inactive_file" if group.version == 2 else "total_inactive_file"
                    idle = _table(group.memory / "memory.stat").get(name, 0)
                    return {("memory", "MemoryUsedPercent", ""): min(100.0, 100 * max(0.0, used - idle) / limit)}
        values = self._meminfo()
        if "MemAvailable" not in values:
            return {}
        return {("memory", "MemoryUsedPercent", ""): 100 - 100 * values["MemAvailable"] / values["MemTotal"]}

    def _meminfo(self) -> dict[str, float]:
        """kB by name, of the first five lines of /proc/meminfo."""
        lines = (line.partition(b":") for line in (self._proc / "meminfo").read_bytes().split(b"\n")[:5])
        return {name.decode(): float(rest.split()[0]) for name, _, rest in lines if rest}

    def _disk_counts(self) -> dict[str, float]:
        """Operations and bytes of all disks since the start of the machine."""
        counts = {"IOPS": 0.0, "ReadThroughputInBytesPerSecond": 0.0, "WriteThroughputInBytesPerSecond": 0.0}
        try:
            lines = (self._proc / "diskstats").read_text(encoding="ascii").splitlines()
        except OSError:
            return {}
        whole: list[str] = []
        for line in lines:
            fields = line.split()
            name = fields[2]
            if name.startswith(NOT_DISKS) or any(_is_partition(name, disk) for disk in whole):
                continue
            whole.append(name)
            counts["IOPS"] += int(fields[3]) + int(fields[7])
            counts["ReadThroughputInBytesPerSecond"] += int(fields[5]) * SECTOR
            counts["WriteThroughputInBytesPerSecond"] += int(fields[9]) * SECTOR
        return counts

    def _network_counts(self) -> dict[str, float]:
        """Bytes through all interfaces that lead out of this machine, since they came up."""
        try:
            lines = (self._proc / "net/dev").read_text(encoding="ascii", errors="replace").splitlines()[2:]
        except OSError:
            return {}
        received = sent = 0
        for name, _, rest in (line.partition(":") for line in lines):
            if not name.strip().startswith(NOT_NETWORK):
                fields = rest.split()
                received, sent = received + int(fields[0]), sent + int(fields[8])
        return {"ReceiveBytesPerSecond": received, "TransmitBytesPerSecond": sent}

    def _rates(self, kind: str, dimension: str, counts: dict[str, float], seconds: float) -> dict[Key, float]:
        return {(kind, name, dimension): self._rate(name, count, seconds) for name, count in counts.items()}

    def _rate(self, name: str, count: float, seconds: float) -> float:
        """A counter's rate per second since the last look; 0 if it was reset, as when an interface went and came back."""
        grown = count - self._before.get(name, count)
        self._before[name] = count
        return grown / seconds if seconds > 0 and grown > 0 else 0.0

    def _pressures(self, seconds: float) -> dict[Key, float]:
        """Share of time in which some task waited for a core, a disk or memory, as the kernel itself counts it.
        https://docs.kernel.org/accounting/psi.html"""
        found: dict[Key, float] = {}
        for name, said in (
            ("cpu", "CPUPressurePercent"),
            ("io", "IOPressurePercent"),
            ("memory", "MemoryPressurePercent"),
        ):
            try:
                line = (self._proc / "pressure" / name).read_text(encoding="ascii").partition("\n")[0]
            except OSError:
                continue
            microseconds = int(line.rpartition("total=")[2])
            found["pressure", said, ""] = min(100.0, self._rate(said, microseconds / 1e4, seconds))
        return found

    def _throttled_percent(self) -> float | None:
        """Share of the quota's periods in which it throttled tasks, in the most throttled group; None: not counted."""
        shares = []
        for group in self._groups:
            counts = _table(group.cpu / "cpu.stat")
            if "nr_periods" in counts:
                name = str(group.cpu)
                before = self._before.get(f"throttled {name}", counts["nr_throttled"])
                periods = counts["nr_periods"] - self._before.get(f"periods {name}", counts["nr_periods"])
                held = counts["nr_throttled"] - before
                self._before |= {f"periods {name}": counts["nr_periods"], f"throttled {name}": counts["nr_throttled"]}
                shares.append(min(100.0, 100 * held / periods) if periods > 0 else 0.0)
        return max(shares, default=None)

    def _memory_limit(self) -> int | None:
        """Bytes that this container may hold; None if that is the whole machine's memory."""
        files = ("memory.limit_in_bytes", "memory.max")
        limits = [_number(group.memory / files[group.version - 1]) for group in self._groups]
        machine = self._meminfo().get("MemTotal", float("inf")) * 1024
        return min((int(limit) for limit in limits if limit is not None and limit < machine), default=None)


def _own_groups(proc: Path, mounted: Path) -> Iterator[Cgroup]:
    """This process's control groups that are visible from here, the innermost first."""
    own: dict[str, str] = {}
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    if (mounted / "cgroup.controllers").is_file():  # version 2 alone
        for place in _upwards(mounted, own.get("", "/")):
            yield Cgroup(place, place, 2)
        return
    cpu = list(_upwards(mounted / "cpu", own.get("cpu", "/")))
    memory = list(_upwards(mounted / "memory", own.get("memory", "/")))
    for index in range(max(len(cpu), len(memory))):
        yield Cgroup(cpu[min(index, len(cpu) - 1)], memory[min(index, len(memory) - 1)], 1)


def _upwards(mounted: Path, path: str) -> Iterable[Path]:
    """A group's folder and its parents; in a container the path may exist only outside."""
    place = mounted / path.strip("/")
    while place != mounted:
        if place.is_dir():
            yield place
        place = place.parent
    yield mounted


def _is_partition(name: str, disk: str) -> bool:
    """Whether sda1 or nvme0n1p1 is a partition of sda or nvme0n1, which precedes it in /proc/diskstats."""
    rest = name[len(disk) :]
    return name.startswith(disk) and rest.removeprefix("p").isdigit()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> float | None:
    """A file's number; None if it has none."""
    text = _text(file)
    return float(text) if text.isdigit() else None


def _table(file: Path) -> dict[str, float]:
    """A file's lines `name number`."""
    pairs = (line.partition(" ") for line in _text(file).splitlines())
    return {name: float(number) for name, _, number in pairs if number.strip().isdigit()}
