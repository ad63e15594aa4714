"""The numbers of a run's hosts: busy cores, waits for disks and for cores."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from launcher.insight import windows
from launcher.insight.measurements import Host, Measurements, Series
from launcher.insight.step_evidence import StepEvidence

FEW_SAMPLES = 5
"""Fewer samples of a series than this say nothing about a run."""


class HostEvidence(StepEvidence):
    """Metrics of hosts while usual steps run, since shares of a step are of usual steps too; None: not measured.

    Args:
        slow: while outliers run, too.
    """

    def __init__(self, measurements: Measurements, *, slow: bool = False):
        super().__init__(measurements)
        self.slow = slow

    @property
    def remote(self) -> bool:
        """Whether other hosts make the training images."""
        return self.script is None and self.settings.get("worker_type") == "remote"

    @functools.cached_property
    def period(self) -> tuple[float, float]:
        """Unix seconds between which the steps ran; everything if no step was measured."""
        began = [
            s.ended[0] - s.seconds["step"][0] * windows.counts(s)[0] for s in self.ranks if np.isfinite(s.ended).all()
        ]
        if not began:
            return -np.inf, np.inf
        return float(min(began)), float(max(steps.ended[-1] for steps in self.ranks))

    def while_stepping(self, series: Series) -> Series:
        """A record from the start of the first step to the end of the last, pauses included: what grows, grows through them."""
        begin, end = self.period
        inside = (begin <= series.times) & (series.times <= end)
        return Series(series.times[inside], series.values[inside])

    @functools.cached_property
    def _at_work(self) -> tuple[float, float]:
        """Unix seconds of the first and the last sample in which a GPU computed: before, a run without timed steps installs, lists and
        compiles. All of its time if none did."""
        gpus = [series for host in self.training_hosts for series in host.gpus.values()]
        times = np.concatenate([series.times[series.values > 0] for series in gpus] or [np.zeros(0)])
        return (float(times.min()), float(times.max())) if len(times) else (-np.inf, np.inf)

    @functools.cached_property
    def _judged(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """((n,), (n,)) Unix seconds at which the usual windows begin and end, then the same for all steady ones, outliers included, on the
        first rank whose clock is known, as all step together. If no step was timed: the time in which GPUs computed, then all of it."""
        steps = next((steps for steps in self.ranks if np.isfinite(steps.ended).all()), None)
        if steps is None:
            return [(np.array([one]), np.array([other])) for one, other in (self._at_work, (-np.inf, np.inf))]
        began = steps.ended - np.nan_to_num(steps.seconds["step"]) * windows.counts(steps)
        chosen = [windows.steady(steps)] if self.slow else [windows.usual(steps), windows.steady(steps)]
        return [(began[each], steps.ended[each]) for each in chosen]

    def in_judged_steps(self, times: np.ndarray) -> np.ndarray:
        """(n,) which Unix seconds lie in usual steps: not in the first ones, which compile, nor in outliers, nor in pauses, which a window
        may hold. If these are fewer than FEW_SAMPLES, outliers count too: a short run may have hardly any other steps, as when many
        workers all restart. None if there are still as few: the samples of its start would instead show an idle device."""
        stalls = self.measurements.stalls if self.ranks else []
        paused_at, seconds = (np.array([getattr(stall, name) for stall in stalls]) for name in ("began", "seconds"))
        paused = windows.within(times, paused_at, paused_at + seconds)
        for began, ended in self._judged:
            inside: np.ndarray = windows.within(times, began, ended) & ~paused
            if inside.sum() >= FEW_SAMPLES:
                return inside
        return np.zeros(len(times), bool)

    def sampled(self, series: Series) -> np.ndarray:
        """The values of a series by which a run is judged: those in usual steps; none if they were sampled too rarely."""
        values: np.ndarray = series.values[self.in_judged_steps(series.times)]
        return values

    def during(self, series: Series) -> np.ndarray:
        """The same, or all values if there are none: for what does not judge a run, or what it does not affect, such as other programs."""
        values = self.sampled(series)
        return values if len(values) else series.values

    @functools.cached_property
    def training_hosts(self) -> tuple[Host, ...]:
        """The hosts that train, without those of other instance groups, which serve them and take no step."""
        stepping = {steps.host for steps in self.ranks}
        without_steps = {*self.measurements.hosts} if self.remote and stepping else set()
        serving = {*self.facts.get("serving_hosts", without_steps)} - stepping
        return tuple(host for name, host in self.measurements.hosts.items() if name not in serving)

    @functools.cached_property
    def serving_hosts(self) -> tuple[Host, ...]:
        """The other hosts, if they were watched."""
        training = {host.name for host in self.training_hosts}
        return tuple(host for name, host in self.measurements.hosts.items() if name not in training)

    @functools.cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The training hosts whose cores or GPUs were watched."""
        return tuple(host for host in self.training_hosts if host.cores or host.gpus)

    @property
    def recorded_hosts(self) -> int | None:
        """Number of hosts that train, by the run's plan; None: there is none."""
        known = self.facts.get("hosts")
        return known - len(self.facts.get("serving_hosts", ())) if isinstance(known, int) else None

    @functools.cached_property
    def ranks_each(self) -> float:
        """Training processes per host that trains, on average: those that recorded steps; on hosts whose record did not come back, the rest
        of the world size. Nodes that are watched one by one share a world, but each record has only its own host."""
        recorded = Counter(steps.host for steps in self.ranks)
        hosts = max(self.recorded_hosts or 0, len(recorded), len(self.hosts), 1)
        if len(recorded) == hosts:
            return recorded.total() / hosts
        return max(self.world_size or 1, recorded.total()) / hosts

    def usable_cores(self, host: Host) -> float:
        """Cores that the processes may use: by affinity and quota if known, else all that there are."""
        return float(host.usable_cores or len(host.cores) or 1)

    @functools.cached_property
    def _core_tables(self) -> dict[str, np.ndarray]:
        """By host: (cores, n) percent of computing in usual steps, cut to the shortest core's record; only hosts whose cores were watched.

        SageMaker's agent counts the wait for disks as use of a core; here it is not.
        """
        tables = {}
        for host in (*self.hosts, *self.serving_hosts):
            columns = [core.values for core in host.cores.values()]
            waits = [host.io_wait[name].values if name in host.io_wait else np.zeros(0) for name in host.cores]
            shortest = min([len(column) for column in columns] + [len(wait) for wait in waits if len(wait)], default=0)
            if shortest < FEW_SAMPLES:
                continue
            # the first core's times are all cores': chosen by its own, a column could slip by a sample at each window
            usual = self.in_judged_steps(next(iter(host.cores.values())).times[:shortest])
            if usual.any():
                pairs = zip(columns, waits)
                rows = [column[:shortest] - (wait[:shortest] if len(wait) else 0.0) for column, wait in pairs]
                tables[host.name] = np.clip(np.stack(rows)[:, usual], 0.0, 100.0)
        return tables

    @property
    def cores_measured(self) -> bool:
        return bool(self._watched)

    def busy_cores(self, host: Host) -> np.ndarray:
        """(n,) cores in use at each sample; (0,) if they were not watched."""
        table = self._core_tables.get(host.name)
        return np.zeros(0) if table is None else table.sum(axis=0) / 100

    @functools.cached_property
    def busy(self) -> float | None:
        """Mean share of the usable cores that was in use, over hosts, 0 to 1. A quota's cores count, not the machine's."""
        return self._busy(self.hosts)

    @functools.cached_property
    def serving_busy(self) -> float | None:
        """The same of the hosts that make the images for others."""
        return self._busy(self.serving_hosts)

    def _busy(self, hosts: Iterable[Host]) -> float | None:
        used = [(self.busy_cores(host), self.usable_cores(host)) for host in hosts]
        shares = [min(1.0, float(cores.mean()) / usable) for cores, usable in used if len(cores)]
        return float(np.mean(shares)) if shares else None

    @functools.cached_property
    def full(self) -> float | None:
        """Share of the samples in which nine tenths of the usable cores were in use, over hosts."""
        shares = [(self.busy_cores(host) >= 0.9 * self.usable_cores(host)).mean() for host in self._watched]
        return float(np.mean(shares)) if shares else None

    @functools.cached_property
    def saturated(self) -> float | None:
        """Share of the samples in which at least one core was at 95 % or more, over hosts; 100 % counts."""
        shares = [(self._core_tables[host.name].max(axis=0) >= 95).mean() for host in self._watched]
        return float(np.mean(shares)) if shares else None

    @property
    def _watched(self) -> list[Host]:
        return [host for host in self.hosts if host.name in self._core_tables]

    @functools.cached_property
    def waiting_cores(self) -> float | None:
        """Mean cores that wait for disks (I/O wait), over hosts."""
        means = (
            [float(values.mean()) / 100 for series in host.io_wait.values() if len(values := self.sampled(series))]
            for host in self.hosts
        )
        sums = [sum(each) for each in means if each]
        return float(np.mean(sums)) if sums else None

    @functools.cached_property
    def pressure(self) -> float | None:
        """Share of the time in which some process waited for a core (the kernel's pressure stall information), over hosts, 0 to 1."""
        means = [
            float(values.mean()) / 100
            for host in self.hosts
            for (_, name, _), series in host.other.items()
            if name == "CPUPressurePercent" and len(values := self.sampled(series))
        ]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def throttled(self) -> float | None:
        """Share of the time in which the cgroup's quota throttled processes, on the most throttled host, 0 to 1."""
        means = [
            min(1.0, float(values.mean()) / 100)
            for host in self.training_hosts
            if host.throttled is not None and len(values := self.sampled(host.throttled))
        ]
        return max(means) if means else None

    @functools.cached_property
    def cores_each(self) -> float | None:
        """Usable cores per training process: the host's over its processes, on the host that has fewest."""
        each = [
            self.usable_cores(host) / self.local_ranks(host) for host in self.hosts if host.cores or host.usable_cores
        ]
        return min(each) if each else None

    def local_ranks(self, host: Host) -> int:
        """Training processes on a host: its ranks, else one per GPU, else one."""
        return sum(steps.host == host.name for steps in self.ranks) or len(host.gpus) or 1
